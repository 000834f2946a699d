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
from fp8calib.calibration.fingerprint import fingerprint_model, versions
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
