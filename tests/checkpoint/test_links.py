"""Links are followed within a folder and into the Hugging Face cache, and nowhere else."""

from pathlib import Path

import pytest

from fp8calib.checkpoint.locations import refuse_external_links
from fp8calib.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "rank0.npz"])
@pytest.mark.parametrize("target", ["../secret", "{tmp}/secret", "../model-2/secret"])
def test_a_link_to_a_file_elsewhere_is_refused(
    tmp_path: Path, folder: Path, name: str, target: str
) -> None:
    (tmp_path / "model-2").mkdir()
    for place in (tmp_path, tmp_path / "model-2"):
        (place / "secret").write_text("x")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target.format(tmp=tmp_path))

    with pytest.raises(ModelError, match=f"{name} is a link out of the folder") as refused:
        refuse_external_links(folder)
    assert "hard-link" in refused.value.hint
