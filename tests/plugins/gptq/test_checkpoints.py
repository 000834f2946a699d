"""`fp8calib gptq` on tiny models, against inputs captured by brute force.

The reference shares no code with the product: plain forward passes whose inputs are kept, Hessians
in float64, and a rounding that solves for every optimal update from scratch.
"""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration import journal
from fp8calib.plugins.gptq.core import factorise, round_compensated
from fp8calib.plugins.gptq.layer_rounding import LayerRounding
from fp8calib.plugins.gptq.rounded_codes import RoundedCodes
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import fail, run, snapshot, succeed
from tests.kit.minutes import in_minutes, takes_minutes
from tests.quantization.stacked import STACKED, find_experts
from tests.truth import brute_force

NUM_SEQUENCES, SEQ_LEN = 40, 32
EXPERT = re.compile(r"(.*layers\.\d+\.\w+\.experts)\.(\d+)\.(\w+)")
FAMILIES = ["llama", "mixtral", "qwen3_vl_moe"]
FAMILIES += in_minutes(
    "gpt_neox", "qwen3_next", "phi3", "opt", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text"
)
"""qwen3_vl_moe is published with stacks of experts [in, out], below a tower of vision."""


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (SEQ_LEN,), generator=generator) for _ in range(NUM_SEQUENCES)]


def command(
    model: Path, folder: Path, scheme: str = "w8a16", out: str = "out", *, batch_size: int = 10
) -> tuple[Any, ...]:
    """Write the text of draw(), unless there is one, and give the command."""
    data = folder / "rows.jsonl"
    if not data.exists():
        write_rows(data, [{"input_ids": sequence.tolist()} for sequence in draw()])
    made = ("gptq", model, "--scheme", scheme, "--out", folder / out)
    text = ("--data", data, "--samples", NUM_SEQUENCES, "--seq-len", SEQ_LEN, "--dtype", "float32")
    return (*made, *text, "--batch-size", batch_size, "--allow-unservable")


@dataclass
class Inputs:
    """The inputs of a linear, sequence by sequence: [tokens, in] each."""

    rows: list[np.ndarray]

    def hessian(self, *, held: bool) -> np.ndarray:
        """Sum x x^T over used or held-back tokens, whose lengths shrink to their fourth root."""
        chosen = [x for i, x in enumerate(self.rows) if (i % 8 == 7) is held and len(x)]
        size = max(x.shape[1] for x in self.rows if len(x))
        if not chosen:
            return np.zeros((size, size))
        x = np.concatenate(chosen).astype(np.float64)
        x /= np.linalg.norm(x, axis=1, keepdims=True) ** 0.75
        return x.T @ x

    @property
    def num_used(self) -> int:
        """Count the tokens that are not held back."""
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
    return inputs.get(f"{path}.{expert}.{'down' if projection in {'w2', 'down_proj'} else 'first'}")


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


def list_scales(weight: np.ndarray) -> np.ndarray:
    """List the scales that a row may have: [8, out, 1]."""
    smallest = np.abs(weight).max(1, keepdims=True) / 448
    return np.stack([smallest * 2 ** (step / 8) for step in range(8)])


def find_scale(weight: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Try eight scales for each row: the weighted error of rounding to nearest is smallest."""
    tried = list_scales(weight)
    errors = [((round_e4m3(weight / s) * s - weight) ** 2 * np.diag(hessian)).sum(1) for s in tried]
    return tried[np.argmin(errors, 0), np.arange(len(weight))]


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
        smallest = list_scales(weight)[0].astype(np.float32).astype(np.float64)
        nearest = round_e4m3(weight / smallest)
        seen = find_inputs(inputs, module)
        if seen is None or seen.num_used < 256:
            assert item["rounding"] == "nearest", module
            assert item["why"], module
            np.testing.assert_array_equal(codes, nearest, err_msg=module)
            np.testing.assert_array_equal(scale, smallest, err_msg=module)
            continue
        assert item["tokens"] == seen.num_used, module
        used, held = seen.hessian(held=False), seen.hessian(held=True)
        chosen_scale = find_scale(weight, used)
        expected = solve(weight, used, chosen_scale)
        pairs = ((expected, chosen_scale), (nearest, smallest))
        errors = [error(c * by - weight, held) for c, by in pairs]
        signal = error(weight, held)
        for key, value in zip(("gptq_db", "nearest_db"), errors, strict=True):
            assert item[key] == pytest.approx(10 * np.log10(signal / value), abs=0.05), module
        is_better = errors[0] < errors[1]
        assert item["rounding"] == ("gptq" if is_better else "nearest"), module
        chosen += is_better
        same.append((codes == (expected if is_better else nearest)).mean())
        same_scales = np.isclose(scale, chosen_scale if is_better else smallest, rtol=1e-6, atol=0)
        assert same_scales.mean() > 0.95, module
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


def cut_stacks(model: Any) -> dict[str, np.ndarray]:
    """Cut the stacks of experts in memory into the weights of single experts, [out, in]."""
    found = {}
    for path, experts in find_experts(model).items():
        for expert, (both, down) in enumerate(
            zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True)
        ):
            gate, up = both.chunk(2)
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                found[f"{path}.{expert}.{name}"] = weight.numpy()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_is_rounded_by_its_own_inputs(family: str, tmp_path: Path) -> None:
    model = STACKED[family].build(family) if family in STACKED else zoo.build(family)
    save = STACKED[family].save if family in STACKED else type(model).save_pretrained
    save(model, tmp_path / "model")
    report = succeed(*command(tmp_path / "model", tmp_path), "--json").json
    weights = by_module(tmp_path / "model")
    stacked = cut_stacks(model) if family in STACKED else {}
    weights |= stacked
    chosen = compare(weights, capture(model), tmp_path / "out", report)
    assert chosen > len(report["rounded"]) * 0.6
    assert stacked.keys() <= {item["module"] for item in report["rounded"]}
    assert not (tmp_path / "out.rounding").exists()


def test_experts_that_cannot_be_observed_are_rounded_to_nearest_and_listed(tmp_path: Path) -> None:
    """Llama 4's experts multiply by their weights themselves."""
    family = STACKED["llama4_text"]
    family.save(family.build("llama4_text"), tmp_path / "model")
    outcome = succeed(*command(tmp_path / "model", tmp_path))
    assert "rounded to nearest (no linear of the decoder layers reads it): " in outcome.out
    options = ("--scheme", "w8a16", "--allow-unservable", "--out", tmp_path / "nearest")
    succeed("quantize", tmp_path / "model", *options)
    found, nearest = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "nearest"))
    same = {n for n in found if torch.equal(found[n].float(), nearest[n].float())}
    assert {n for n in found if ".experts." in n} <= same
    assert any(n not in same for n in found)


def test_static_scales_are_measured_in_the_same_pass(tmp_path: Path) -> None:
    """They are those of `calibrate` on the same text; --stats gives the same bytes but the tag."""
    zoo.save("llama", tmp_path / "model")
    made = command(tmp_path / "model", tmp_path, "fp8-static")
    succeed(*made)
    text = made[made.index("--data") : -1]
    stats = tmp_path / "stats"
    succeed("calibrate", tmp_path / "model", "--recipe", "w8a8-static", *text, "--out", stats)
    succeed(
        *command(tmp_path / "model", tmp_path, "fp8-static", "given"),
        "--stats",
        stats / "stats.safetensors",
    )
    own, other = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "given"))
    scales = [name for name in own if name.endswith("input_scale")]
    assert len(scales) == 14
    assert {n for n in other if "k_scale" in n or "v_scale" in n}
    for name, value in own.items():
        assert torch.equal(value.float(), other[name].float()), name
    found = load_file(stats / "fp8-static" / "model.safetensors")
    assert all(torch.equal(own[name], found[name]) for name in scales)


def interrupt_after(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the run when it has rounded so many layers, with its state saved after each."""
    finish = LayerRounding.finish_layer
    done = []

    def stop(self: LayerRounding, layer: Any) -> None:
        if len(done) == layers:
            raise KeyboardInterrupt
        finish(self, layer)
        done.append(layer)

    monkeypatch.setattr(LayerRounding, "finish_layer", stop)


@pytest.mark.parametrize(
    ("scheme", "saves"),
    [("w8a16", False), ("fp8-static", True), pytest.param("mxfp8-a16", False, marks=takes_minutes)],
)
def test_a_resumed_run_writes_the_same_bytes(
    scheme: str, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hidden states of the last finished layer on disk, and with its codes alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of MXFP8
    zoo.save("llama", tmp_path / "model", num_hidden_layers=4, **sizes)
    succeed(*command(tmp_path / "model", tmp_path, scheme, "whole"))
    monkeypatch.setattr(journal, "INTERVAL_S", 0.0 if saves else 1e9)
    monkeypatch.setattr(journal, "LAYER_INTERVAL_PER_COST", 0.0)
    made = command(tmp_path / "model", tmp_path, scheme, "cut")
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert run(*made).code not in {0, 1}
    told = fail(2, *command(tmp_path / "model", tmp_path, "fp8-block", "cut"), "--resume")
    assert ("the interrupted run was another" if saves else "had another scheme") in told
    work = tmp_path / "cut.rounding.partial" / "checkpoint-rounding"
    assert {"layer-00000.json", "layer-00001.json"} <= {path.name for path in work.iterdir()}
    assert bool(list(work.parent.glob("checkpoint-layers-*"))) is saves
    rounded = count_rounded_layers(monkeypatch)
    succeed(*made, "--resume")
    assert rounded == [2, 3]
    assert snapshot(tmp_path / "cut") == snapshot(tmp_path / "whole")
    assert not list(tmp_path.glob("cut*.partial"))
    assert succeed(*made, "--resume").code == 0  # finished already


def count_rounded_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    write_layer = RoundedCodes.written_layer
    found: list[int] = []

    def note(self: RoundedCodes, index: int, *arguments: Any) -> Any:
        found.append(index)
        return write_layer(self, index, *arguments)

    monkeypatch.setattr(RoundedCodes, "written_layer", note)
    return found


def test_the_plan_tells_memory_and_disk_and_runs_nothing(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    plan = succeed(*command(tmp_path / "model", tmp_path), "--dry-run", "--json").json["plan"]
    assert plan["streamed"]
    assert plan["linears"] == 14
    sums = 2 * 4 * (3 * 32 * 32 + 48 * 48)  # q/k/v, o, gate/up; down
    assert plan["peak_parts"]["work on layers"] > sums
    assert plan["work_disk_bytes"] == 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48)
    assert not list(tmp_path.glob("out*"))


def test_padding_has_no_part_in_a_hessian(tmp_path: Path) -> None:
    """Texts of all lengths in batches of four, used and held-back ones side by side."""
    zoo.save("qwen3_moe", tmp_path / "model")
    lengths = [20 + i % 13 for i in range(NUM_SEQUENCES)]
    rows = [ids[:length].tolist() for ids, length in zip(draw(), lengths, strict=True)]
    write_rows(tmp_path / "rows.jsonl", [{"input_ids": row} for row in rows])
    one, four = (
        succeed(
            *command(tmp_path / "model", tmp_path, out=f"{n}", batch_size=n), "--no-pack", "--json"
        ).json["rounded"]
        for n in (1, 4)
    )
    for each, other in zip(one, four, strict=True):
        for key in ("module", "rounding", "tokens", "held_tokens"):
            assert each[key] == other[key], each["module"]
        if each["gptq_db"] is not None:
            assert each["gptq_db"] == pytest.approx(other["gptq_db"], abs=0.05)
    held = sum(lengths[7::8])
    for item in (each for each in one if "attn" in each["module"]):
        assert (item["tokens"], item["held_tokens"]) == (sum(lengths) - held, held)


def test_scales_of_blocks_are_powers_of_two(tmp_path: Path) -> None:
    """What DeepGEMM makes of them at load is then what is stored."""
    zoo.save("llama", tmp_path / "model", hidden_size=128, intermediate_size=256)
    succeed(*command(tmp_path / "model", tmp_path, "fp8-block"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    scales = [name for name in tensors if name.endswith("weight_scale")]
    assert scales
    for name in scales:
        weight = weights[name.removesuffix("_scale")].double()
        rows, columns = tensors[name].shape
        for row, column in itertools.product(range(rows), range(columns)):
            block = weight[128 * row :, 128 * column :][:128, :128]
            expected = 2.0 ** math.ceil(math.log2(float(block.abs().max()) / 448))
            assert float(tensors[name][row, column]) == expected


def make_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a weight [12, 40] and a Hessian of correlated inputs, one of them ten times larger."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(60, 40)) @ random.normal(size=(40, 40))
    inputs[:, 3] *= 10
    return random.normal(size=(12, 40)), inputs.T @ inputs


@pytest.mark.parametrize("shape", [(1, 1), (12, 1), (12, 40)], ids=["tensor", "rows", "each"])
def test_every_column_gets_the_optimal_update(shape: tuple[int, int]) -> None:
    weight, hessian = make_case(seed=1)
    scale = np.random.default_rng(2).uniform(0.5, 1, shape) * np.abs(weight).max() / 448
    factor = factorise(torch.from_numpy(hessian))
    codes = round_compensated(torch.from_numpy(weight), torch.from_numpy(scale), factor)
    assert np.array_equal(codes.to(torch.float64).numpy(), solve(weight, hessian, scale))


def test_an_indefinite_hessian_raises_the_damping_until_it_is_definite() -> None:
    _, hessian = make_case(seed=5)
    values, vectors = np.linalg.eigh(hessian)
    values[0] = -np.diag(hessian).mean() * 0.5
    indefinite = (vectors * values) @ vectors.T
    factor = factorise(torch.from_numpy(indefinite))
    assert factor.damping == pytest.approx(1.0)
    shifted = indefinite + factor.damping * np.diag(indefinite).mean() * np.eye(len(indefinite))
    order, upper = factor.order.numpy(), factor.upper.numpy()
    inverse = np.linalg.inv(shifted[np.ix_(order, order)])
    np.testing.assert_allclose(upper.T @ upper, inverse, rtol=1e-8, atol=1e-12)
    hessian[2, 2] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        factorise(torch.from_numpy(hessian))
