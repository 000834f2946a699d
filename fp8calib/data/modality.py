"""What a token stands for, and which tokens stand for media."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

_PLACEHOLDER = re.compile(r"(image|audio)_token_(?:id|index)")


class Modality(StrEnum):
    """What a token of the text decoder stands for."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"


MODALITIES = tuple(Modality)
"""In the order of their codes in tensors."""


def find_placeholders(config: Any, processor: Any = None) -> dict[int, Modality]:
    """Find the ids of the tokens that media fill: in the config, its parts, or the processor.

    The token of a processor may stand only in prompts, where other tokens replace it (Gemma 3,
    Llama 4): it counts only if the config names none for this kind of media.
    """
    names = getattr(config, "sub_configs", None) or {}
    parts = [getattr(config, name, None) for name in names]
    placeholders = dict(pair for source in (*parts, config) for pair in _list_placeholders(source))
    of_processor = dict(_list_placeholders(processor))
    known = set(placeholders.values())
    return {**{i: kind for i, kind in of_processor.items() if kind not in known}, **placeholders}


def _list_placeholders(source: Any) -> Iterator[tuple[int, Modality]]:
    for name in sorted({*dir(source), *getattr(source, "attribute_map", ())}):
        if match := _PLACEHOLDER.fullmatch(name):
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                yield value, Modality(match[1])
