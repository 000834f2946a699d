"""Statistics of the unquantized model serve its quantized children, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8calib.calibration.calibration_stats import load_stats_file, save_stats
from fp8calib.checkpoint.tensor_file import TensorFile
from tests.cli.graft.grafting import (
    graft,
    name_command,
)
from tests.cli.program import fail, succeed
from tests.cli.quantized_children import BASE, QUANTIZED, save_fp4, save_int
from tests.kit.checkpoints import change_config, change_tensors

Refused = Callable[..., str]


def test_statistics_without_hashes_are_refused(
    calibrated: Path, refused: Refused, child: Path, tmp_path: Path
) -> None:
    """Earlier versions recorded none."""
    stats = load_stats_file(calibrated)
    header = stats.header.model_copy(update={"unquantized": {}})
    path = tmp_path / "old" / "stats.safetensors"
    path.parent.mkdir()
    save_stats(replace(stats, header=header), path)
    assert "unquantized" not in TensorFile(path).header.metadata["fp8calib"]
    text = refused(4, child, stats=path)
    assert "no hashes of norms and embeddings are recorded" in text


LINEARS = [
    f"model.layers.{layer}.{path}_proj.weight"
    for layer in (0, 1)
    for path in (*(f"mlp.{name}" for name in ("down", "gate", "up")), "self_attn.o", "self_attn.q")
]


def _quantize_another(folder: Path, form: str, factors: dict[str, float]) -> Path:
    """Quantize a model that has the base's norms and embeddings, and other linears."""
    base = Path(shutil.copytree(BASE, folder / "base"))
    change_tensors(base, lambda tensors: {n: t * factors.get(n, 1.0) for n, t in tensors.items()})
    child = folder / "other-child"
    if form in QUANTIZED:
        succeed("quantize", base, *QUANTIZED[form], "--out", child)
    elif form.startswith("int"):
        save_int(child, int(form[3:]), group=32 if form == "int4" else None, base=base)
    else:
        save_fp4(child, form, base=base)
    return child


@pytest.mark.parametrize("form", [*QUANTIZED, "int8", "int4", "nvfp4", "modelopt", "mxfp4"])
def test_other_linears_are_refused(
    calibrated: Path, refused: Refused, tmp_path: Path, form: str
) -> None:
    """Norms, embeddings, k and v are the base's; directly, and through a pack."""
    child = _quantize_another(tmp_path, form, dict.fromkeys(LINEARS, 2.0))
    text = refused(4, child)
    assert any(f"its {name} differs by " in text for name in LINEARS)
    pack = calibrated / "kv_scales.safetensors"
    text = fail(4, *name_command(pack, child, tmp_path / "out"))
    assert any(name in text for name in LINEARS)


def test_projections_that_cannot_be_decoded_are_named(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    change_config(
        child,
        lambda config: config["quantization_config"].update(transform_config={"config_groups": {}}),
    )
    (warning,) = graft(calibrated, child, tmp_path / "out")["warnings"]
    assert "its linears were not all compared" in warning
    assert "transform_config rotates" in warning
