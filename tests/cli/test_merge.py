"""`calibrate --shard` and `merge` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import QUICK
from tests.cli.program import fail, succeed

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


def test_merged_shards_are_the_file_of_one_run(shards: Path, tmp_path: Path) -> None:
    whole = (shards / "whole" / "stats.safetensors").read_bytes()
    names = [shards / "2", shards / "1" / "stats.safetensors"]
    for order in (names, names[::-1]):
        out = ("--out", tmp_path / "all.safetensors")
        outcome = succeed("merge", *order, *out, "--force", "--json")
        assert (tmp_path / "all.safetensors").read_bytes() == whole
    assert outcome.json == {
        "schema_version": 1,
        "passed": True,
        "out": str(tmp_path / "all.safetensors"),
        "parts": [str(shards / name / "stats.safetensors") for name in ("1", "2")],
        "tokens": 96,
        "sequences": 6,
        "sites": 34,
    }
    assert "exists; --force replaces it" in fail(2, "merge", *names, *out)
    text = succeed("merge", *names, *out, "--force").out
    assert text.startswith("2 shards, 96 tokens in 6 sequences, written to ")
    exported = ("export", tmp_path / "all.safetensors", "--format", "kv-scales")
    succeed(*exported, "--out", tmp_path / "exported")


def test_a_shard_writes_statistics_and_no_scales(shards: Path) -> None:
    folder = shards / "2"
    assert {path.name for path in folder.iterdir()} == {"stats.safetensors", "report.json"}
    report = json.loads((folder / "report.json").read_text())
    assert report["shard"] == {"index": 2, "count": 2}
    assert (report["tokens"], report["sequences"]) == (48, 3)
    assert report["checked"] == []
    assert report["saturation"] is None


def test_a_shard_says_what_is_next_and_that_formats_wait(
    model: Path, data: Path, tmp_path: Path
) -> None:
    command = ("calibrate", model, "--data", data, *SIZE, "--out", tmp_path / "out")
    outcome = succeed(*command, "--shard", "1/3", "--format", "rfc")
    assert "warning: --format has no effect on a shard" in outcome.err
    assert "fp8calib merge SHARDS... --out stats.safetensors" in outcome.out


@pytest.mark.parametrize(
    "command",
    [
        ("export", "--format", "kv-scales", "--out", "OUT"),
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
    words = [words[0], part, *words[1:]] if words[0] == "export" else [*words, part]
    text = fail(2, *words)
    assert "holds only shard 1 of 2 of the statistics" in text
    assert "fp8calib merge" in text


def test_show_says_that_a_shard_is_one(shards: Path) -> None:
    assert "only shard 1 of 2 (3 sequences)" in succeed("show", shards / "1").out
    assert succeed("show", shards / "1", "--json").json["part"]["sequences"] == [[0, 3]]
    assert succeed("show", shards / "whole", "--json").json["part"] is None


def test_sets_that_are_none_are_refused(shards: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "all.safetensors")
    assert "shard 2 of 2 is missing" in fail(2, "merge", shards / "1", *out)
    assert "is not a shard" in fail(2, "merge", shards / "whole", shards / "1", *out)
    assert "no such file or folder" in fail(2, "merge", tmp_path / "nothing", *out)
    assert not (tmp_path / "all.safetensors").exists()


def test_what_is_read_or_is_no_statistics_is_not_written_over(
    shards: Path, model: Path, tmp_path: Path
) -> None:
    parts = (shards / "1", shards / "2")
    part = shards / "2" / "stats.safetensors"
    assert "is one of the inputs" in fail(2, "merge", *parts, "--out", part)
    precious = tmp_path / "model.safetensors"
    precious.write_bytes((model / "model.safetensors").read_bytes())
    assert "holds no statistics" in fail(2, "merge", *parts, "--out", precious)
    assert "end in .safetensors" in fail(2, "merge", *parts, "--out", tmp_path / "all")


def test_merge_ends_with_the_commands_that_write_and_serve_scales(
    model: Path, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stats.safetensors"
    done = succeed("merge", shards / "1", shards / "2", "--out", out)
    lines = done.out.splitlines()
    export = lines[lines.index("write scales:") + 1].split()
    assert export[:3] == ["fp8calib", "export", str(out)]
    assert export[export.index("--model") + 1] == str(model)
    served = lines[lines.index("then serve with vLLM:") + 1]
    written = succeed(*export[1:])
    assert f":\n{served}\n" in written.out
