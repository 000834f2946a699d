"""What scales were measured on: which model, and enough of the text to find it again.

Every file of scales carries it, so that scales of another model are refused, and a verification on
the calibration's own text is told.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

SKETCH_SIZE = 512
"""A file keeps so many hashes of the text, the smallest: as good as any, and those of two texts
together give the sketch of both."""
_KEYS = ("model", "data", "text")
_FINGERPRINT_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationOrigin:
    """The model that scales belong to, and the text that they come from where that is known."""

    model: str
    """`fp8calib.provenance.fingerprint_model` of the unquantized model."""
    data: str = ""
    """Fingerprint of the data plan; empty where no text is known."""
    text: torch.Tensor
    """The smallest hashes of the text (`fp8calib.data.text_hashes`): int64, sorted."""

    @classmethod
    def of_model(cls, fingerprint: str) -> Self:
        """Say that scales are for a model, measured on who knows what."""
        return cls(model=fingerprint, text=torch.zeros(0, dtype=torch.int64))

    def to_fields(self) -> dict[str, str]:
        """Say it in strings; the same value gives the same strings."""
        fields = {"model": self.model}
        if self.data:
            raw = self.text[:SKETCH_SIZE].numpy().astype("<i8").tobytes()
            fields |= {"data": self.data, "text": base64.b64encode(raw).decode()}
        return fields

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Read what `to_fields` wrote.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(fields, Mapping) or not set(fields) <= set(_KEYS):
            raise ValueError(f"not an object of {', '.join(_KEYS)}")
        model, data, text = (fields.get(key, "") for key in _KEYS)
        if not _is_fingerprint(model) or not (data == "" or _is_fingerprint(data)):
            raise ValueError(f"no fingerprint of {_FINGERPRINT_DIGITS} hexadecimal digits")
        return cls(model=str(model), data=str(data), text=_decode(text))


def estimate_overlap(text: torch.Tensor, seen: torch.Tensor) -> float:
    """Estimate which share of a text was seen: 0..1.

    Args:
        text: hashes of the text: int64, sorted.
        seen: all hashes of what was seen, or the `SKETCH_SIZE` smallest of them: int64, sorted.
            Of a sketch that is full only the hashes in its range are compared, so that an overlap
            of less than about a hundredth of what was seen may go by.
    """
    if len(seen) == SKETCH_SIZE:
        text = text[text <= seen[-1]]
    return float(torch.isin(text, seen).double().mean()) if len(text) else 0.0


def explain_difference(measured: str, here: str) -> str:
    """Say in what the model that was measured differs from the one here, by their fingerprints."""
    half = _FINGERPRINT_DIGITS // 2
    halves = {"config.json": slice(0, half), "weights": slice(half, None)}
    pairs = {name: (measured[part], here[part]) for name, part in halves.items()}
    return " and ".join(
        f"other {name} ({there[:8]}, here {own[:8]})"
        for name, (there, own) in pairs.items()
        if there != own
    )


def _is_fingerprint(value: object) -> bool:
    digits = set("0123456789abcdef")
    return isinstance(value, str) and len(value) == _FINGERPRINT_DIGITS and set(value) <= digits


def _decode(text: object) -> torch.Tensor:
    if not isinstance(text, str):
        raise ValueError("the hashes of the text are no string")
    try:
        raw = base64.b64decode(text.encode(), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the hashes of the text are damaged: {error}") from error
    if len(raw) % 8 or len(raw) > SKETCH_SIZE * 8:
        raise ValueError("the hashes of the text are damaged: of another size")
    hashes = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    if bool((hashes[1:] <= hashes[:-1]).any()):
        raise ValueError("the hashes of the text are damaged: not in order")
    return torch.from_numpy(hashes)
