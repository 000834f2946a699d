"""What `verify` does not replay: a common unquantized model, which every release loads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.check import check_folder
from fp8calib.engines.registry import find_emulated, list_emulated
from fp8calib.engines.replay.folder import open_folder
from fp8calib.model.geometry_from_config import FAMILIES, read_geometry
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from fp8calib.verification.open_candidates import is_common
from tests import zoo


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_release_loads_a_common_model(tmp_path: Path, family: str, *, is_tied: bool) -> None:
    zoo.save(family, tmp_path, tie_word_embeddings=is_tied)
    source, stored = open_source(str(tmp_path)), Checkpoint.open(tmp_path)
    opened: Any = SimpleNamespace(
        source=source, checkpoint=stored, prepared=prepare(build_skeleton(source), stored)
    )
    assert is_common(opened)
    (tmp_path / "consolidated.safetensors").write_bytes(stored.files[0].path.read_bytes())
    assert not is_common(opened)
    (tmp_path / "consolidated.safetensors").unlink()
    folder = open_folder(tmp_path)
    engines = [find_emulated(key)[0] for key in list_emulated()]
    keys = [each.key for engine in engines for each in (engine, *engine.releases)]
    reports = check_folder(
        folder,
        read_geometry(tmp_path, folder.config),
        [key for key in keys if key != "reference"],
        1,
    )
    assert [key for key, each in reports.items() if each.load_fault or each.unknown] == []
