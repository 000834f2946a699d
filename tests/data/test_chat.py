"""Tests of fp8calib.data.chat."""

import pytest

from fp8calib.data.tokenize import render_messages
from fp8calib.errors import DataError
from tests.data.tokenizers import BOS_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
WITHOUT_BOS = [3, 6, 7, 8, 4, 6, 9]
WITH_BOS = [0, *WITHOUT_BOS]


@pytest.mark.parametrize(
    ("template", "adds_bos", "bos", "expected"),
    [
        (PLAIN_TEMPLATE, False, "<s>", WITHOUT_BOS),
        (PLAIN_TEMPLATE, True, "<s>", WITH_BOS),
        (BOS_TEMPLATE, False, "<s>", WITH_BOS),
        (BOS_TEMPLATE, True, "<s>", WITH_BOS),
        ("{{ bos_token }} " + BOS_TEMPLATE, True, "<s>", WITH_BOS),
        (PLAIN_TEMPLATE, False, None, WITHOUT_BOS),
        (PLAIN_TEMPLATE + "{{ bos_token }}", True, "<s>", [*WITH_BOS, 0]),
    ],
)
def test_a_conversation_has_one_bos_when_template_or_tokenizer_writes_one(
    template: str, adds_bos: bool, bos: str | None, expected: list[int]
) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos, bos=bos, template=template)
    assert render_messages(tokenizer, MESSAGES, "x:1") == expected


def test_the_tokenizers_closing_token_is_left_to_the_template() -> None:
    tokenizer = make_tokenizer(adds_eos=True, template=PLAIN_TEMPLATE)
    assert tokenizer("a")["input_ids"] == [0, 7, 1]
    assert render_messages(tokenizer, MESSAGES, "x:1") == WITH_BOS


def test_a_tokenizer_without_template_is_named_with_the_row() -> None:
    with pytest.raises(DataError) as caught:
        render_messages(make_tokenizer(), MESSAGES, "x.jsonl:3")
    assert caught.value.message == (
        "x.jsonl:3: the row is a conversation, but the tokenizer has no chat template"
    )
    assert caught.value.hint == "use rows with `text`, or a chat model"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.gone.deep }}", "has no attribute 'gone'"),
        ("{{ messages | length + 'x' }}", "unsupported operand"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_template_that_refuses_a_row_is_a_data_error(template: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        render_messages(make_tokenizer(template=template), MESSAGES, "x.jsonl:3")
    assert caught.value.message.startswith("x.jsonl:3: the chat template refuses")
    assert reason in caught.value.message


def test_half_a_surrogate_pair_that_a_template_lets_through_is_a_data_error() -> None:
    tokenizer = make_tokenizer(template="{{ messages[0].extra }}")
    with pytest.raises(DataError, match="x:1: the rendered chat: character 0 is half"):
        render_messages(tokenizer, [{"role": "user", "content": "", "extra": "\ud800"}], "x:1")
