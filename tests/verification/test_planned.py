"""What `verify --scheme` emulates is what `quantize --scheme` writes, to the bit.

The emulated model is saved by transformers, which names and splits tensors as the source's file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.numerics.schemes import SCHEMES, Granularity
from fp8calib.quantization.calibrated_scales import find_scales
from fp8calib.quantization.plan import make_plan
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.write import write_checkpoint
from fp8calib.verification.emulation.weights import changed_weights
from tests import zoo
from tests.architectures import families
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.doors import make_plan as plan_data
from tests.doors import run_calibration
from tests.kit.minutes import in_minutes, takes_minutes
from tests.quantization.by_hand import run
from tests.verification.by_hand import (
    Subject,
    emulate_checkpoint,
    emulate_plan,
    emulate_scheme,
    hold_weights,
    opened,
)
from tests.zoo import draw

_INDEXER = {**zoo.ZOO["deepseek_v3"], "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
MODELS: dict[str, dict[str, Any]] = {
    **zoo.ZOO,
    **families.FAMILIES,
    "axk2": _INDEXER,
    "deepseek_v32": _INDEXER,
}
REFUSED = ("dbrx", "gpt2", "gpt_oss")
"""`quantize` cannot write these."""
Tensors = dict[str, torch.Tensor]


def save_emulated(subject: Subject, scheme: str, folder: Path) -> Tensors:
    """Let transformers save the model while the scheme is emulated."""
    numerics = find_emulated("reference")[1]
    changes = emulate_scheme(subject, SCHEMES[scheme], numerics).weights
    with changed_weights(subject.model, changes, subject.originals, {}, {}):
        subject.model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def multiply(written: Tensors, name: str) -> torch.Tensor:
    """Multiply codes by scales of blocks of 128 x 128."""
    codes, scales = written[name], written[f"{name}_scale"]
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize(
    "family",
    [
        *zoo.KINDS,
        "deepseek_v32",
        *in_minutes(*sorted(MODELS.keys() - zoo.ZOO.keys() - {"deepseek_v32"})),
    ],
)
def test_what_is_emulated_is_what_is_written(family: str, tmp_path: Path) -> None:
    model = families.build(family, MODELS[family])
    with opened(model, tmp_path / "m") as subject:
        emulated = save_emulated(subject, "fp8-block", tmp_path / "emulated")
    if family in REFUSED:
        with pytest.raises(ModelError):
            run(tmp_path / "m", tmp_path / "q", "fp8-block")
        return
    source = load_file(tmp_path / "m" / "model.safetensors")
    written = run(tmp_path / "m", tmp_path / "q", "fp8-block").tensors()
    fp8 = {name for name in written if written[name].dtype is torch.float8_e4m3fn}
    stacks = source.keys() - written.keys()
    changed = {name for name in source if not torch.equal(source[name], emulated[name])}
    assert changed == (fp8 & source.keys()) | stacks
    for name in fp8 & source.keys():
        assert torch.equal(emulated[name], multiply(written, name)), name


_SIZES = {"hidden_size": 64, "intermediate_size": 96}
_BLOCKS = {**_SIZES, "head_dim": 32}
"""With these all inputs are whole blocks of MXFP8, 32 elements."""


@pytest.mark.parametrize(
    ("family", "scheme", "sizes", "dtype"),
    [
        ("jamba", "fp8-dynamic", {}, "float32"),
        pytest.param("deepseek_v32", "fp8-dynamic", {}, "float32", marks=zoo.NEEDS_5_23),
        pytest.param("axk2", "fp8-block", {}, "float32", marks=[zoo.NEEDS_5_23, takes_minutes]),
        ("gemma3n_text", "w8a16", {}, "float32"),
        ("qwen3_next", "fp8-block", {}, "float32"),
        ("llama", "mxfp8", _SIZES, "bfloat16"),
        pytest.param("llama4_text", "fp8-block", _SIZES, "bfloat16", marks=takes_minutes),
        pytest.param("llama", "mxfp8-a16", _BLOCKS, "float32", marks=takes_minutes),
        # experts stored apart; below in stacks
        pytest.param("mixtral", "mxfp8", _BLOCKS, "float32", marks=takes_minutes),
        ("llama4_text", "mxfp8", {**_BLOCKS, "intermediate_size_mlp": 96}, "float32"),
    ],
)
def test_a_scheme_has_the_divergence_of_its_checkpoint(
    family: str, scheme: str, sizes: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    families.save(family, {**MODELS[family], **sizes}, tmp_path / "m")
    asked = ("--scheme", scheme)
    succeed("quantize", tmp_path / "m", *asked, "--allow-unservable", "--out", tmp_path / "q")
    rows = [{"input_ids": [(i * j) % 120 + 3 for j in range(1, 17)]} for i in range(1, 7)]
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def measure(*candidate: object) -> float:
        outcome = succeed(
            *("verify", tmp_path / "m", *candidate, "--engine", "reference", "--data", data),
            *("--seq-len", 16, "--dtype", dtype, "--json"),
        )
        return float(outcome.json["candidates"][0]["kld_mean"])

    emulated, stored = measure(*asked), measure("--scales", tmp_path / "q")
    assert emulated > 1e-6
    assert emulated == pytest.approx(stored, rel=1e-6)


def test_rules_are_ranked_by_the_divergence_of_what_export_writes_by_them(tmp_path: Path) -> None:
    families.save("llama", {}, tmp_path / "m")
    rows = [{"input_ids": [(i * j) % 120 + 3 for j in range(1, 17)]} for i in range(1, 7)]
    text = ("--data", write_rows(tmp_path / "rows.jsonl", rows), "--seq-len", 16)
    text = (*text, "--dtype", "float32", "--json")
    succeed("calibrate", tmp_path / "m", *text, "--out", tmp_path / "c")
    stats, rules = tmp_path / "c" / "stats.safetensors", ("amax", "headroom:64", "percentile:90")
    asked = ("verify", tmp_path / "m", *text, "--engine", "reference", "--scales")
    ranked = succeed(*asked, stats, "--rules", ",".join(rules)).json["rules"]
    found = {each["rule"]: each["kld_mean"] for each in ranked}
    for rule in rules:
        out = tmp_path / rule.replace(":", "-")
        succeed("export", stats, "--format", "kv-scales", "--rule", rule, "--out", out)
        (stored,) = succeed(*asked, out).json["candidates"][:1]
        assert found[rule] == pytest.approx(stored["kld_mean"], rel=1e-6)
    assert [*found] == sorted(rules, key=lambda rule: found[rule])
    assert [each["against_best"] is None for each in ranked] == [True, False, False]


@pytest.mark.parametrize("engine", ["reference", "vllm", "sglang"])
def test_a_plan_of_several_schemes_is_emulated_as_its_checkpoint(
    engine: str, tmp_path: Path
) -> None:
    """Scales of blocks are powers of two here, and per-tensor scales are those of fused groups."""
    choice = {"*.o_proj": "fp8-static", "*.qkv_proj": "w8a16", "*layers.1.mlp*": "fp8-block"}
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    numerics = find_emulated(engine)[1]
    with opened(zoo.build("phi3", **sizes), tmp_path / "m") as subject:
        stats = run_calibration(tmp_path / "m", plan_data(draw([20])))[1]
        by_pattern = {
            pattern: replace(SCHEMES[name], has_power_of_two_scales=name == "fp8-block")
            for pattern, name in choice.items()
        }
        settings = PlanSettings(
            scheme=SCHEMES["fp8-dynamic"], by_pattern=by_pattern, dialect=COMPRESSED_TENSORS
        )
        with Checkpoint.open(tmp_path / "m") as checkpoint:
            scales = find_scales(stats, checkpoint, settings, subject.selection)
            plan = make_plan(checkpoint, settings, subject.selection, scales=scales)
            write_checkpoint(
                checkpoint, plan, tmp_path / "q", device=torch.device("cpu"), advance=lambda _: None
            )
        planned = emulate_plan(subject, plan.settings, numerics, stats=stats)
        with Fp8Checkpoint.open(
            tmp_path / "q",
            fuse=numerics.fused_share_scales,
            through_float16=numerics.weights_through_float16,
        ) as written:
            stored = emulate_checkpoint(subject, written, numerics)
            found, expected = hold_weights(subject, planned), hold_weights(subject, stored)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
    assert planned.quantizers.keys() == stored.quantizers.keys()
    for site, quantizer in planned.quantizers.items():
        assert quantizer.is_same(stored.quantizers[site]), site
    scales = [quantizer.scale for quantizer in planned.quantizers.values()]
    dynamic = {each for each in scales if isinstance(each, Granularity)}
    assert dynamic == {Granularity.TOKEN, Granularity.GROUP}
    assert sum(isinstance(each, torch.Tensor) for each in scales) == 2
