"""Forms of data: saved datasets, named columns, and what is shown of the rows."""

import json
import shutil
from pathlib import Path

from tests.cli.conftest import write_rows
from tests.cli.program import run, succeed

TEXTS = [" ".join(f"w{i * j % 90}" for j in range(1, 40)) for i in range(12)]


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
