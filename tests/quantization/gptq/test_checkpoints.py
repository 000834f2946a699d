"""`quantize --rounding gptq` on tiny models, against inputs captured by brute force.

The reference shares no code with the product: plain forward passes whose inputs are kept, Hessians
in float64, and a rounding that solves for every optimal update from scratch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import zoo
from tests.cli.program import fail, succeed
from tests.quantization.stacked import STACKED
from tests.truth import brute_force

NUM_SEQUENCES, SEQ_LEN = 40, 32
EXPERT = re.compile(r"(.*layers\.\d+\.\w+\.experts)\.(\d+)\.(\w+)")
DOWN = {"w2", "down_proj"}
FAMILIES = ["llama", "phi3", "gpt_neox", "opt", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next"]


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (SEQ_LEN,), generator=generator) for _ in range(NUM_SEQUENCES)]


def write_data(folder: Path) -> Path:
    rows = [json.dumps({"input_ids": sequence.tolist()}) for sequence in draw()]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def command(model: Path, folder: Path, scheme: str = "w8a16", out: str = "out") -> tuple[Any, ...]:
    data = folder / "rows.jsonl"
    if not data.exists():
        write_data(folder)
    text = ("--data", data, "--samples", NUM_SEQUENCES, "--seq-len", SEQ_LEN, "--dtype", "float32")
    made = ("quantize", model, "--scheme", scheme, "--rounding", "gptq", "--out", folder / out)
    return (*made, *text)


@dataclass
class Inputs:
    """The inputs of a linear, sequence by sequence: [tokens, in] each."""

    rows: list[np.ndarray]

    def hessian(self, *, held: bool) -> np.ndarray:
        chosen = [x for i, x in enumerate(self.rows) if (i % 8 == 7) is held and len(x)]
        size = max(x.shape[1] for x in self.rows if len(x))
        if not chosen:
            return np.zeros((size, size))
        x = np.concatenate(chosen).astype(np.float64)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        return x.T @ x

    @property
    def num_used(self) -> int:
        return sum(len(x) for i, x in enumerate(self.rows) if i % 8 != 7)


def capture(model: Any) -> dict[str, Inputs]:
    """Keep the inputs of all linears, those of experts by the paths of single experts."""
    truth = brute_force.run(model, draw())
    found = {name: Inputs(rows) for name, rows in truth.inputs.items()}
    modules = dict(model.named_modules())
    for path, routed in truth.routed.items():
        each = [brute_force.run_experts(modules[path], [one]) for one in routed]
        for expert in range(modules[path].down_proj.shape[0]):
            for kind in ("first", "down"):
                rows = [getattr(one, kind).get(expert, np.zeros((0, 0))) for one in each]
                found[f"{path}.{expert}.{kind}"] = Inputs(rows)
    return found


def find_inputs(inputs: dict[str, Inputs], module: str) -> Inputs | None:
    """Find the inputs of a linear of the checkpoint."""
    match = EXPERT.fullmatch(module)
    if match is None:
        return inputs.get(module)
    path, expert, projection = match.groups()
    path = re.sub(r"\.block_sparse_moe\.", ".mlp.", path)
    return inputs[f"{path}.{expert}.{'down' if projection in DOWN else 'first'}"]


def round_e4m3(values: np.ndarray) -> np.ndarray:
    clipped = np.clip(values, -448, 448).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def solve(weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Round column by column; before each, the open columns are the least-squares optimum."""
    size = weight.shape[1]
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(size)
    order = np.argsort(-np.diag(hessian), kind="stable")
    scale = np.broadcast_to(scale, weight.shape)
    codes = np.zeros_like(weight)
    for position, column in enumerate(order):
        done, left = order[:position], order[position:]
        lost = weight[:, done] - codes[:, done] * scale[:, done]
        shift = np.linalg.solve(damped[np.ix_(left, left)], damped[np.ix_(left, done)] @ lost.T)
        codes[:, column] = round_e4m3((weight[:, column] + shift[0]) / scale[:, column])
    return codes


def error(difference: np.ndarray, hessian: np.ndarray) -> float:
    return float(np.einsum("oi,ij,oj->", difference, hessian, difference))


def compare(
    weights: dict[str, np.ndarray], inputs: dict[str, Inputs], out: Path, report: Any
) -> int:
    """Compare the codes and the report of every linear; returns how many GPTQ rounded."""
    written = load_file(out / "model.safetensors")
    rounded = {item["module"]: item for item in report["rounded"]}
    assert list(rounded) == report["quantized"]
    same, chosen = [], 0
    for module, item in rounded.items():
        weight = weights[module].astype(np.float64)
        scale = written[f"{module}.weight_scale"].numpy().astype(np.float64).reshape(-1, 1)
        codes = written[f"{module}.weight"].to(torch.float64).numpy()
        nearest = round_e4m3(weight / scale)
        seen = find_inputs(inputs, module)
        if seen is None or seen.num_used < 256:
            assert item["rounding"] == "nearest", module
            assert item["why"], module
            np.testing.assert_array_equal(codes, nearest, err_msg=module)
            continue
        assert item["tokens"] == seen.num_used, module
        expected, held = solve(weight, seen.hessian(held=False), scale), seen.hessian(held=True)
        errors = [error(c * scale - weight, held) for c in (expected, nearest)]
        signal = error(weight, held)
        for key, value in zip(("gptq_db", "nearest_db"), errors, strict=True):
            assert item[key] == pytest.approx(10 * np.log10(signal / value), abs=0.05), module
        is_better = errors[0] < errors[1]
        assert item["rounding"] == ("gptq" if is_better else "nearest"), module
        chosen += is_better
        same.append((codes == (expected if is_better else nearest)).mean())
        if is_better:
            assert (codes != nearest).any(), module
    assert np.mean(same) > 0.998
    assert np.min(same) > 0.95
    return chosen


def by_module(folder: Path) -> dict[str, np.ndarray]:
    tensors = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".weight"): tensor.float().numpy() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_is_rounded_by_its_own_inputs(family: str, tmp_path: Path) -> None:
    model = zoo.save(family, tmp_path / "model")
    report = succeed(*command(tmp_path / "model", tmp_path), "--json").json
    inputs = capture(model)
    chosen = compare(by_module(tmp_path / "model"), inputs, tmp_path / "out", report)
    assert chosen > len(report["rounded"]) * 0.6
    assert not (tmp_path / "out.rounding").exists()
