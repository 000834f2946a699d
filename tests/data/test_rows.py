"""Rows are parsed from JSON objects, or refused with the place and the reason."""

from typing import Any

import pytest

from fp8calib.data.rows import Row, parse_row

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
ADD = {"role": "user", "content": "Add."}
ADD_WITH_INPUT = {"role": "user", "content": "Add.\n\n1 and 2"}
THREE = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "hi"}, Row("x:1", text="hi")),
        ({"text": "hi", "id": 3, "messages": None}, Row("x:1", text="hi")),
        ({"text": "hi", "messages": [USER]}, Row("x:1", messages=(USER,))),
        ({"messages": [USER], "input_ids": [5, 0]}, Row("x:1", input_ids=(5, 0))),
        ({"conversations": [USER]}, Row("x:1", messages=(USER,))),
        ({"input_ids": [5, 6], "attention_mask": [1, 1]}, Row("x:1", input_ids=(5, 6))),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, Row("x:1", input_ids=(5, 6))),
        ({"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1]}, Row("x:1", input_ids=(5,))),
        ({"input_ids": [5, 6], "attention_mask": None}, Row("x:1", input_ids=(5, 6))),
        ({"text": "hi", "attention_mask": [0]}, Row("x:1", text="hi")),
        ({"content": "hi", "path": "x.py"}, Row("x:1", text="hi")),
        ({"prompt": "The sky is", "completion": " blue."}, Row("x:1", text="The sky is blue.")),
        ({"prompt": [USER], "completion": [REPLY]}, Row("x:1", messages=(USER, REPLY))),
        (
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            Row("x:1", text="Add.\n\n1 and 2\n\n3", messages=(ADD_WITH_INPUT, THREE)),
        ),
        (
            {"instruction": "Add.", "output": "3"},
            Row("x:1", text="Add.\n\n3", messages=(ADD, THREE)),
        ),
        ({"instruction": "Add.", "output": "3", "text": "hi"}, Row("x:1", text="hi")),
    ],
)
def test_the_first_usable_field_is_taken(value: dict[str, Any], expected: Row) -> None:
    assert parse_row(value, "x:1") == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
        ({"from": "human", "value": "q"}, {"role": "user", "content": "q"}),
        ({"from": "system", "value": ""}, {"role": "system", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": x} for x in ("a", "b")]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [1]},
            {"role": "assistant", "content": "", "tool_calls": [1]},
        ),
    ],
)
def test_a_message_becomes_role_and_text(message: object, expected: object) -> None:
    assert parse_row({"messages": [message]}, "x:1").messages == (expected,)
