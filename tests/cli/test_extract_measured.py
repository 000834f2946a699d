"""`extract-kv-scales` from our own files: nobody quantized the model they were measured on."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli.program import Outcome, succeed

OURS = ("kv-overlay", "tgi", "kv_scales.safetensors", "kv_cache_scales.tp1.json")


@pytest.mark.parametrize("name", OURS)
def test_our_own_scales_are_not_called_biased(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path, name: str
) -> None:
    source, out = calibrated[0] / name, tmp_path / "out"
    command = ("extract-kv-scales", "--quantized-model", source, "--model", model)

    shown = succeed(*command, "--save-path", out, "--format", "kv-scales", "--json")

    assert not [note for note in shown.json["notes"] if "quantized model" in note]
    assert "quantized model" not in shown.err
    assert shown.json["taken_from"][0].endswith((name, ".safetensors"))
    with safe_open(out / "kv_scales.safetensors", "pt") as file:
        assert "fp8calib.provenance" not in file.metadata()


def test_scales_extracted_once_stay_those_of_a_quantized_model(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path
) -> None:
    """Their file names the model, but no text: nobody knows what they were measured on."""
    stranger = tmp_path / "stranger.safetensors"
    save_file(load_file(calibrated[0] / "kv_scales.safetensors"), stranger)
    command = ("extract-kv-scales", "--model", model, "--format", "kv-scales", "--json")
    first = ("--quantized-model", stranger, "--source-dtype", "e4m3fn")
    succeed(*command, *first, "--save-path", tmp_path / "a")

    again = ("--quantized-model", tmp_path / "a" / "kv_scales.safetensors")
    shown = succeed(*command, *again, "--save-path", tmp_path / "b")

    assert "scales of a quantized model" in shown.json["notes"][0]
