"""Forms of data: saved datasets, named columns, and what is shown of the rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict

import fp8calib
from tests.cli.conftest import write_rows
from tests.cli.program import run, succeed

QUICK = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")
TEXTS = [" ".join(f"w{i * j % 90}" for j in range(1, 40)) for i in range(12)]


def test_a_saved_split_calibrates_like_the_same_rows_in_a_file(model: Path, tmp_path: Path) -> None:
    saved = DatasetDict(
        {"train": Dataset.from_dict({"body": TEXTS}), "test": Dataset.from_dict({})}
    )
    saved.save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    succeed("calibrate", model, "--data", tmp_path / "rows.jsonl", *QUICK, "--out", tmp_path / "a")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: mine\n"
        "data: {samples: 4, seq_len: 16, text_column: body, "
        f"sources: [{json.dumps(f'{tmp_path}/saved/train')}]}}\n"
    )
    command = ("calibrate", model, "--recipe", recipe, "--dtype", "float32")
    succeed(*command, "--out", tmp_path / "b")
    a, b = (fp8calib.load_stats(tmp_path / out) for out in "ab")
    assert a.header.data_fingerprint == b.header.data_fingerprint
    assert list(a.sites) == list(b.sites)
    assert all(torch.equal(a.sites[site].amax, b.sites[site].amax) for site in a.sites)


def test_text_is_shown_as_the_model_sees_it(model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    command = ("calibrate", model, "--data", tmp_path / "rows.jsonl", *QUICK, "--dry-run")
    err = succeed(*command, "--show-text", 2).err.splitlines()
    assert [line for line in err if line.startswith("sequence ")] == [
        f"sequence 1, 16 tokens: <s> {' '.join(['w0'] * 15)}",
        f"sequence 2, 16 tokens: {' '.join(['w0'] * 16)}",
    ]


def test_rows_that_cannot_be_used_are_skipped_counted_and_named(
    model: Path, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    template += "{% endif %}{{ m.content }} {% endfor %}"
    model = shutil.copytree(model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    chats = [
        {"messages": [{"role": "tool" if i % 10 == 3 else "user", "content": text}]}
        for i, text in enumerate(TEXTS[:10] * 4)
    ]
    chats[13] = {"messages": [{"role": "user", "content": None}]}
    data = write_rows(tmp_path / "rows.jsonl", chats)
    command = ("calibrate", model, "--data", data, "--samples", 99, "--seq-len", 64)
    outcome = succeed(
        *command, "--no-pack", "--dtype", "float32", "--out", tmp_path / "a", "--json"
    )
    result = json.loads(outcome.out)
    assert (result["sequences"], result["rows"]["read"], result["rows"]["rejected"]) == (36, 40, 4)
    rejected = "rows.jsonl:4: the chat template rejects the conversation (no tools)"
    unread = "rows.jsonl:14: messages[0].content must be text or a list of parts, found nothing"
    assert f"skipped: 4 of 40 rows cannot be used: {rejected}; {unread}; " in outcome.err
    strict = run(*command, "--strict-rows", "--out", tmp_path / "b")
    assert (strict.code, f"error: {rejected}\n" in strict.err) == (5, True)
    write_rows(data, [*chats, chats[3]])
    outcome = run(*command, "--dtype", "float32", "--out", tmp_path / "b")
    assert outcome.code == 5
    assert f"5 of 41 rows cannot be used: {rejected}; {unread}; " in outcome.err
    assert not (tmp_path / "b").exists()
