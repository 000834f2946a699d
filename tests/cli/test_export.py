"""`export` and `show`: from a stats file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import ALL_FORMATS, QUICK
from tests.cli.program import Outcome, fail, snapshot, succeed


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


# --- show --------------------------------------------------------------------------------------


def test_a_folder_with_an_overlay_in_it_is_refused_alike(
    model: Path, data: Path, stats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    succeed("export", stats, "--format", "kv-overlay", "--model", model, "--out", out)
    extract = ("--quantized-model", out, "--model", model, "--save-path", tmp_path / "new")
    for code, command in (
        (2, ("check", out)),
        (4, ("verify", model, "--data", data, *QUICK, "--scales", out)),
        (4, ("extract-kv-scales", *extract)),
    ):
        assert f"such as {out / 'kv-overlay'}" in fail(code, *command)


# --- rules of scales -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["percentile:99", "mse", "headroom:1.5"])
def test_calibrate_and_export_follow_a_rule_alike(
    stats: Path, model: Path, data: Path, tmp_path: Path, rule: str
) -> None:
    options = [part for name in ALL_FORMATS for part in ("--format", name)]
    options += ["--tp", "1", "--tp", "2", "--query-scale", "yes", "--rule", rule]
    command = ("calibrate", model, "--data", data, *QUICK, *options, "--out", tmp_path / "c")
    report = succeed(*command, "--json").json
    exported = succeed(
        "export", stats, *options, "--model", model, "--out", tmp_path / "e", "--json"
    ).json
    direct, again = snapshot(tmp_path / "c"), snapshot(tmp_path / "e")
    assert {path: direct[path] for path in again} == again
    assert report["rule"] == rule
    assert (tmp_path / "c" / "stats.safetensors").read_bytes() == stats.read_bytes()
    notes = [text for text in report["warnings"] if "needs a histogram" in text]
    assert notes == [text for text in exported["warnings"] if "needs a histogram" in text]
    why = f"{rule} needs a histogram, which is missing: amax is used"
    kept = f"model.layers.0.self_attn.q and 1 more: {why}"
    assert notes == ([] if rule.startswith("headroom") else [kept])


# --- rules of some K and V -----------------------------------------------------------------------


RULES = """\
name: by-site
scales:
  rule: mse
  rules:
    model.layers.1.self_attn.k: percentile:90
    "*.v": headroom:2
"""


@pytest.fixture(scope="module")
def written(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-site")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RULES + "quantize: fp8-dynamic\n")
    options = ("--data", data, *QUICK, "--recipe", recipe, "--out", folder / "out")
    succeed("calibrate", model, *options)
    return folder


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("model.layers.7.self_attn.k", "matches no K or V\nthey look like"),
        ("re:(", "not a regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_before_the_run(
    model: Path, data: Path, written: Path, tmp_path: Path, pattern: str, part: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'name: r\nscales:\n  rules:\n    "{pattern}": mse\n')
    out = ("--recipe", recipe, "--out", tmp_path / "out")
    message = fail(3, "calibrate", model, "--data", data, *QUICK, *out)
    assert "scales.rules" in message
    assert part in message
    assert not (tmp_path / "out").exists()
    fail(3, "export", written / "out" / "stats.safetensors", "--model", model, *out)


# --- several shards ------------------------------------------------------------------------------


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


def test_what_is_read_is_not_written_over(shards: Path) -> None:
    parts = (shards / "1", shards / "2")
    text = fail(2, "export", *parts, "--out", shards / "2", "--force")
    assert "the output would replace" in text


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
