"""The model and the text that scales were calibrated on, as scale files record them.

Readers compare the model's fingerprint, and refuse the scales of another model. `verify` compares
the text's hashes, and detects that it runs on the calibration text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

SKETCH_SIZE = 512
"""The number of text hashes in a scale file: the smallest. The sketch of two texts together can
therefore be computed from their sketches."""
_KEYS = ("model", "data", "text")
_FINGERPRINT_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationOrigin:
    """The model that scales belong to, and the text they were calibrated on, if known."""

    model: str
    """`fp8calib.calibration.fingerprint.fingerprint_model` of the unquantized model."""
    data: str = ""
    """Fingerprint of the data plan; empty where the text is unknown."""
    text: torch.Tensor
    """The smallest hashes of the text (`fp8calib.data.text_hashes`): int64, sorted."""
    unquantized: Mapping[str, str] = field(default_factory=dict)
    """Hashes of norms and embeddings (`unquantized_tensors`); empty if unknown. They are recorded
    apart from `to_fields`."""
    attention: Mapping[str, object] = field(default_factory=dict)
    """The calibrated model's attention, as scale files record it; empty if unknown."""
    measured_quantized: str = ""
    """How the weights of the calibrated model were quantized; empty if they were not."""

    @classmethod
    def of_model(cls, fingerprint: str) -> Self:
        """Make the origin of scales whose text is unknown."""
        return cls(model=fingerprint, text=torch.zeros(0, dtype=torch.int64))

    def to_fields(self) -> dict[str, str]:
        """Convert to strings; equal values give equal strings."""
        fields = {"model": self.model}
        if self.data:
            raw = self.text[:SKETCH_SIZE].numpy().astype("<i8").tobytes()
            fields |= {"data": self.data, "text": base64.b64encode(raw).decode()}
        return fields

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Convert the strings of `to_fields` back.

        Raises:
            ValueError: they have another form.
        """
        if not isinstance(fields, Mapping) or not set(fields) <= set(_KEYS):
            raise ValueError(f"not an object of {', '.join(_KEYS)}")
        model, data, text = (fields.get(key, "") for key in _KEYS)
        if not _is_fingerprint(model) or not (data == "" or _is_fingerprint(data)):
            raise ValueError(f"not a fingerprint of {_FINGERPRINT_DIGITS} hexadecimal digits")
        if not isinstance(text, str):
            raise ValueError("the hashes of the text are not a string")
        try:
            raw = base64.b64decode(text.encode(), validate=True)
        except binascii.Error as error:
            raise ValueError(f"the hashes of the text are damaged: {error}") from error
        if len(raw) % 8 or len(raw) > SKETCH_SIZE * 8:
            raise ValueError("the hashes of the text are damaged: wrong size")
        hashes = np.frombuffer(raw, dtype="<i8").astype(np.int64)
        if bool((hashes[1:] <= hashes[:-1]).any()):
            raise ValueError("the hashes of the text are damaged: not sorted")
        return cls(model=str(model), data=str(data), text=torch.from_numpy(hashes))


def estimate_overlap(text: torch.Tensor, seen: torch.Tensor) -> float:
    """Estimate the share of a text, 0 to 1, that another text contains.

    Args:
        text: hashes of the text: int64, sorted.
        seen: all hashes of the other text, or the `SKETCH_SIZE` smallest of them: int64, sorted.
            Of a sketch, only hashes up to its largest are compared: an overlap of less than about a
            hundredth of the other text may not be detected.
    """
    if len(seen) == SKETCH_SIZE:
        text = text[text <= seen[-1]]
    return float(torch.isin(text, seen).double().mean()) if len(text) else 0.0


def explain_difference(calibrated: str, here: str, *, between: str = ", here ") -> str:
    """Explain how the calibrated model differs from the one here, by their fingerprints."""
    half = _FINGERPRINT_DIGITS // 2
    parts = {"config.json": slice(0, half), "weights": slice(half, None)}
    return " and ".join(
        f"different {name} ({calibrated[part][:8]}{between}{here[part][:8]})"
        for name, part in parts.items()
        if calibrated[part] != here[part]
    )


def _is_fingerprint(value: object) -> bool:
    digits = set("0123456789abcdef")
    return isinstance(value, str) and len(value) == _FINGERPRINT_DIGITS and set(value) <= digits
