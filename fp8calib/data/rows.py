"""One row of calibration data, parsed from a JSON object and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fp8calib.data.modality import MARKS, MEDIA, MEDIA_COLUMNS, VIDEO_COLUMNS, Modality
from fp8calib.errors import DataError, shorten

if TYPE_CHECKING:  # text needs none of it
    from fp8calib.data.media import Medium

Message = dict[str, Any]
"""A chat message: `role`, `content` and any other keys of the row's message.

The content is text; in a row with media it is a list of texts and media."""
ContentPart: TypeAlias = "str | Medium | Modality"
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
        contents = (message["content"] for message in self.messages or ())
        lists = (content for content in contents if isinstance(content, list))
        return tuple(part for parts in lists for part in parts if not isinstance(part, str))


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
    """
    row = _expect(value, dict, f"{origin}: a row", "a JSON object")
    if text_column is not None:
        form: tuple[str, ...] = (_name_kind(row, text_column, origin),)
        column = text_column
    else:
        usable = (form for form in FORMS if all(row.get(name) is not None for name in form))
        form = next(usable, ("",))
        column = form[0]
    where = f"{origin}: {column}"
    match form:
        case ("body",):  # a request of OpenAI's batches
            return parse_row(row[column], where, allow_blank=allow_blank, folder=folder)
        case ("input_ids",):
            parsed = Row(origin, input_ids=_parse_input_ids(row[column], row.get(MASK), origin))
        case ("text" | "content",):
            parsed = Row(origin, text=_parse_text(row[column], where, allow_blank=allow_blank))
        case ("messages" | "conversations" | "chosen",):
            messages = _parse_messages(row[column], where, folder)
            if messages[0]["role"] != "system":
                messages = (*_read_system(row, origin), *messages)
            tools = _decode_json(row.get(TOOLS)) or []
            tools = _expect(tools, list, f"{origin}: {TOOLS}", "a list")
            parsed = Row(origin, messages=messages, tools=tuple(tools) or None)
        case ("prompt", "completion"):
            places = [(row[name], f"{origin}: {name}") for name in form]
            if isinstance(row["prompt"], list):
                turns = [_parse_messages(*place, folder) for place in places]
                parsed = Row(origin, messages=(*turns[0], *turns[1]))
            else:
                text = "".join(_parse_text(*place, allow_blank=True) for place in places)
                whole = f"{origin}: prompt and completion"
                parsed = Row(origin, text=_parse_text(text, whole))
        case (question, answer):
            parsed = _parse_question(row, question, answer, origin)
        case _:
            raise DataError(f"{origin}: no usable field; {_list_keys(row)}", hint=_ROW_HINT)
    names = (*VIDEO_COLUMNS, *MEDIA_COLUMNS) if text_column is None else ()
    has_columns = any(row.get(name) is not None for name in names)
    media = _find_media(row, origin, folder) if has_columns else {}
    has_places = any(isinstance(message["content"], list) for message in parsed.messages or ())
    return _place_media(parsed, media) if media or has_places else parsed


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


def _expect(value: Any, kind: type | tuple[type, ...], where: str, what: str) -> Any:
    """Refuse a value of another type."""
    if isinstance(value, kind):
        return value
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    found = names.get(type(value), f"{type(value).__name__} {value!r:.40}")
    found = "nothing" if value is None else found
    raise DataError(f"{where} must be {what}, found {found}", hint=_ROW_HINT)


def _name_kind(row: dict[Any, Any], column: str, origin: str) -> str:
    """Name the field whose form the value of a column has."""
    content = row.get(column)
    if content is None:
        missing = "is null" if column in row else "is missing"
        like = get_close_matches(column, [str(key) for key in row if key != column], n=1)
        raise DataError(
            f"{origin}: the column {shorten(column)} {missing}; {_list_keys(row)}",
            hint=f"did you mean --text-column {shorten(like[0])}?"
            if like
            else "use --text-column to name another column",
        )
    if not isinstance(content, list):
        return "text"
    return "messages" if content and isinstance(content[0], dict) else "input_ids"


def _parse_question(row: dict[Any, Any], asked: str, answered: str, origin: str) -> Row:
    """Parse a question, or an instruction, and its answer: a conversation of two turns."""
    question = _parse_text(row[asked], f"{origin}: {asked}")
    for name in CONTEXTS if asked == "instruction" else ():
        if row.get(name) is not None:
            context = _parse_text(row[name], f"{origin}: {name}", allow_blank=True)
            question = "\n\n".join(filter(str.strip, (question, context)))
    answer = _parse_text(row[answered], f"{origin}: {answered}", allow_blank=True)
    messages = (
        *_read_system(row, origin),
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    )
    text = "\n\n".join(message["content"] for message in messages)
    return Row(origin, text=text, messages=messages)


def _read_system(row: dict[Any, Any], origin: str) -> Iterator[Message]:
    """Read the system's message, if the row has one in a column of its own."""
    name = next((name for name in SYSTEMS if row.get(name)), None)
    if name is not None:
        text = _parse_text(row[name], f"{origin}: {name}", allow_blank=True)
        yield {"role": "system", "content": text}


def _decode_json(value: object) -> Any:
    """Decode what is kept as JSON in a column of text; anything else stays as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _parse_input_ids(value: object, mask: object, origin: str) -> tuple[int, ...]:
    """Parse token ids, without the padding that a mask marks."""
    ids = value if isinstance(value, list) else []
    bits: Any = [1] * len(ids) if mask is None else mask
    is_mask = isinstance(bits, list) and len(bits) == len(ids) and all(b in (0, 1) for b in bits)
    kept = [place for place, bit in enumerate(bits) if bit] if is_mask else []
    # bool is an int to isinstance
    odd = next((place for place, item in enumerate(ids) if type(item) is not int), None)
    fault = ""
    if not ids:
        fault = "input_ids must be a list of at least one token id"
    elif odd is not None:
        fault = f"input_ids holds {ids[odd]!r:.40} at position {odd}, not an integer"
    elif not kept or kept[-1] - kept[0] != len(kept) - 1:
        fault = (
            f"{MASK} must be a list of 0 and 1, as long as input_ids, {len(ids)}, with 0 at its "
            "ends alone"
        )
    if fault:
        raise DataError(f"{origin}: {fault}", hint=_ROW_HINT)
    return tuple(ids[kept[0] : kept[-1] + 1])


def _parse_text(value: object, where: str, *, allow_blank: bool = False) -> str:
    text = require_unicode(_expect(value, str, where, "a string"), where)
    if not allow_blank and not text.strip():
        raise DataError(f"{where} is empty", hint="remove the row from the file")
    return text


def _parse_messages(value: object, where: str, folder: Path) -> tuple[Message, ...]:
    value = _decode_json(value)
    if isinstance(value, dict) and all(isinstance(item, list) for item in value.values()):
        # `datasets` gives a sequence of objects as an object of lists.
        value = [
            dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)
        ]
    places = enumerate(_expect(value or None, list, where, "a list of messages"))
    return tuple(_parse_message(message, f"{where}[{i}]", folder) for i, message in places)


def _parse_message(value: object, where: str, folder: Path) -> Message:
    fields = _expect(value, dict, where, "an object")
    present = {key: item for key, item in fields.items() if item is not None}
    role, fault = present.get("role", present.get("from")), ""
    if role is None:
        fault = f" has neither `role` nor `from`; {_list_keys(fields)}"
    elif not isinstance(role, str) or not role:
        fault = f": the role must be a string, found {role!r:.40}"
    elif "role" not in present and role.lower() not in _SHAREGPT_ROLES:
        fault = f" is from {role!r:.40}, an unknown role"
    if fault:
        raise DataError(f"{where}{fault}", hint=_ROW_HINT)
    if "role" not in present:
        text = _parse_content(present.get("value"), f"{where}.value", folder)
        return {"role": _SHAREGPT_ROLES[str(role).lower()], "content": text}
    content: Any = present.get("content", "" if "tool_calls" in present else None)
    present["content"] = _parse_content(content, f"{where}.content", folder)
    if "tool_calls" in present:  # templates expect decoded arguments, as servers give them
        calls = _decode_json(present["tool_calls"])
        present["tool_calls"] = decoded = []
        for call in _expect(calls, list, f"{where}: tool_calls", "a list"):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                arguments = _decode_json(function["arguments"])
                decoded.append({**call, "function": {**function, "arguments": arguments}})
            else:
                decoded.append(call)
    return present


def _parse_content(value: object, where: str, folder: Path) -> str | list[ContentPart]:
    if isinstance(value, str):
        return require_unicode(value, where)
    # most contents are text
    from fp8calib.data.media import parse_media_part  # noqa: PLC0415

    parts: list[ContentPart] = []
    for index, part in enumerate(_expect(value, list, where, "text or a list of parts")):
        place, fields = f"{where}[{index}]", part if isinstance(part, dict) else {}
        found: ContentPart | None = parse_media_part(fields, place, folder)
        if found is None:
            text = fields.get("text") if fields.get("type") in ("text", "input_text") else None
            if not isinstance(text, str):
                raise DataError(f"{place} is a part of no known type: {part!r:.60}", hint=_ROW_HINT)
            found = require_unicode(text, place)
        parts.append(found)
    texts = [part for part in parts if type(part) is str]
    return "".join(texts) if len(texts) == len(parts) else parts


# --- media of columns ----------------------------------------------------------------------------


def _find_media(row: Mapping[str, Any], origin: str, folder: Path) -> dict[Modality, list[Medium]]:
    """Find the media in columns, by their kind."""
    # most rows are text
    from fp8calib.data.media import Medium, parse_media_part, refuse_video  # noqa: PLC0415

    media: dict[Modality, list[Medium]] = {}
    for name in (*VIDEO_COLUMNS, *MEDIA_COLUMNS):
        content = row.get(name)
        is_list = isinstance(content, list | tuple)
        if content is None or (is_list and not content):
            continue
        if name in VIDEO_COLUMNS:
            raise refuse_video(f"{origin}: {name}")
        kind, fault = MEDIA_COLUMNS[name], ""
        if kind in media:
            fault = f"{origin}: both {kind}s and {kind} hold media"
        media[kind] = []
        for index, item in enumerate(content if is_list else [content]):
            where = f"{origin}: {name}" + (f"[{index}]" if is_list else "")
            medium = parse_media_part({"type": str(kind), str(kind): item}, where, folder)
            if isinstance(medium, Medium):
                media[kind].append(medium)
            else:
                fault = fault or f"{where}: no {kind} in {type(item).__name__}"
        if fault:
            raise DataError(
                fault, hint=f"name a file in one of the columns, or leave the {kind} out"
            )
    return media


def _place_media(row: Row, media: Mapping[Modality, list[Medium]]) -> Row:
    """Put the media of columns where a row has marks or empty parts; else before its first text."""
    messages = row.messages
    if messages is None:
        if row.text is None:
            raise DataError(
                f"{row.origin}: input_ids stand beside {next(iter(media))}s",
                hint="give text or messages: the model's processor makes the token ids",
            )
        messages = ({"role": "user", "content": row.text},)
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


def _list_keys(row: dict[Any, Any]) -> str:
    keys = [str(key)[:40] + " (null)" * (value is None) for key, value in row.items()]
    shown = ", ".join(keys[:12]) + (", ..." if len(keys) > 12 else "")
    return f"the keys are: {shown}" if keys else "the object is empty"
