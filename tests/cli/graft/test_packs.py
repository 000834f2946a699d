"""A file of `kv-scales` is a pack, which `extract-kv-scales` adds to a quantized model."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.cli.graft.grafting import (
    name_command,
)
from tests.cli.program import fail, succeed
from tests.cli.quantized_children import NORM, change_norm


def test_a_pack_of_another_base_is_refused_with_what_differs(
    calibrated: Path, child: Path, tmp_path: Path
) -> None:
    pack = calibrated / "kv_scales.safetensors"
    change_norm(child)
    text = fail(4, *name_command(pack, child, tmp_path / "out"))
    assert f"was not made from the calibrated model of {pack}: its {NORM} differs" in text
    succeed(*name_command(pack, child, tmp_path / "out", "--other-weights"))


def _rewrite(pack: Path, target: Path, **changes: str | None) -> Path:
    with safe_open(pack, "pt") as file:
        names = list(file.keys())
        metadata = {f"fp8calib.{key}": text for key, text in changes.items() if text is not None}
        old = {key: text for key, text in file.metadata().items() if key[9:] not in changes}
        save_file({name: file.get_tensor(name) for name in names}, target, old | metadata)
    return target


@pytest.mark.parametrize("text", ["{", "[]", '{"attention": {}}', '{"unquantized": {}}'])
def test_a_damaged_record_is_named(
    calibrated: Path, child: Path, tmp_path: Path, text: str
) -> None:
    pack = _rewrite(calibrated / "kv_scales.safetensors", tmp_path / "p.safetensors", fits=text)
    assert "fp8calib.fits is damaged" in fail(4, *name_command(pack, child, tmp_path / "out"))
