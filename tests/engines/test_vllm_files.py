"""Which of a folder's files vLLM opens, and in which order: as vLLM 0.32 did with each folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import fp8calib
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.formats.kv.overlay import make_quantization_config
from tests import zoo
from tests.architectures.test_vision_language import make_config
from tests.kit.checkpoints import WEIGHTS, Tensors, change_config

INDEX = "model.safetensors.index.json"
ONE, TWO = "consolidated-1.safetensors", "consolidated-2.safetensors"
UP, K = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_scale"
Edit = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a Llama with KV scales, in one file."""
    zoo.save("llama", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    names = [f"model.layers.{index}.self_attn.{role}_scale" for index in range(2) for role in "kv"]
    write(tmp_path / WEIGHTS, tensors | {name: torch.tensor([0.01]) for name in names})
    return change_config(tmp_path, quantization_config=make_quantization_config("tensor"))


def write(path: Path, tensors: Tensors) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({n: t.clone() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def ask(folder: Path, engine: str = "vllm") -> EngineReport:
    return fp8calib.check(folder, engine=engine).engines[engine]


def statuses(report: EngineReport) -> list[str]:
    return [verdict.status for layer in report.layers for verdict in (layer.k, layer.v)]


def copy(keep: Callable[[str], bool], name: str = "consolidated.safetensors") -> Edit:
    """Store some tensors again in a file of this name."""

    def edit(folder: Path) -> None:
        kept = {n: t for n, t in load_file(folder / WEIGHTS).items() if keep(n)}
        write(folder / name, kept)

    return edit


def split(*listed: str) -> Edit:
    """Store all tensors again in two files, and list some files in their index."""

    def edit(folder: Path) -> None:
        copy(lambda name: "layers.1." not in name, ONE)(folder)
        copy(lambda name: "layers.1." in name, TWO)(folder)
        weight_map = {f"{number}": file for number, file in enumerate(listed)}
        write_index(folder / "consolidated.safetensors.index.json", weight_map)

    return edit


USED, DEFAULTED, REFUSED = ["used"] * 4, ["defaulted"] * 4, ["refused"] * 4
EDITS: dict[str, tuple[Edit, list[str], str | None]] = {
    "all again": (copy(lambda _: True), USED, None),
    "all but the scales": (copy(lambda name: "_scale" not in name), DEFAULTED, None),
    "one layer": (
        copy(lambda name: "layers.1." not in name),
        ["used", "used", "defaulted", "defaulted"],
        "misread",
    ),
    "below the folder": (copy(lambda _: True, "original/consolidated.00.safetensors"), REFUSED, ""),
    "two files": (split(ONE, TWO), USED, None),
    "two files, one of them in the index": (
        split(ONE),
        ["used", "used", "defaulted", "defaulted"],
        "misread",
    ),
    "an index of a file that is missing": (split(ONE, TWO, "consolidated-3.x"), REFUSED, ""),
    "an index of another file": (split(ONE, TWO, WEIGHTS), REFUSED, ""),
}


@pytest.mark.parametrize("what", EDITS)
def test_vllm_opens_consolidated_files_alone(folder: Path, what: str) -> None:
    edit, kv, weights = EDITS[what]
    edit(folder)

    report = ask(folder)

    assert statuses(report) == kv
    if kv != REFUSED:
        assert (None if report.weights is None else report.weights.status) == weights
        assert any("and no other file" in each for each in report.problems)
    assert not report.unknown
    assert statuses(ask(folder, "transformers")) == USED


def test_unknown_names_beside_a_wrapped_model_are_unknown(tmp_path: Path) -> None:
    AutoModelForImageTextToText.from_config(make_config("llama4")).save_pretrained(tmp_path)
    own = {"layers.0.attention.wq.weight": torch.ones(4, 4)}
    write(tmp_path / "consolidated.safetensors", own)

    assert ask(tmp_path).status == "unknown"


@pytest.mark.parametrize("meant", ["model-2.safetensors", "model-10.safetensors"])
def test_of_two_files_vllm_keeps_what_is_in_that_of_the_larger_number(
    folder: Path, meant: str
) -> None:
    """Other engines compare the names as texts: model-2 comes last."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    own = {
        UP: tensors[UP] * 2,
        K: torch.tensor([0.02]),
        "lm_head.weight": tensors["lm_head.weight"],
    }
    write(folder / "model-2.safetensors", tensors)
    write(folder / "model-10.safetensors", own)
    listed = dict.fromkeys(tensors, "model-2.safetensors")
    listed |= {UP: meant, K: meant, "lm_head.weight": "model-10.safetensors"}
    write_index(folder / INDEX, listed)

    for engine, last, k in (
        ("vllm", "model-10.safetensors", 0.02),
        ("sglang", "model-2.safetensors", 0.01),
        ("transformers", "model-2.safetensors", 0.01),
    ):
        report = ask(folder, engine)
        assert (report.weights is None) is (last == meant)
        assert report.layers[0].k.value == pytest.approx(k)
