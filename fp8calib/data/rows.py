"""One row of calibration data, parsed from a JSON object and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8calib.errors import DataError

Message = dict[str, Any]
"""A chat message: `role`, `content` as text, and any other keys of the row's message."""

FIELDS = ("input_ids", "messages", "conversations", "text")
"""The fields a row is read from; the first one that is present and not null is used."""
MASK = "attention_mask"
"""Beside `input_ids`: 0 marks padding, which is left out."""

_ROW_HINT = "a row needs `text`, `messages`, `conversations` or `input_ids`"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class Row:
    """One row; exactly one of the three contents is set."""

    origin: str
    """Where the row comes from, e.g. `calib.jsonl:17`."""
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    input_ids: tuple[int, ...] | None = None


def parse_row(value: object, origin: str, *, allow_blank: bool = False) -> Row:
    """Parse a row from a decoded JSON object.

    `allow_blank` accepts text that is only white space, for datasets the user cannot edit.

    Raises:
        DataError: no field is usable, or the one used has the wrong type or is empty.

    """
    if not isinstance(value, dict):
        raise _row_error(f"{origin}: a row must be a JSON object, found {_name_type(value)}")
    field = next((name for name in FIELDS if value.get(name) is not None), None)
    if field == "input_ids":
        ids = _parse_input_ids(value[field], origin)
        mask = value.get(MASK)
        return Row(origin, input_ids=ids if mask is None else _leave_padding(ids, mask, origin))
    if field == "text":
        return Row(origin, text=_parse_text(value[field], origin, allow_blank=allow_blank))
    if field is not None:
        return Row(origin, messages=_parse_messages(value[field], f"{origin}: {field}"))
    raise _row_error(f"{origin}: no usable field; {_list_keys(value)}")


def require_unicode(text: str, where: str) -> str:
    r"""Return `text`; refuse half a surrogate pair (a lone "\ud800" is legal in JSON)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is half of a surrogate pair, not text",
            hint="write the file again with complete characters",
        ) from error
    return text


def _parse_input_ids(value: object, origin: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _row_error(f"{origin}: input_ids must be a list of at least one token id")
    for position, item in enumerate(value):
        if type(item) is not int:  # bool is an int to isinstance
            raise _row_error(
                f"{origin}: input_ids holds {item!r:.40} at position {position}, not an integer"
            )
    return tuple(value)


def _leave_padding(ids: tuple[int, ...], mask: object, origin: str) -> tuple[int, ...]:
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise _row_error(f"{origin}: {MASK} must be a list as long as input_ids, {len(ids)}")
    if (other := next((item for item in mask if item not in (0, 1)), None)) is not None:
        raise _row_error(f"{origin}: {MASK} holds {other!r:.40}, neither 0 nor 1")
    if 1 not in mask:
        raise DataError(f"{origin}: {MASK} is 0 everywhere", hint="remove the row from the file")
    start, stop = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[start:stop]:
        raise _row_error(f"{origin}: {MASK} has 0 between tokens, where no padding can be")
    return ids[start:stop]


def _parse_text(value: object, origin: str, *, allow_blank: bool) -> str:
    if not isinstance(value, str):
        raise _row_error(f"{origin}: text must be a string, found {_name_type(value)}")
    if not allow_blank and not value.strip():
        raise DataError(f"{origin}: text is empty", hint="remove the row from the file")
    return require_unicode(value, f"{origin}: text")


def _parse_messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _row_error(f"{where} must be a list of messages, found {_name_type(value)}")
    if not value:
        raise DataError(f"{where} is empty", hint="remove the row from the file")
    return tuple(
        _parse_message(message, f"{where}[{index}]") for index, message in enumerate(value)
    )


def _parse_message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _row_error(f"{where} must be an object, found {_name_type(value)}")
    present = {key: item for key, item in value.items() if item is not None}
    if "role" in present:
        content = present.get("content", "" if "tool_calls" in present else None)
        return {
            **present,
            "role": _parse_role(present["role"], where),
            "content": _parse_content(content, f"{where}.content"),
        }
    if "from" in present:
        role = _SHAREGPT_ROLES.get(_parse_role(present["from"], where))
        if role is None:
            raise _row_error(f"{where} is from {present['from']!r:.40}, an unknown role")
        return {"role": role, "content": _parse_content(present.get("value"), f"{where}.value")}
    raise _row_error(f"{where} has neither `role` nor `from`; {_list_keys(value)}")


def _parse_role(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _row_error(f"{where}: the role must be a string, found {value!r:.40}")
    return value


def _parse_content(value: object, where: str) -> str:
    if isinstance(value, str):
        return require_unicode(value, where)
    if not isinstance(value, list):
        raise _row_error(f"{where} must be text or a list of parts, found {_name_type(value)}")
    return "".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _parse_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _row_error(f"{where} is not a text part: {part!r:.60}")
    return require_unicode(text, where)


def _row_error(message: str) -> DataError:
    return DataError(message, hint=_ROW_HINT)


def _list_keys(value: dict[Any, Any]) -> str:
    keys = [str(key)[:40] for key in value]
    shown = ", ".join(keys[:12]) + (", ..." if len(keys) > 12 else "")
    return f"the keys are: {shown}" if keys else "the object is empty"


def _name_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "nothing"
    return names.get(type(value), f"{type(value).__name__} {value!r:.40}")
