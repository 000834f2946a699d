"""What a token stands for, and which tokens stand for media."""

from __future__ import annotations

import re
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
MEDIA = (Modality.IMAGE, Modality.AUDIO)
MEDIA_COLUMNS = {name: kind for kind in MEDIA for name in (f"{kind}s", str(kind))}
"""The columns beside a conversation or text that hold media, by their names."""
MARKS = {kind: f"<{kind}>" for kind in MEDIA}
"""Where a medium of a column stands in plain text."""
VIDEO_COLUMNS = ("video", "videos")
"""Columns that are refused where they hold something."""


def find_placeholders(config: Any, processor: Any = None) -> dict[int, Modality]:
    """Find the ids of the tokens that media fill: in the config, its parts, or the processor.

    The token of a processor may stand only in prompts, where other tokens replace it (Gemma 3,
    Llama 4): it counts only if the config names none for this kind of media.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    found: list[dict[int, Modality]] = []
    for sources in ([processor], [*parts, config]):
        placeholders = {}
        for source in sources:
            for name in sorted({*dir(source), *getattr(source, "attribute_map", ())}):
                match = _PLACEHOLDER.fullmatch(name)
                value = getattr(source, name, None) if match else None
                if match and type(value) is int:  # bool is an int to isinstance
                    placeholders[value] = Modality(match[1])
        found.append(placeholders)
    of_processor, of_config = found
    known = set(of_config.values())
    return {**{i: kind for i, kind in of_processor.items() if kind not in known}, **of_config}
