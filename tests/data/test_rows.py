"""Rows are parsed from JSON objects, or refused with the place and the reason."""

from typing import Any

import pytest

from fp8calib.data.rows import Row, parse_row
from fp8calib.errors import DataError

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


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ([1], "a row must be a JSON object, found a list"),
        ({}, "no usable field; the object is empty"),
        ({"prompt": "x", "id": 1}, "no usable field; the keys are: prompt, id"),
        ({"instruction": "x"}, "no usable field; the keys are: instruction"),
        ({"prompt": [USER], "completion": "x"}, "completion must be a list of messages"),
        ({"instruction": "Add.", "input": 3, "output": "3"}, "input must be a string, found int"),
        ({"text": None}, "no usable field; the keys are: text"),
        ({"text": 5}, "text must be a string, found int 5"),
        ({"text": ""}, "text is empty"),
        ({"text": " \n"}, "text is empty"),
        ({"text": "a\ud800"}, "text: character 1 is half of a surrogate pair"),
        ({"input_ids": []}, "input_ids must be a list of at least one"),
        ({"input_ids": [1, 2.0]}, "input_ids holds 2.0 at position 1, not an integer"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "as long as input_ids, 2"),
        ({"input_ids": [1, 2], "attention_mask": [[1], 1]}, "must be a list of 0 and 1"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "with 0 at its ends alone"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "with 0 at its ends alone"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hi"]}, "messages[0] must be an object, found a string"),
        ({"messages": [USER, {"text": "x"}]}, "messages[1] has neither `role` nor `from`"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be text or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages[0].content[0] is a part of no known type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "0 images beside 1 places for them",
        ),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien', an unknown role"),
        ({"conversations": [{"from": "gpt"}]}, "conversations[0].value must be text"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(value: object, fragment: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_row(value, "calib.jsonl:17")
    assert caught.value.message.startswith("calib.jsonl:17: ")
    assert fragment in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        (
            {"bodies": "x", "id": 1},
            "the column body is missing; the keys are: bodies, id",
            "bodies",
        ),
        (
            {"body": None},
            "the column body is null; the keys are: body",
            "use --text-column to name another column",
        ),
        ({"body": 5}, "body must be a string, found int 5", "--text-column"),
        ({"body": []}, "input_ids must be a list of at least one token id", "--text-column"),
    ],
)
def test_a_named_column_without_content_is_refused(
    row: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_row(row, "x:1", text_column="body")
    assert message in caught.value.message
    assert hint in caught.value.hint
