"""`auto`: what it writes, what it keeps, and that it says what `verify` says of it."""

import errno
from pathlib import Path

import pytest

from tests.cli.conftest import write_rows
from tests.cli.program import fail, run, succeed

ROWS = [{"input_ids": [0, *(3 + (i * j) % 90 for j in range(1, 24))]} for i in range(40)]
OPTIONS = ("--samples", 40, "--seq-len", 24, "--dtype", "float32")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("text") / "rows.jsonl", ROWS)


def test_the_smallest_that_passes_is_kept_and_verify_agrees(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = succeed("auto", model, "--data", rows, *OPTIONS, "--out", out, "--json")
    report = found.json
    kept = {path.name for path in out.iterdir()}
    assert kept == {report["chosen"], "stats.safetensors", "report.json", "report.html"}
    steps = [line for line in found.err.splitlines() if line.startswith("step ")]
    assert steps[0] == "step 1 of 5: calibrate on 32 of 40 sequences"
    assert len(steps) == 5
    assert "rows: 40 used" in found.err
    assert "chat template" not in found.err  # all rows are ids
    rest = write_rows(tmp_path / "rest.jsonl", ROWS[32:])
    command = ("verify", model, "--data", rest, *OPTIONS, "--samples", 8, "--scales")
    again = succeed(*command, out / report["chosen"], "--no-pack", "--json").json
    choices = {Path(each["name"]).name: each for each in report["verified"]["candidates"]}
    mine, verified = choices[report["chosen"]], again["candidates"][0]
    for key in ("kld_mean", "kld_se", "ppl_ratio", "verdict"):
        assert mine[key] == verified[key]
    assert report["serve"].startswith(f"vllm serve {out / report['chosen']}")
    page = (out / "report.html").read_text()
    assert report["verified"]["decision"]["headline"] in page
    assert report["serve"] in page
    assert report["sizes"][report["chosen"]] < report["sizes"]["kv-overlay"]
    assert "vllm serve" in (out / report["chosen"] / "README.md").read_text()


def test_nothing_is_kept_where_nothing_passes(model: Path, rows: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text("pass_at: 1.5\nfail_above: 2.0\nkld_fail_above: 1.0e-12\n")
    command = ("auto", model, "--data", rows, *OPTIONS, "--gate", gate, "--out", tmp_path / "out")
    found = run(*command)
    assert found.code == 8
    assert found.out.startswith("No choice passes the gate; the nearest, ")
    assert "gets fail: " in found.out.replace("\n", " ")
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert "exists" in fail(2, *command, "--resume")


def test_an_interrupted_run_is_resumed(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("auto", model, "--data", rows, *OPTIONS, "--out", tmp_path / "out", "--gpu", "a100")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fp8calib.commands.quantize.run", interrupt)
        interrupted = run(*command)
    assert interrupted.code == 130
    assert "--out" in fail(2, *command)
    stats = tmp_path / "out/stats.safetensors"
    written = stats.stat().st_mtime_ns
    assert "step 3 of 3" in succeed(*command, "--resume").err
    assert stats.stat().st_mtime_ns == written


def test_a_run_is_resumed_that_could_write_only_statistics(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ("auto", model, "--data", rows, *OPTIONS, "--out", out, "--gpu", "a100")

    def fill_the_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fp8calib.commands.calibrate_run.write_formats", fill_the_disk)
        assert run(*command).code == 7
    assert [path.name for path in out.iterdir()] == ["stats.safetensors"]
    assert "step 3 of 3" in succeed(*command, "--resume").err


def test_a_dry_run_names_the_steps_and_writes_nothing(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    command = ("auto", model, "--data", rows, *OPTIONS, "--gpu", "a100", "--out", tmp_path / "out")
    planned = succeed(*command, "--dry-run", "--json")
    plan = planned.json["plan"]
    assert plan["steps"][:2] == ["calibrate on 32 of 40 sequences", "write w8a16"]
    said = "8 sequences to verify may not tell"
    assert said not in planned.err
    assert said.replace("8", "4") in succeed(*command, "--samples", 20, "--dry-run").err
    assert not (tmp_path / "out").exists()
