"""Fingerprints: of the weights, not of their files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import PIL
import pytest
import soundfile
import soxr
import torch
from safetensors.torch import save_file

import fp8calib
from fp8calib.calibration import unquantized_tensors
from fp8calib.calibration.calibration_origin import CalibrationOrigin, explain_difference
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.unquantized_tensors import (
    compare_with_base,
    decode_sketch,
    encode_sketch,
    hash_unquantized,
    measure_distance,
    sketch_matrix,
)
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.modality import Modality

CONFIG = {"model_type": "llama", "hidden_size": 4}
WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b.weight": torch.ones(4096, dtype=torch.bfloat16),
    "c.bias": torch.zeros(0),
}


def fingerprint(
    folder: Path,
    weights: dict[str, torch.Tensor] = WEIGHTS,
    *,
    shards: list[list[str]] | None = None,
    config: dict[str, object] = CONFIG,
) -> str:
    folder.mkdir()
    if shards is None:
        save_file(weights, folder / "model.safetensors")
    else:
        weight_map = {}
        for index, names in enumerate(shards):
            file = f"model-{index:05}-of-{len(shards):05}.safetensors"
            save_file({name: weights[name] for name in names}, folder / file)
            weight_map |= dict.fromkeys(names, file)
        index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index_text)
    with Checkpoint.open(folder) as checkpoint:
        return fingerprint_model(config, checkpoint)


def test_sharding_changes_nothing(tmp_path: Path) -> None:
    whole = fingerprint(tmp_path / "whole")
    shards = [["c.bias"], ["b.weight", "a.weight"]]
    assert fingerprint(tmp_path / "sharded", shards=shards) == whole
    assert fingerprint(tmp_path / "each", shards=[[name] for name in WEIGHTS]) == whole


@pytest.mark.parametrize(
    "changed",
    [
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"] + 1},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].reshape(4, 3)},
        {**WEIGHTS, "b.weight": WEIGHTS["b.weight"].to(torch.float16)},
        {**WEIGHTS, "d.weight": torch.ones(1)},
        {name: value for name, value in WEIGHTS.items() if name != "c.bias"},
        {"z.weight" if name == "a.weight" else name: value for name, value in WEIGHTS.items()},
    ],
    ids=["values", "shape", "dtype", "one more", "one less", "a name"],
)
def test_another_model_has_another_fingerprint(
    tmp_path: Path, changed: dict[str, torch.Tensor]
) -> None:
    assert fingerprint(tmp_path / "changed", changed) != fingerprint(tmp_path / "whole")


def test_the_config_counts_but_not_the_order_of_its_keys(tmp_path: Path) -> None:
    whole = fingerprint(tmp_path / "whole")
    reordered: dict[str, object] = dict(reversed(CONFIG.items()))
    assert fingerprint(tmp_path / "reordered", config=reordered) == whole
    assert fingerprint(tmp_path / "other", config={**CONFIG, "hidden_size": 8}) != whole


def test_versions_name_what_the_numbers_depend_on() -> None:
    found = versions()
    assert set(found) == {"fp8calib", "torch", "transformers"}
    assert found["fp8calib"] == fp8calib.__version__
    assert found["torch"] == torch.__version__


def test_versions_of_what_reads_media_are_those_that_are_installed() -> None:
    text = versions([Modality.TEXT])
    seen, heard = (versions([kind]) for kind in (Modality.IMAGE, Modality.AUDIO))
    assert text == versions()
    assert heard == {**text, "soundfile": soundfile.__version__, "soxr": soxr.__version__}
    assert seen.pop("pillow") == PIL.__version__
    assert seen.keys() - text.keys() == ({"torchvision"} if find_spec("torchvision") else set())


# --- what records the model ----------------------------------------------------------------------


MODEL, DATA = "01" * 32, "ef" * 32
FIELDS = {"model": MODEL, "data": DATA, "text_start": "0123456789abcdef"}


@pytest.mark.parametrize("fields", [FIELDS, {"model": MODEL}])
def test_it_is_said_in_strings_and_read_back(fields: dict[str, str]) -> None:
    origin = CalibrationOrigin(**fields)
    assert origin.to_fields() == fields
    assert CalibrationOrigin.from_fields(fields) == origin


def test_hashes_of_the_whole_text_of_earlier_versions_are_left_out() -> None:
    assert CalibrationOrigin.from_fields(FIELDS | {"text": "AAAA"}).to_fields() == FIELDS


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        "x",
        {"model": MODEL[:-1]},
        {"model": MODEL.upper().replace("0", "A")},
        {"model": 7},
        {**FIELDS, "data": "ef"},
        {**FIELDS, "surprise": ""},
    ],
)
def test_what_is_damaged_is_refused(fields: object) -> None:
    with pytest.raises(ValueError, match=r"not an object|fingerprint"):
        CalibrationOrigin.from_fields(fields)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ("01" * 16 + "23" * 16, "different weights (01010101, here 23232323)"),
        ("23" * 16 + "01" * 16, "different config.json (01010101, here 23232323)"),
        (
            "23" * 32,
            "different config.json (01010101, here 23232323) and "
            "different weights (01010101, here 23232323)",
        ),
    ],
)
def test_the_half_that_differs_is_named(here: str, expected: str) -> None:
    assert explain_difference(MODEL, here) == expected


# --- sketches of linears -------------------------------------------------------------------------


def draw(seed: int, rows: int = 4500, columns: int = 256) -> torch.Tensor:
    """Draw a matrix whose rows have different sizes; it has more rows than are read at once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator) * sizes


def save(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [0.02, 0.1, 0.4, 1.4])
def test_a_distance_is_estimated(tmp_path: Path, seed: int, size: float) -> None:
    """Compared with the Frobenius norm of the difference."""
    base = draw(seed)
    noise = draw(seed + 100)
    other = base + noise * (size * base.norm() / noise.norm())
    expected = float((other - base).norm() / other.norm())
    with save(tmp_path / "x", base=base, other=other) as checkpoint:
        recorded = decode_sketch(encode_sketch(sketch_matrix(checkpoint, "base")[0]))
        assert measure_distance(recorded, checkpoint, "base") == 0
        assert measure_distance(recorded, checkpoint, "other") == pytest.approx(expected, rel=0.4)


def test_the_vectors_never_change(tmp_path: Path) -> None:
    """Files hold sketches: the signs of 32 columns, each the only entry of a row."""
    entry = torch.eye(32)
    with save(tmp_path / "x", a=entry) as checkpoint:
        found = encode_sketch(sketch_matrix(checkpoint, "a")[0])
    assert found == RECORDED


RECORDED = (
    "gL+AP4C/gD+AP4A/gD+AP4A/gL+Av4C/gL+Av4A/gL+AP4A/gL+Av4C/gL+AP4C/gD+AP4C/gD+AP4C/gL+APw=="
)


@pytest.mark.parametrize("text", ["", "AAAA", "#", "gH+A" * 21 + "gA=="])
def test_a_damaged_sketch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not 32|padding|base64|buffer"):
        decode_sketch(text)


# --- tensors that stay unquantized ---------------------------------------------------------------


EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def make(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make an embedding of 6,400 values and a norm, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        EMBEDDING: torch.randn(100, 64, generator=generator),
        NORM: torch.randn(64, generator=generator),
    }
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()} | changes


def hash_saved(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        return hash_unquantized(checkpoint)


def test_linears_are_read_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that share a model have to gather the same tensor at the same time."""
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(10)]
    read: list[str] = []
    sketch = unquantized_tensors.sketch_matrix

    def record(checkpoint: Checkpoint, name: str) -> tuple[torch.Tensor, float]:
        read.append(name)
        return sketch(checkpoint, name)

    monkeypatch.setattr(unquantized_tensors, "sketch_matrix", record)
    hash_saved(tmp_path / "x", {name: torch.ones(40, 8) for name in names})
    assert read == names


@pytest.mark.parametrize("place", [0, 3200, 6399])
def test_every_value_of_an_embedding_counts(tmp_path: Path, place: int) -> None:
    base = hash_saved(tmp_path / "base", make())
    changed = make()[EMBEDDING].clone()
    changed.view(torch.int16).view(-1)[place] += 1
    other = hash_saved(tmp_path / "other", make(**{EMBEDDING: changed}))
    assert other[NORM] == base[NORM]
    assert other[EMBEDDING] != base[EMBEDDING]
    with Checkpoint.open(tmp_path / "other") as checkpoint:
        assert compare_with_base(base, checkpoint).difference == f"its {EMBEDDING} differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_and_parts_give_the_same_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    base = hash_saved(tmp_path / "base", make())
    monkeypatch.setattr("fp8calib.calibration.unquantized_tensors._ELEMENTS_AT_ONCE", 1000)
    converted = {name: tensor.to(dtype) for name, tensor in make().items()}
    assert hash_saved(tmp_path / "other", converted) == base


def test_rows_all_over_a_linear_are_compared(tmp_path: Path) -> None:
    """A third of the rows is of another matrix."""
    name, large = "model.layers.0.mlp.up_proj.weight", torch.ones(1100, 1024)
    base = hash_saved(tmp_path / "base", make(**{name: large}))
    for number, rows in enumerate((slice(0, 300), slice(400, 700), slice(800, 1100))):
        changed = large.clone()
        changed[rows] *= -1
        folder = tmp_path / str(number)
        hash_saved(folder, make(**{name: changed}))
        with Checkpoint.open(folder) as checkpoint:
            assert name in compare_with_base(base, checkpoint).difference
    with Checkpoint.open(tmp_path / "base") as checkpoint:
        found = compare_with_base(base, checkpoint)
    assert (found.difference, found.compared) == ("", "1 of 1 recorded linears")
