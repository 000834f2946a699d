"""A function returns what its command prints with `--json`."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

import fp8calib
from fp8calib.errors import fit_line
from tests.cli.program import run, succeed

pytestmark = pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")
QUICK = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")
OF_THE_RUN = ("duration_s", "memory", "provenance", "command")
"""Keys that no two runs have alike."""


@pytest.fixture(scope="module")
def out(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "out"
    succeed("calibrate", model, "--data", data, *QUICK, "--out", folder)
    return folder


def compare(result: Any, *command: object) -> None:
    """Require that a result is what a command prints, whatever its verdict."""
    printed = run(*command, "--json")
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    for key in OF_THE_RUN:
        assert (key in found) == (key in printed.json)
        found.pop(key, None), printed.json.pop(key, None)
    document = {key: value for key, value in printed.json.items() if key not in OF_THE_RUN}
    assert found == document
    assert result.exit_code == printed.code
    assert list(found)[:2] == ["schema_version", "passed"]


@pytest.mark.parametrize(("thresholds", "code"), [("kld_fail_above: 0", 8), ("", 0)])
def test_verify_with_its_files(
    model: Path, data: Path, out: Path, tmp_path: Path, thresholds: str, code: int
) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text(f"pass_at: 3\nfail_above: 4\n{thresholds}\n")
    page, dump = tmp_path / "page.html", tmp_path / "dump.safetensors"
    text: dict[str, Any] = {"samples": 4, "seq_len": 16, "dtype": "float32"}
    files: dict[str, Any] = {"report": page, "dump": str(dump)}
    calls: list[tuple[str, int, int | None]] = []
    result = fp8calib.verify(
        *(model, str(out), data),
        gate=str(gate),
        progress=lambda *call: calls.append(call),
        **text,
        **files,
    )
    tokens = result.tokens + result.sequences  # the first of each sequence is not scored
    last = {stage: (done, total) for stage, done, total in calls}  # in the order of the stages
    assert last["verifying"] == (tokens, tokens)
    assert list(last)[-1] == "noise floor"
    command = ("verify", model, "--scales", out, "--data", data, *QUICK, "--gate", gate)
    compare(result, *command)
    assert result.exit_code == code
    assert result.decision.headline[1:] in html.unescape(page.read_text())
    assert html.escape(result.next, quote=False) in page.read_text()
    assert set(load_file(dump)) == {"reference", str(out), "scale-1.0"}
    quoted, klds = result.worst_texts, result.sequence_klds
    (name,) = {text.candidate for text in quoted}
    mean = next(each.kld_mean for each in result.candidates if each.name == name)
    assert sum(klds[name]) / 4 == pytest.approx(mean)
    assert [text.kld for text in quoted] == sorted(klds[name], reverse=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    ids = [each for row in rows for each in tokenizer(row)["input_ids"]]
    whole = fit_line(tokenizer.decode(ids[: 4 * 16]))
    assert all(f"{text.before} {text.worst}" in whole for text in quoted)
