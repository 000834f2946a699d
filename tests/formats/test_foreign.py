"""Read what llm-compressor, ModelOpt and Quark really write."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.read import read_scales
from fp8calib.model.geometry import Role
from fp8calib.numerics.schemes import InputScaling
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.formats.foreign import (
    FOLDER,
    KV_SCALES,
    LLAMA_ATTENTION,
    NO_KV_SCALES,
    find_geometry,
    load_kv_scales,
    load_tensors,
)

PER_HEAD = ("llmcompressor-kv-head", "llmcompressor-attention-head")
UNSET_QUERY = "llmcompressor-attention-head"

WEIGHTS: Mapping[str, tuple[str, InputScaling, int]] = {
    "llmcompressor-fp8-static-kv": ("compressed-tensors", InputScaling.STATIC, 14),
    "llmcompressor-fp8-dynamic": ("compressed-tensors", InputScaling.TOKEN, 14),
    "llmcompressor-fp8-block": ("compressed-tensors", InputScaling.GROUP, 14),
    "llmcompressor-w8a16": ("compressed-tensors", InputScaling.NONE, 14),
    "llmcompressor-fp8-static-float32": ("compressed-tensors", InputScaling.STATIC, 14),
    "llmcompressor-fp8-dynamic-float32": ("compressed-tensors", InputScaling.TOKEN, 14),
    "llmcompressor-fp8-block-float32": ("compressed-tensors", InputScaling.GROUP, 14),
    "modelopt-fp8-float32": ("modelopt", InputScaling.STATIC, 14),
    "llmcompressor-mxfp8": ("compressed-tensors", InputScaling.GROUP, 14),
    "llmcompressor-mxfp8-a16": ("compressed-tensors", InputScaling.NONE, 14),
    "modelopt-mxfp8": ("modelopt", InputScaling.GROUP, 14),
    "llmcompressor-mixtral-fp8-static-kv": ("compressed-tensors", InputScaling.STATIC, 32),
    "modelopt-fp8-kv": ("modelopt", InputScaling.STATIC, 14),
    "modelopt-fp8-channel-kv": ("modelopt", InputScaling.TOKEN, 14),
    "modelopt-mixtral-fp8-kv": ("modelopt", InputScaling.STATIC, 32),
    "quark-fp8-kv": ("quark", InputScaling.STATIC, 14),
    "quark-mixtral-fp8-kv": ("quark", InputScaling.STATIC, 8),
    "quark-autofp8-kv": ("autofp8", InputScaling.STATIC, 14),
}
"""By folder: the method, how inputs are quantized, and how many weights are FP8: 7 a layer in
llama, 4 and 12 of experts in mixtral, of which Quark quantizes the 4."""


def test_every_output_names_its_tool_and_version() -> None:
    outputs = {*KV_SCALES, *NO_KV_SCALES}
    about = {name: json.loads((FOLDER / name / "tool.json").read_text()) for name in outputs}
    assert {path.name for path in FOLDER.iterdir()} == {*outputs, "llama", "mixtral", "gpt2"}
    assert {(item["tool"], item["version"]) for item in about.values()} == {
        ("llmcompressor", "0.14.0.1"),
        ("nvidia-modelopt", "0.47.0"),
        ("amd-quark", "0.13"),
    }


@pytest.mark.parametrize("name", KV_SCALES)
def test_the_scales_read_are_the_numbers_in_the_file(name: str) -> None:
    model, dialect, _, _ = KV_SCALES[name]
    geometry = find_geometry(model)

    found = read_scales(FOLDER / name, geometry, needs_dtype=True, drops_bad_query=True)

    table = found
    read = [
        tuple(table.scales[a.site(role)].values.flatten().tolist() for role in (Role.K, Role.V))
        for _, a in geometry.attentions()
    ]
    assert read == load_kv_scales(name)
    assert table.dialect == dialect
    assert (table.fmt.name, table.tp) == ("e4m3fn", 1)
    assert table.per_head is (name in PER_HEAD)
    assert found.has_weights is (name in WEIGHTS)
    assert [path.name for path in found.files] == ["model.safetensors"]
    assert {site.role for site in table.scales} == {Role.K, Role.V}
    assert bool(found.notes) is (name == UNSET_QUERY)


def test_a_q_scale_that_was_never_set_is_refused_or_left_out() -> None:
    stored = load_tensors(UNSET_QUERY)
    queries = torch.cat([value for name, value in stored.items() if name.endswith("q_scale")])
    assert not (queries.isfinite() & (queries > 0)).all()
    geometry = find_geometry("llama")
    with pytest.raises(ModelError, match=r"q_scale: .* is not a scale"):
        read_scales(FOLDER / UNSET_QUERY, geometry)
    (note,) = read_scales(FOLDER / UNSET_QUERY, geometry, drops_bad_query=True).notes
    assert note.startswith("q_scale is left out: model.layers.0.self_attn.q_scale = ")


@pytest.mark.parametrize("name", NO_KV_SCALES)
def test_what_has_no_kv_scales_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="there are no KV scales"):
        read_scales(FOLDER / name, find_geometry(NO_KV_SCALES[name]))


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_scheme_of_each_weight_is_read(name: str) -> None:
    """Values are those of `cli/test_dequantize.py`."""
    method, kind, count = WEIGHTS[name]
    stored = load_tensors(name)
    quantized = {key for key, value in stored.items() if value.dtype == torch.float8_e4m3fn}

    checkpoint = Fp8Checkpoint.open(FOLDER / name, fuse=False)

    assert (checkpoint.dialect.name, checkpoint.fmt.name) == (method, "e4m3fn")
    assert checkpoint.quantized == quantized
    assert len(quantized) == count
    for key in quantized:
        scheme = checkpoint.scheme(key)
        assert scheme.inputs is kind
        if kind is InputScaling.STATIC:
            assert scheme.input_scale == float(stored[key.removesuffix("weight") + "input_scale"])


def test_calibrate_measures_on_the_same_tokens_what_modelopt_measured(tmp_path: Path) -> None:
    tokens = torch.randint(3, 64, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row} for row in tokens])
    command = ("calibrate", FOLDER / "llama", "--data", rows, "--seq-len", 32)
    options = ("--dtype", "bfloat16", "--format", "kv-scales", "--out", tmp_path / "out")
    succeed(*command, *options)
    ours = load_file(tmp_path / "out" / "kv_scales.safetensors")
    # within one step of bf16: another processor may sum in another order
    for layer, theirs in enumerate(load_kv_scales("modelopt-kv")):
        for role, expected in zip("kv", theirs, strict=True):
            found = ours[f"{LLAMA_ATTENTION.format(layer)}.{role}_scale"].item()
            assert expected == [pytest.approx(found, rel=2.0**-7)]
