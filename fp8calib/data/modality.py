"""What a token stands for."""

from __future__ import annotations

from enum import StrEnum


class Modality(StrEnum):
    """What a token of the text decoder stands for."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"


MODALITIES = tuple(Modality)
"""In the order of their codes in tensors."""
