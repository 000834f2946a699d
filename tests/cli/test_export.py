"""`export` and `show`: from a stats file alone."""

from pathlib import Path

import pytest

from tests.cli.conftest import ALL_FORMATS, QUICK
from tests.cli.program import Outcome, fail, snapshot, succeed


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


# --- show --------------------------------------------------------------------------------------


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
