"""`export` and `show`: from a stats file alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

import fp8calib
from tests.cli.conftest import ALL_FORMATS, QUICK
from tests.cli.program import Outcome, fail, snapshot, succeed

LOOSE = ("kv-scales", "vllm-json", "rfc")
"""Formats that need no model."""


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Export, require the exit code, and that the folder around the output did not change."""

    def export(code: int, stats: Path, *options: object) -> str:
        before = snapshot(tmp_path)
        text = fail(code, "export", stats, *options, "--out", tmp_path / "out")
        assert snapshot(tmp_path) == before
        return text

    return export


def test_an_export_equals_what_calibrate_wrote(
    calibrated: tuple[Path, Outcome], stats: Path, model: Path, tmp_path: Path
) -> None:
    """Each format for 1 and 2 ranks."""
    command = ("export", stats, "--format", *ALL_FORMATS, "--tp", 1, "--tp", 2, "--model", model)
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    direct, exported = snapshot(calibrated[0]), snapshot(tmp_path / "out")
    for own in ("stats.safetensors", "report.json"):
        del direct[own]
    assert direct == exported
    files = [path for path in exported if exported[path] != "folder"]
    assert report["files"] == sorted(files)
    assert report["out"] == str(tmp_path / "out")


def test_loose_formats_need_nothing_but_the_stats(stats: Path, tmp_path: Path) -> None:
    alone = shutil.copy(stats, tmp_path / "renamed.safetensors")
    command = ("export", alone, "--format", *LOOSE, "--tp", 1, "--tp", 2, "--tp", 4)
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    assert len(report["files"]) == 1 + 3 + 3
    factors = json.loads((tmp_path / "out" / "kv_cache_scales.tp4.json").read_text())
    per_rank = factors["kv_cache"]["scaling_factor"]
    # two KV heads on four ranks: ranks 0 and 1 hold the first, 2 and 3 the second
    assert per_rank["0"] == per_rank["1"]
    assert per_rank["2"] == per_rank["3"]
    assert per_rank["0"] != per_rank["2"]


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


def test_a_rule_of_a_recipe_is_followed_and_the_command_line_wins(
    model: Path, data: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nscales: {rule: headroom:4}\nformats: [kv-scales]\n")
    command = ("calibrate", model, "--data", data, *QUICK, "--recipe", recipe)
    command = (*command, "--query-scale", "yes")
    scales = {}
    for name, options in {"recipe": (), "line": ("--rule", "amax")}.items():
        succeed(*command, *options, "--out", tmp_path / name)
        scales[name] = load_file(tmp_path / name / "kv_scales.safetensors")
    assert len(scales["line"]) == 6
    for key, scale in scales["line"].items():
        assert scales["recipe"][key].item() == 4 * scale.item()


# --- rules of some K and V -----------------------------------------------------------------------


RULES = """\
name: by-site
scales:
  rule: mse
  rules:
    model.layers.1.self_attn.k: percentile:90
    "*.v": headroom:2
"""
OTHERS = {"model.layers.0.self_attn.k": "mse", "model.layers.1.self_attn.k": "percentile:90"}


def read_scales(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118
            found |= {name: file.get_tensor(name).item() for name in names}
    return found


@pytest.fixture(scope="module")
def written(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-site")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RULES + "quantize: fp8-dynamic\n")
    options = ("--data", data, *QUICK, "--recipe", recipe, "--out", folder / "out")
    succeed("calibrate", model, *options)
    return folder


def test_calibrate_export_and_quantize_write_the_scales_of_each_rule(
    model: Path, written: Path, tmp_path: Path
) -> None:
    path, recipe = written / "out" / "stats.safetensors", written / "recipe.yaml"
    stats = fp8calib.load_stats(path)
    found = read_scales(written / "out" / "kv-overlay")
    assert len(found) == 4
    for name, scale in found.items():
        rule = OTHERS.get(name.removesuffix("_scale"), "headroom:2")
        assert scale == stats.kv_scales(rule=rule)[name].item(), name
    assert read_scales(written / "out" / "fp8-dynamic") == found
    given = (path, "--recipe", recipe, "--model", model)
    succeed("export", *given, "--out", tmp_path / "exported")
    assert read_scales(tmp_path / "exported" / "kv-overlay") == found
    options = ("--scheme", recipe, "--stats", path, "--out", tmp_path / "quantized")
    succeed("quantize", model, *options)
    assert read_scales(tmp_path / "quantized") == found


def test_the_report_names_the_rules(written: Path) -> None:
    report = json.loads((written / "out" / "report.json").read_text())
    assert report["rule"] == "mse"
    assert report["rules"] == {"model.layers.1.self_attn.k": "percentile:90", "*.v": "headroom:2"}


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
