"""`report.json` and `verify --json` say what was measured on what, with hashes."""

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.rows import Row
from fp8calib.data.sequences import Batch
from fp8calib.engines.arithmetic import Numerics
from fp8calib.verification.verify import measure_noise
from tests.cli.program import run, succeed
from tests.docs.pages import DOCS

QUICK = ("--samples", 8, "--seq-len", 16, "--dtype", "float32", "--batch-size", 8)


@pytest.fixture(scope="module")
def out(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate, and write scales in a file and in an overlay."""
    folder = tmp_path_factory.mktemp("hashed") / "out"
    formats = ("--format", "kv-overlay", "--format", "vllm-json")
    succeed("calibrate", model, "--data", data, *QUICK, *formats, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def verified(out: Path, model: Path, data: Path) -> dict[str, Any]:
    scales = ("--scales", out / "kv-overlay", "--scales", out)
    command = ("verify", model, *scales, "--data", data, *QUICK, "--gate", "w8a8", "--json")
    found: dict[str, Any] = run(*command).json
    return found


def require_hashes(found: list[dict[str, Any]], folder: Path) -> None:
    """Require that files are hashed as another program hashes them."""
    assert found
    for each in found:
        content = (folder / each["name"]).read_bytes()
        assert each["size_bytes"] == len(content)
        assert each["sha256"] == hashlib.sha256(content).hexdigest()


def require_date(text: str) -> None:
    age = datetime.now(UTC) - datetime.fromisoformat(text)
    assert 0 <= age.total_seconds() < 3600


def test_a_verification_says_what_was_measured_on_what(
    verified: dict[str, Any], out: Path, model: Path
) -> None:
    provenance, hashes = verified["provenance"], verified["hashes"]
    report = json.loads((out / "report.json").read_text())
    require_date(provenance["date"])
    assert provenance["command"].startswith(f"fp8calib verify {model} ")
    assert provenance["versions"] == report["versions"]
    assert provenance["model_hash"] == report["model_hash"]
    assert re.fullmatch("[0-9a-f]{64}", provenance["data_hash"])
    settings = provenance["settings"]
    assert (settings["scheme"], settings["pack"]) == (None, True)
    assert {"samples", "seq_len", "batch_size", "text_column", "fp8_dtype"} <= settings.keys()
    plain = Numerics(name="plain")
    for name, value in provenance["numerics"].items():
        assert value != getattr(plain, name)
    assert provenance["numerics"]
    require_hashes(hashes["model"], model)
    assert hashes["model"] == report["hashes"]["model"]
    assert hashes["data"] == report["hashes"]["data"]
    # A candidate has the hashes that its calibration recorded.
    overlay, stats = str(out / "kv-overlay"), str(out)
    assert hashes["scales"].keys() == {overlay, stats}
    assert hashes["scales"][overlay] == report["hashes"]["scales"]["kv-overlay"]
    assert hashes["scales"][stats] == report["hashes"]["scales"]["stats.safetensors"]
    assert {"config.json", "tokenizer.json"} <= {e["name"] for e in hashes["scales"][overlay]}


def test_a_verification_has_the_figures_with_errors_noise_and_thresholds(
    verified: dict[str, Any],
) -> None:
    assert verified["gates"] == [
        {"name": "w8a8", "pass_at": 1.02, "fail_above": 1.06, "kld_fail_above": None}
    ]
    assert verified["noise"]["tokens"] == verified["tokens"]
    assert 0 <= verified["noise"]["kld"] < 1e-9
    assert verified["reference"]["ppl"] > 1
    for row in verified["candidates"]:
        names = ("ppl", "ppl_ratio", "ppl_ratio_se", "kld_mean", "kld_se", "kld_p99")
        assert all(row[name] is not None for name in names)
        share = row["top1_agreement"]
        assert row["top1_se"] == pytest.approx((share * (1 - share) / verified["tokens"]) ** 0.5)


def test_every_key_that_the_page_names_is_there(verified: dict[str, Any], out: Path) -> None:
    page = (DOCS / "reference.md").read_text()
    section = page.partition("## What a result was made from\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("| ")][1:]
    report = json.loads((out / "report.json").read_text())
    for column, document in enumerate((report, verified)):
        keys = [key for row in rows for key in re.findall(r"`([\w.]+)`", row[column])]
        assert len(keys) >= 8
        for key in keys:
            found: Any = document
            for name in key.split("."):
                found = found[name]
            assert found, key


def test_the_noise_floor_is_half_of_the_mean_square_of_what_changes() -> None:
    rows = [Row("x:1", input_ids=tuple(range(3, 15)))] * 20
    plan = build_plan(RowEncoder(str, 15), rows, samples=20, seq_len=12)
    # Later tokens differ more: a cut sequence is compared with its own beginning.
    before = torch.tensor([-1.0] * 2 + [-1.2] * 9).repeat(20)
    cases = ((1, [(4, 3)] * 4, 32, 0.1**2 / 2), (8, [(1, 12)] * 16, 176, 0.1**2 / 2))
    for batch_size, shapes, tokens, kld in cases:
        run: list[Batch] = []
        scored = sum(rows * (length - 1) for rows, length in shapes)

        def score(text: list[Batch], run: list[Batch] = run, scored: int = scored) -> torch.Tensor:
            run += text
            return torch.full((scored,), -1.1)

        found = measure_noise(plan, batch_size, before, score)
        assert [tuple(batch.input_ids.shape) for batch in run] == shapes
        assert found.tokens == tokens
        assert found.kld == pytest.approx(kld, rel=1e-5)
