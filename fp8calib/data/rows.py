"""One row of calibration data, parsed from a JSON object and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fp8calib.data.media import (
    MARKS,
    MEDIA,
    MEDIA_COLUMNS,
    VIDEO_COLUMNS,
    Medium,
    parse_media_part,
    refuse_video,
)
from fp8calib.data.modality import Modality
from fp8calib.errors import DataError, shorten

Message = dict[str, Any]
"""A chat message: `role`, `content` and any other keys of the row's message.

The content is text; in a row with media it is a list of texts and media."""
ContentPart = str | Medium | Modality
"""A part of a content; a modality is a place for a medium of a column."""

FORMS = (
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("text",),
    ("content",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("question", "response"),
    ("question", "answer"),
    ("chosen",),
    ("body",),
)
"""The fields that a row is read from: the first form whose fields are all present and not null."""
MASK = "attention_mask"
"""A field of rows with `input_ids`, where 0 marks padding, which is left out."""
CONTEXTS = ("input", "context")
"""Fields of rows with `instruction`: the input of the task, if any."""
SYSTEMS = ("system", "system_prompt")
"""Fields of rows with a conversation, or a question and an answer: the system's message, if any."""
TOOLS = "tools"
"""A field of rows with a conversation: what the chat template gets as tools."""
COLUMNS = frozenset(
    {
        *(field for form in FORMS for field in form),
        *(MASK, TOOLS, *CONTEXTS, *SYSTEMS, *MEDIA_COLUMNS, *VIDEO_COLUMNS),
    }
)
"""All fields that a row is read from."""

_ROW_HINT = (
    "a row needs `text`, `messages`, `input_ids`, or other columns that docs/calibrate.md lists; "
    "use --text-column to name another column"
)
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


@dataclass(frozen=True)
class Row:
    """One row; exactly one of the three contents is set, except as `text` says."""

    origin: str
    """Where the row comes from, e.g. `calib.jsonl:17`."""
    text: str | None = None
    """With `messages`: their content as plain text, for a tokenizer without a chat template."""
    messages: tuple[Message, ...] | None = None
    input_ids: tuple[int, ...] | None = None
    tools: tuple[Any, ...] | None = None
    """With `messages`: what the chat template gets beside them."""

    @property
    def media(self) -> tuple[Medium, ...]:
        """The images and sounds of its messages, in order."""
        parts = (part for message in self.messages or () for part in message["content"])
        return tuple(part for part in parts if isinstance(part, Medium))


ReadRow = Row | DataError
"""A row, or why it cannot be used."""


def parse_row(
    value: object,
    origin: str,
    *,
    allow_blank: bool = False,
    text_column: str | None = None,
    folder: Path = Path(),
) -> Row:
    """Parse a row from a decoded JSON object.

    `allow_blank` accepts text that is only white space, for datasets the user cannot edit. The
    content is that of `text_column` if given: text, a list of messages, or a list of token ids.
    Media are parts of messages, or stand in columns (`image`, `images`, ...) that are read unless
    `text_column` is given; relative paths of files start at `folder`.

    Raises:
        DataError: no field is usable, or the one used has the wrong type or is empty.

    """
    if not isinstance(value, dict):
        raise _row_error(f"{origin}: a row must be a JSON object, found {_name_type(value)}")
    if text_column is not None:
        column = text_column
        kind: tuple[str, ...] = (_name_kind(value, text_column, origin),)
    else:
        usable = (form for form in FORMS if all(value.get(name) is not None for name in form))
        kind = next(usable, ("",))
        column = kind[0]
    where = f"{origin}: {column}"
    match kind:
        case ("body",):  # a request of OpenAI's batches
            return parse_row(value[column], where, allow_blank=allow_blank, folder=folder)
        case ("input_ids",):
            ids = _parse_input_ids(value[column], origin)
            mask = value.get(MASK)
            row = Row(origin, input_ids=ids if mask is None else _drop_padding(ids, mask, origin))
        case ("text" | "content",):
            text = _parse_text(value[column], where)
            row = Row(origin, text=text if allow_blank else _require_filled(text, where))
        case ("messages" | "conversations" | "chosen",):
            messages = _parse_messages(value[column], where, folder)
            if messages[0]["role"] != "system":
                messages = (*_read_system(value, origin), *messages)
            row = Row(origin, messages=messages, tools=_read_tools(value, origin))
        case ("prompt", "completion"):
            row = _parse_completion(value, origin, folder)
        case (question, answer):
            row = _parse_question(value, question, answer, origin)
        case _:
            raise _row_error(f"{origin}: no usable field; {_list_keys(value)}")
    return _place_media(row, {} if text_column is not None else _find_media(value, origin, folder))


def _name_kind(value: dict[Any, Any], column: str, origin: str) -> str:
    """Name the field whose form the value of a column has."""
    content = value.get(column)
    if content is None:
        missing = "is null" if column in value else "is missing"
        like = get_close_matches(column, [str(key) for key in value if key != column], n=1)
        raise DataError(
            f"{origin}: the column {shorten(column)} {missing}; {_list_keys(value)}",
            hint=f"did you mean --text-column {shorten(like[0])}?"
            if like
            else "use --text-column to name another column",
        )
    if not isinstance(content, list):
        return "text"
    return "messages" if content and isinstance(content[0], dict) else "input_ids"


def _parse_completion(value: dict[Any, Any], origin: str, folder: Path) -> Row:
    """Parse a prompt and its completion: two texts that are joined, or two lists of messages."""
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list):
        messages = _parse_messages(prompt, f"{origin}: prompt", folder)
        more = _parse_messages(completion, f"{origin}: completion", folder)
        return Row(origin, messages=messages + more)
    parts = (_parse_text(value[name], f"{origin}: {name}") for name in ("prompt", "completion"))
    text = "".join(parts)
    return Row(origin, text=_require_filled(text, f"{origin}: prompt and completion"))


def _parse_question(value: dict[Any, Any], asked: str, answered: str, origin: str) -> Row:
    """Parse a question, or an instruction, and its answer: a conversation of two turns."""
    where = f"{origin}: {asked}"
    question = _require_filled(_parse_text(value[asked], where), where)
    for name in CONTEXTS if asked == "instruction" else ():
        if value.get(name) is not None:
            context = _parse_text(value[name], f"{origin}: {name}")
            question = "\n\n".join(filter(str.strip, (question, context)))
    answer = _parse_text(value[answered], f"{origin}: {answered}")
    messages = (
        *_read_system(value, origin),
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    )
    text = "\n\n".join(message["content"] for message in messages)
    return Row(origin, text=text, messages=messages)


def _read_system(value: dict[Any, Any], origin: str) -> Iterator[Message]:
    """Read the system's message, if the row has one in a column of its own."""
    name = next((name for name in SYSTEMS if value.get(name)), None)
    if name is not None:
        yield {"role": "system", "content": _parse_text(value[name], f"{origin}: {name}")}


def _read_tools(value: dict[Any, Any], origin: str) -> tuple[Any, ...] | None:
    tools = _decode_json(value.get(TOOLS))
    if tools is not None and not isinstance(tools, list):
        raise _row_error(f"{origin}: {TOOLS} must be a list, found {_name_type(tools)}")
    return tuple(tools) if tools else None


def _decode_json(value: object) -> object:
    """Decode what is kept as JSON in a column of text; anything else stays as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer or processor has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


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


def _drop_padding(ids: tuple[int, ...], mask: object, origin: str) -> tuple[int, ...]:
    bits = [item for item in mask if item in (0, 1)] if isinstance(mask, list) else []
    if bits != mask or len(bits) != len(ids):
        message = f"{MASK} must be a list of 0 and 1, as long as input_ids, {len(ids)}"
        raise _row_error(f"{origin}: {message}")
    if 1 not in bits:
        raise DataError(f"{origin}: {MASK} is 0 everywhere", hint="remove the row from the file")
    start, stop = bits.index(1), len(bits) - bits[::-1].index(1)
    if 0 in bits[start:stop]:
        raise _row_error(f"{origin}: {MASK} has 0 between tokens, but only the ends can be padding")
    return ids[start:stop]


def _parse_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _row_error(f"{where} must be a string, found {_name_type(value)}")
    return require_unicode(value, where)


def _require_filled(text: str, where: str) -> str:
    if not text.strip():
        raise DataError(f"{where} is empty", hint="remove the row from the file")
    return text


def _parse_messages(value: object, where: str, folder: Path) -> tuple[Message, ...]:
    value = _decode_json(value)
    if isinstance(value, dict) and all(isinstance(item, list) for item in value.values()):
        # `datasets` gives a sequence of objects as an object of lists.
        value = [
            dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)
        ]
    if not isinstance(value, list):
        raise _row_error(f"{where} must be a list of messages, found {_name_type(value)}")
    if not value:
        raise DataError(f"{where} is empty", hint="remove the row from the file")
    return tuple(
        _parse_message(message, f"{where}[{index}]", folder) for index, message in enumerate(value)
    )


def _parse_message(value: object, where: str, folder: Path) -> Message:
    if not isinstance(value, dict):
        raise _row_error(f"{where} must be an object, found {_name_type(value)}")
    present = {key: item for key, item in value.items() if item is not None}
    if "role" not in present and "from" not in present:
        raise _row_error(f"{where} has neither `role` nor `from`; {_list_keys(value)}")
    role = present.get("role", present.get("from"))
    if not isinstance(role, str) or not role:
        raise _row_error(f"{where}: the role must be a string, found {role!r:.40}")
    if "role" in present:
        content = present.get("content", "" if "tool_calls" in present else None)
        present = {**present, "content": _parse_content(content, f"{where}.content", folder)}
        if "tool_calls" in present:
            present["tool_calls"] = _parse_calls(present["tool_calls"], where)
        return present
    if role.lower() not in _SHAREGPT_ROLES:
        raise _row_error(f"{where} is from {role!r:.40}, an unknown role")
    content = _parse_content(present.get("value"), f"{where}.value", folder)
    return {"role": _SHAREGPT_ROLES[role.lower()], "content": content}


def _parse_calls(value: object, where: str) -> list[Any]:
    """Decode the arguments of calls: templates expect objects, as servers give them."""
    calls = _decode_json(value)
    if not isinstance(calls, list):
        raise _row_error(f"{where}: tool_calls must be a list, found {_name_type(calls)}")
    decoded = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function = {**function, "arguments": _decode_json(function["arguments"])}
            call = {**call, "function": function}  # noqa: PLW2901
        decoded.append(call)
    return decoded


def _parse_content(value: object, where: str, folder: Path) -> str | list[ContentPart]:
    if isinstance(value, str):
        return require_unicode(value, where)
    if not isinstance(value, list):
        raise _row_error(f"{where} must be text or a list of parts, found {_name_type(value)}")
    parts = [_parse_part(part, f"{where}[{index}]", folder) for index, part in enumerate(value)]
    texts = [part for part in parts if type(part) is str]
    return "".join(texts) if len(texts) == len(parts) else parts


def _parse_part(part: object, where: str, folder: Path) -> ContentPart:
    fields = part if isinstance(part, dict) else {}
    if (medium := parse_media_part(fields, where, folder)) is not None:
        return medium
    text = fields.get("text") if fields.get("type") in ("text", "input_text") else None
    if not isinstance(text, str):
        raise _row_error(f"{where} is a part of no known type: {part!r:.60}")
    return require_unicode(text, where)


# --- media of columns ----------------------------------------------------------------------------


def _find_media(
    value: Mapping[str, Any], origin: str, folder: Path
) -> dict[Modality, list[Medium]]:
    """Find the media in columns, by their kind."""
    media: dict[Modality, list[Medium]] = {}
    for name in (*VIDEO_COLUMNS, *MEDIA_COLUMNS):
        content = value.get(name)
        is_list = isinstance(content, list | tuple)
        if content is None or (is_list and not content):
            continue
        if name in VIDEO_COLUMNS:
            raise refuse_video(f"{origin}: {name}")
        kind = MEDIA_COLUMNS[name]
        if kind in media:
            raise DataError(
                f"{origin}: both {kind}s and {kind} hold media", hint="keep one of the columns"
            )
        media[kind] = []
        for index, item in enumerate(content if is_list else [content]):
            where = f"{origin}: {name}" + (f"[{index}]" if is_list else "")
            medium = parse_media_part({"type": str(kind), str(kind): item}, where, folder)
            if not isinstance(medium, Medium):
                raise DataError(
                    f"{where}: {type(item).__name__} without {kind}"
                    if item
                    else f"{where} is empty",
                    hint=f"name a file, or leave the {kind} out",
                )
            media[kind].append(medium)
    return media


def _place_media(row: Row, media: Mapping[Modality, list[Medium]]) -> Row:
    """Put the media of columns where a row has marks or empty parts; else before its first text."""
    messages = row.messages
    if media and messages is None:
        if row.text is None:
            raise DataError(
                f"{row.origin}: input_ids stand beside {next(iter(media))}s",
                hint="give text or messages: the model's processor makes the token ids",
            )
        messages = ({"role": "user", "content": row.text},)
    if messages is None or not (media or any(isinstance(m["content"], list) for m in messages)):
        return row
    contents = [list(_split_content(message["content"], media)) for message in messages]
    first = next((index for index, m in enumerate(messages) if m["role"] == "user"), 0)
    for kind in reversed(MEDIA):  # each is put before those that were put first
        items = media.get(kind, [])
        places = [(parts, i) for parts in contents for i, part in enumerate(parts) if part is kind]
        if items and not places:
            contents[first][:0] = items
        elif len(places) != len(items):
            raise DataError(
                f"{row.origin}: {len(items)} {kind}s beside {len(places)} places for them",
                hint=f"write {MARKS[kind]} in the text, or a part of type {kind}, once for each"
                if items
                else f"give the part a path, url or base64, or the row a column {kind}s",
            )
        else:
            for (parts, index), medium in zip(places, items, strict=True):
                parts[index] = medium
    placed = zip(messages, contents, strict=True)
    messages = tuple({**m, "content": content} for m, content in placed)
    return Row(row.origin, messages=messages, tools=row.tools)


def _split_content(
    content: str | list[ContentPart], media: Mapping[Modality, list[Medium]]
) -> Iterator[ContentPart]:
    """Split a content into parts, its text at the marks of media."""
    kinds = {MARKS[kind]: kind for kind in media}
    for part in content if isinstance(content, list) else [content]:
        if type(part) is not str or not kinds:
            yield part
        else:
            pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", part)
            yield from (kinds.get(piece, piece) for piece in pieces if piece)


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
