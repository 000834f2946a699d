"""`calibrate --shard`, and `export` of several shards, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import QUICK
from tests.cli.program import fail, snapshot, succeed

SIZE = (*QUICK, "--samples", 6)


@pytest.fixture(scope="module")
def shards(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with both halves of a run, `1` and `2`, and the run itself, `whole`."""
    folder = tmp_path_factory.mktemp("shards")
    command = ("calibrate", model, "--data", data, *SIZE)
    for index in (1, 2):
        succeed(*command, "--shard", f"{index}/2", "--out", folder / str(index))
    succeed(*command, "--out", folder / "whole")
    return folder


def test_joined_shards_are_the_file_of_one_run(shards: Path, tmp_path: Path) -> None:
    whole = (shards / "whole" / "stats.safetensors").read_bytes()
    names = [shards / "2", shards / "1" / "stats.safetensors"]
    out = ("--out", tmp_path / "all")
    for order in (names, names[::-1]):
        outcome = succeed("export", *order, *out, "--force", "--json")
        assert snapshot(tmp_path / "all").keys() == {"stats.safetensors"}
        assert (tmp_path / "all" / "stats.safetensors").read_bytes() == whole
        assert outcome.json["files"] == ["stats.safetensors"]
        assert outcome.json["shards"] == list(map(str, order))
    assert "use --force to replace its files" in fail(2, "export", *names, *out)
    assert succeed("export", *names, *out, "--force").out.startswith("joined 2 shards\nwritten to ")


def test_a_shard_writes_statistics_and_no_scales(shards: Path) -> None:
    folder = shards / "2"
    assert {path.name for path in folder.iterdir()} == {"stats.safetensors", "report.json"}
    report = json.loads((folder / "report.json").read_text())
    assert report["shard"] == {"index": 2, "count": 2}
    assert (report["tokens"], report["sequences"]) == (48, 3)
    assert report["checked"] == []
    assert report["saturation"] is None


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "MODEL", "--scales"),
        ("quantize", "MODEL", "--scheme", "fp8-static", "--out", "OUT", "--stats"),
    ],
)
def test_a_shard_is_not_taken_for_the_whole(
    command: tuple[str, ...], shards: Path, model: Path, tmp_path: Path
) -> None:
    places = {"MODEL": model, "OUT": tmp_path / "out"}
    words = [places.get(word, word) for word in command]
    part = shards / "1" / "stats.safetensors"
    text = fail(2, *words, part)
    assert "holds only shard 1 of 2 of the statistics" in text
    assert "fp8calib export" in text


def test_sets_that_are_none_are_refused(shards: Path, tmp_path: Path) -> None:
    first, second = shards / "1", shards / "2"
    out = ("--out", tmp_path / "all")
    assert "shard 2 of 2 is missing" in fail(4, "export", first, "--format", "kv-scales", *out)
    assert "are both shard 1 of 2" in fail(4, "export", first, second, first, *out)
    assert "is not a shard" in fail(4, "export", shards / "whole", first, *out)
    assert "no such file or folder" in fail(2, "export", first, tmp_path / "nothing", *out)
    assert "--format is missing" in fail(2, "export", shards / "whole", *out)
    assert not (tmp_path / "all").exists()


def test_what_is_read_is_not_written_over(shards: Path) -> None:
    parts = (shards / "1", shards / "2")
    text = fail(2, "export", *parts, "--out", shards / "2", "--force")
    assert "the output would replace" in text
