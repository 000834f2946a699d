"""`extract-kv-scales` from our own files: nobody quantized the model they were measured on."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.cli.program import Outcome, succeed

OURS = ("kv-overlay", "tgi", "kv_scales.safetensors", "kv_cache_scales.tp1.json")


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
