"""A receipt says what was measured on what; whoever changes one of its fields is found out."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import rfc8785
import torch

from fp8calib.data.rows import Row
from fp8calib.data.sequences import Batch, DataPlan, batches, build_plan
from fp8calib.jobs.receipt.check import (
    compare_again,
    compare_files,
    compare_versions,
    read_receipt,
)
from fp8calib.jobs.reporter import CallbackProgress
from fp8calib.results.receipt import Receipt
from fp8calib.verification.compare.text_runs import TextRuns
from fp8calib.verification.verify import _measure_noise
from scripts.json_schemas import make_schemas
from tests.cli.program import fail, run, succeed

QUICK = ("--samples", 8, "--seq-len", 16, "--dtype", "float32", "--batch-size", 8)
ONLY_SIGNED = (
    r"date|command|warnings\.\d+|seal"
    r"|model\.name|scales\.\d+\.name|text\.specs\.\d+"  # names; the hashes tell what they mean
)
"""What measuring again cannot contradict: the seal and the signature keep these."""


@pytest.fixture(scope="module")
def place(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an FP8 checkpoint, its receipt, and the receipt of a second measurement."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    folder = tmp_path_factory.mktemp("receipts")
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", folder / "fp8")
    command = ("verify", model, "--scales", folder / "fp8", "--data", data, *QUICK)
    for name in ("receipt.json", "again.json"):
        succeed(*command, "--gate", "w8a8", "--receipt", folder / name)
    keys = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    subprocess.run(keys, check=True)
    return folder


def list_leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, dict | list) and each:
            yield from list_leaves(each, (*path, key))
        else:
            yield (*path, key)


def change(document: Any, path: tuple[str | int, ...]) -> Any:
    """Change one value to another of its kind, as somebody would who wants not to be found."""
    changed = json.loads(json.dumps(document))
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    value = parent[path[-1]]
    choices = {"how": "server", "verdict": "fail", "top1_agreement": 0.5}
    if path[-1] in choices:
        new: Any = choices[str(path[-1])]
    elif isinstance(value, bool):
        new = not value
    elif isinstance(value, int | float):
        new = value * 2 + 1
    elif isinstance(value, str):
        new = f"{value}x"
    elif value is None:
        new = 0.5 if path[-1] == "kld_fail_above" else 5 if path[-1] == "seq_len" else "x"
    else:
        new = [7] if path[-1] == "kv_cache_dtype_skip_layers" else ["x"]
    parent[path[-1]] = new
    return changed


def reseal(document: dict[str, Any]) -> bytes:
    rest = {key: value for key, value in document.items() if key != "seal"}
    return rfc8785.dumps({**rest, "seal": hashlib.sha256(rfc8785.dumps(rest)).hexdigest()})


def test_a_receipt_has_the_figures_and_the_hashes_of_the_files(
    place: Path, model: Path, data: Path
) -> None:
    text = (place / "receipt.json").read_text()
    document = json.loads(text)
    jsonschema.Draft202012Validator(make_schemas()["receipt-file"]).validate(document)
    # The canonical form of an object without one member is the text without it.
    rest = re.sub(r'"seal":"[0-9a-f]{64}",', "", text)
    assert document["seal"] == hashlib.sha256(rest.encode()).hexdigest()
    for recorded, folder in ((document["model"], model), (document["scales"][0], place / "fp8")):
        names = {each["name"] for each in recorded["files"]}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        for each in recorded["files"]:
            digest = hashlib.sha256((folder / each["name"]).read_bytes()).hexdigest()
            assert each["sha256"] == digest
    command = ("verify", model, "--scales", place / "fp8", "--data", data, *QUICK, "--json")
    printed = run(*command, "--gate", "w8a8").json
    assert printed["noise"] is None
    for row, found in zip(document["rows"], printed["candidates"], strict=True):
        for name in ("kld_mean", "kld_se", "ppl_ratio", "ppl_ratio_se", "top1_agreement"):
            assert row[name] == pytest.approx(found[name], rel=1e-9)
        share = row["top1_agreement"]
        assert row["top1_se"] == pytest.approx((share * (1 - share) / printed["tokens"]) ** 0.5)
        assert row["gate"] == {
            "name": "w8a8", "pass_at": 1.02, "fail_above": 1.06, "kld_fail_above": None
        }  # fmt: skip
        assert 0 <= row["noise"]["kld"] < 1e-9
    assert document["text"]["fingerprint"] == printed["provenance"]["data_hash"]
    assert str(place) not in text
    assert str(model.parent) not in text


def test_a_change_of_any_field_breaks_the_seal_and_a_new_seal_the_signature(place: Path) -> None:
    path = place / "tampered.json"
    shutil.copy(place / "receipt.json", path)
    succeed("receipt", "sign", path, "--key", place / "key")
    succeed("receipt", "verify", path, "--key", place / "key.pub")
    document = json.loads(path.read_text())
    leaves = list(list_leaves(document))
    assert len(leaves) > 120
    for leaf in leaves:
        changed = change(document, leaf)
        path.write_bytes(rfc8785.dumps(changed))
        assert run("receipt", "verify", path).code in {4, 8}, leaf
        if leaf != ("seal",):
            path.write_bytes(reseal(changed))
            outcome = run("receipt", "verify", path, "--key", place / "key.pub")
            assert outcome.code in {4, 8}, leaf
            if outcome.code == 8:
                assert "fault: signature" in outcome.out


def test_measuring_again_finds_a_change_that_has_a_new_seal(
    place: Path, tmp_path: Path, model: Path, data: Path
) -> None:
    again = read_receipt(place / "again.json")[0]
    honest, faults = read_receipt(place / "receipt.json")
    assert [*faults, *list_found(honest, again)] == []
    document = json.loads((place / "receipt.json").read_text())
    path, missed = tmp_path / "tampered.json", []
    for leaf in list_leaves(document):
        path.write_bytes(reseal(change(document, leaf)))
        if run("receipt", "verify", path).code == 4:  # not even the form of a receipt
            continue
        receipt, faults = read_receipt(path)
        assert faults == []
        if not list(list_found(receipt, again)):
            missed.append(".".join(map(str, leaf)))
    assert [each for each in missed if not re.fullmatch(ONLY_SIGNED, each)] == []
    assert "date" in missed
    # and so does the command itself, of an honest one and of one
    files = ("--model", model, "--scales", place / "fp8", "--data", data)
    outcome = succeed("receipt", "verify", place / "receipt.json", *files, "--rerun")
    assert "ok: figures, measured again" in outcome.out
    path.write_bytes(reseal(change(document, ("rows", 0, "kld_mean"))))
    outcome = run("receipt", "verify", path, *files, "--rerun", "--json")
    assert outcome.code == 8
    assert [each.partition(":")[0] for each in outcome.json["faults"]] == ["rows.0.kld_mean"]


def list_found(receipt: Receipt, again: Receipt) -> Iterator[str]:
    pairs = ((receipt.model, again.model), *zip(receipt.scales, again.scales, strict=True))
    for one, other in pairs:
        yield from compare_files(one.files, other.files, one.name)
    yield from compare_again(receipt, again)
    yield from compare_versions(receipt, again)


def test_other_files_other_spelling_and_other_fields_are_found(
    place: Path, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(place / "fp8", other)
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    (other / "tokenizer.json").unlink()
    outcome = run("receipt", "verify", place / "receipt.json", "--scales", other)
    assert outcome.code == 8
    assert "fp8: config.json is another file" in outcome.out
    assert "fp8: tokenizer.json is missing" in outcome.out
    path = tmp_path / "receipt.json"
    document = json.loads((place / "receipt.json").read_text())
    path.write_text(json.dumps(document, indent=1))
    assert "not canonical JSON" in run("receipt", "verify", path).out
    path.write_bytes(reseal({**document, "more": 1}))
    assert "more: Extra inputs" in fail(4, "receipt", "verify", path)
    whole = (place / "receipt.json").read_text()
    huge = (re.sub(r'"tokens":\d+', f'"tokens":{number}', whole) for number in ("9" * 20, "1e999"))
    empty = re.sub(r'"rows":\[.*\],"scales"', '"rows":[],"scales"', whole)
    for text in ("{", "[]", '{"kind": "a", "kind": "b"}', *huge, empty):
        path.write_text(text)
        fail(4, "receipt", "verify", path)
    fail(2, "receipt", "verify", place / "receipt.json", "--rerun")
    fail(2, "receipt", "sign", place / "receipt.json")
    two = ("--scales", other, "--scales", other)
    fail(2, "receipt", "verify", place / "receipt.json", *two)
    message = fail(2, "verify", model, "--rules", "amax", "--receipt", tmp_path / "new.json")
    assert "--rules" in message


def test_a_gate_of_a_file_is_measured_again_by_its_thresholds(
    model: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("pass_at: 1.5\nfail_above: 1.6\nkld_fail_above: 0.4\n")
    made = ("--gate", tmp_path / "mine.yaml", "--receipt", tmp_path / "r.json")
    succeed("verify", model, "--scheme", "fp8-dynamic", "--data", data, *QUICK, *made)
    (tmp_path / "mine.yaml").unlink()
    files = ("--model", model, "--data", data, "--rerun")
    succeed("receipt", "verify", tmp_path / "r.json", *files)
    gate = json.loads((tmp_path / "r.json").read_text())["settings"]["gate"]
    assert gate == {"name": "mine", "pass_at": 1.5, "fail_above": 1.6, "kld_fail_above": 0.4}
    # a name that is a path writes nothing there
    outside = tmp_path / "outside"
    document = json.loads((tmp_path / "r.json").read_text())
    document["settings"]["gate"]["name"] = str(outside)
    (tmp_path / "r.json").write_bytes(reseal(document))
    assert run("receipt", "verify", tmp_path / "r.json", *files).code == 8
    assert not outside.with_suffix(".yaml").exists()


def test_layers_left_in_16_bits_are_left_again(model: Path, data: Path, tmp_path: Path) -> None:
    place = tmp_path / "r.json"
    left = ("--kv-cache-dtype-skip-layers", "1")
    succeed("verify", model, "--data", data, *QUICK, *left, "--receipt", place)
    files = ("--model", model, "--data", data, "--rerun")
    succeed("receipt", "verify", place, *files)
    document = json.loads(place.read_text())
    assert document["settings"].pop("kv_cache_dtype_skip_layers") == [1]
    document["settings"]["kv_cache_dtype_skip_layers"] = []
    place.write_bytes(reseal(document))
    outcome = run("receipt", "verify", place, *files, "--json")
    assert "rows.0.kld_mean" in {each.partition(":")[0] for each in outcome.json["faults"]}


def test_other_folders_measure_again_whatever_their_names_are(
    place: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    """A name is that of a path, and not a part of keys and figures."""
    for name in ("model", "a/rows", "b/rows"):
        source = model if name == "model" else place / "fp8"
        shutil.copytree(source, tmp_path / name)
    receipt = tmp_path / "two.json"
    both = ("--scales", tmp_path / "a/rows", "--scales", tmp_path / "b/rows", "--data", data)
    engines = ("--engine", "vllm", "--engine", "sglang")
    succeed("verify", model, *both, *QUICK, *engines, "--receipt", receipt)
    succeed("receipt", "verify", receipt, "--model", tmp_path / "model", *both, "--rerun")
    document = json.loads(receipt.read_text())
    names = ("a/rows", "b/rows")
    for each, name in zip(document["scales"], names, strict=True):
        each["name"] = name
    for index, row in enumerate(document["rows"]):
        row["candidate"] = row["candidate"].replace("rows", names[index % 2])
    receipt.write_bytes(reseal(document))
    succeed("receipt", "verify", receipt, "--model", tmp_path / "model", *both, "--rerun")


def test_text_that_lies_elsewhere_is_asked_for_by_the_right_option(
    place: Path, model: Path, tmp_path: Path
) -> None:
    document = json.loads((place / "receipt.json").read_bytes())
    document["text"]["specs"] = ["moved.jsonl"]
    path = tmp_path / "receipt.json"
    path.write_bytes(reseal(document))
    files = ("--model", model, "--scales", place / "fp8")
    told = fail(5, "receipt", "verify", path, *files, "--rerun")
    assert "the receipt names its text moved.jsonl: say with --data where it is" in told


def test_what_has_no_canonical_form_costs_no_result(
    place: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "fp8", tmp_path / "fp8")
    (tmp_path / os.fsdecode(b"fp8/more\xff.json")).write_text("{}")
    command = ("verify", model, "--scales", tmp_path / "fp8", "--data", data, *QUICK)
    outcome = run(*command, "--receipt", tmp_path / "r.json")
    assert outcome.code == 7
    assert "r.json: no receipt" in outcome.err
    assert "scale-1.0" in outcome.out
    assert not (tmp_path / "r.json").exists()
    ignored = ("--sensitivity", "--decode")
    for option in ignored:
        assert option in fail(2, *command, option, "--receipt", tmp_path / "r.json")


def test_a_signature_stays_if_a_key_is_wrong(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    shutil.copy(place / "receipt.json", path)
    succeed("receipt", "sign", path, "--key", place / "key")
    (tmp_path / "binary").write_bytes(b"\xff\0")
    (tmp_path / "text").write_text("no key")
    for key, code in (("binary", 2), (".", 2), ("text", 8)):
        assert run("receipt", "sign", path, "--key", tmp_path / key).code == code
        assert run("receipt", "verify", path, "--key", tmp_path / key).code == code
    # beside a signature of the other program
    (tmp_path / "r.json.minisig").write_text("untrusted comment: another\n")
    succeed("receipt", "verify", path, "--key", place / "key.pub")


def test_a_badge_shows_no_changed_figures_and_replaces_no_receipt(
    place: Path, tmp_path: Path
) -> None:
    document = json.loads((place / "receipt.json").read_text())
    path = tmp_path / "changed.json"
    path.write_bytes(rfc8785.dumps(change(document, ("rows", 0, "kld_mean"))))
    assert run("receipt", "badge", path).code == 8
    assert not path.with_suffix(".svg").exists()
    shutil.copy(place / "receipt.json", tmp_path / "r.svg")
    fail(2, "receipt", "badge", tmp_path / "r.svg")
    assert read_receipt(tmp_path / "r.svg")[1] == []


def test_a_badge_is_well_formed_and_says_what_the_receipt_says(place: Path) -> None:
    from xml.etree import ElementTree as Xml  # noqa: PLC0415 -- our own file

    shutil.copy(place / "receipt.json", place / "shown.json")
    outcome = succeed("receipt", "badge", place / "shown.json")
    tree = Xml.fromstring((place / "shown.svg").read_text())  # noqa: S314
    texts = [each.text for each in tree.iter() if each.tag.endswith("text")]
    row = json.loads((place / "shown.json").read_text())["rows"][0]
    assert texts[0] == "emulated FP8"
    assert str(texts[1]).startswith(f"KLD {row['kld_mean']:.2e}")
    assert str(texts[1]).endswith(row["verdict"])
    assert "![shown.svg](shown.svg)" in outcome.out
    assert "fp8calib receipt verify shown.json --model MODEL --scales PATH --rerun" in outcome.out


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_signs_too(place: Path) -> None:
    secret, public = place / "mini.key", place / "mini.pub"
    subprocess.run(("minisign", "-G", "-W", "-s", secret, "-p", public), check=True)
    path = place / "mini.json"
    shutil.copy(place / "receipt.json", path)
    succeed("receipt", "sign", path, "--key", secret)
    succeed("receipt", "verify", path, "--key", public)
    path.write_bytes(reseal(change(json.loads(path.read_text()), ("date",))))
    assert run("receipt", "verify", path, "--key", public).code == 8


def test_a_run_without_warnings_has_a_receipt_too(model: Path, tmp_path: Path) -> None:
    long = (
        "--data",
        "builtin",
        "--samples",
        40,
        "--seq-len",
        128,
        "--dtype",
        "float32",
        "--batch-size",
        8,
    )
    outcome = succeed("verify", model, *long, "--receipt", tmp_path / "r.json", "--json")
    assert outcome.json["warnings"] == []
    assert outcome.err.count("hashing the files") == 1
    assert read_receipt(tmp_path / "r.json")[1] == []


def test_the_noise_floor_is_half_of_the_mean_square_of_what_changes() -> None:
    rows = [Row("x:1", input_ids=(3, 4, 5))] * 20
    plan = build_plan((), tokenizer=str, vocab_size=9, samples=20, seq_len=3, rows=rows)
    sizes: list[int] = []

    def run_again(found: Iterable[Batch], *_: Any, **__: Any) -> SimpleNamespace:
        sizes.extend(len(batch.lengths) for batch in found)
        return SimpleNamespace(reference=SimpleNamespace(logprobs=torch.full((32,), -1.1)))

    comparison: Any = SimpleNamespace(run=run_again, num_layers=0)

    def open_runs(text: DataPlan, size: int) -> TextRuns:
        return TextRuns(comparison, list(batches(text, size)), CallbackProgress(None))

    before: Any = SimpleNamespace(reference=SimpleNamespace(logprobs=torch.full((40,), -1.0)))
    for batch_size, expected in ((1, [4] * 4), (8, [1] * 16)):
        sizes.clear()
        found = _measure_noise(open_runs, before, plan, batch_size)
        assert sizes == expected
        assert found.tokens == 32
        assert found.kld == pytest.approx(0.1**2 / 2, rel=1e-5)
