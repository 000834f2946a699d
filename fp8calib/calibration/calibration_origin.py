"""The model and the text that scales were calibrated on, as scale files record them.

Readers compare the model's fingerprint, and refuse the scales of another model. `verify` compares
how the text starts, and detects that it runs on the calibration text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

_KEYS = ("model", "data", "text_start")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOrigin:
    """The model that scales belong to, and the text they were calibrated on, if known."""

    model: str
    """`fp8calib.calibration.fingerprint.fingerprint_model` of the unquantized model."""
    data: str = ""
    """Fingerprint of the data plan; empty where the text is unknown."""
    text_start: str = ""
    """Hash of the first tokens of the text (`DataPlan.start`); empty if it is unknown."""
    unquantized: Mapping[str, str] = field(default_factory=dict)
    """Hashes of norms and embeddings (`unquantized_tensors`); empty if unknown. They are recorded
    apart from `to_fields`."""
    attention: Mapping[str, object] = field(default_factory=dict)
    """The calibrated model's attention, as scale files record it; empty if unknown."""
    measured_quantized: str = ""
    """How the weights of the calibrated model were quantized; empty if they were not."""

    def to_fields(self) -> dict[str, str]:
        """Convert to strings; equal values give equal strings."""
        fields = {"model": self.model, "data": self.data, "text_start": self.text_start}
        return {key: value for key, value in fields.items() if value}

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Convert the strings of `to_fields` back.

        Raises:
            ValueError: they have another form.
        """
        # earlier versions recorded hashes of the whole text
        if not isinstance(fields, Mapping) or not set(fields) <= {*_KEYS, "text"}:
            raise ValueError(f"not an object of {', '.join(_KEYS)}")
        model, data, start = (fields.get(key, "") for key in _KEYS)
        if not all(_FINGERPRINT.fullmatch(str(text)) for text in (model, data or model)):
            raise ValueError("not a fingerprint of 64 hexadecimal digits")
        return cls(model=str(model), data=str(data), text_start=str(start))


def explain_difference(calibrated: str, here: str, *, between: str = ", here ") -> str:
    """Explain how the calibrated model differs from the one here, by their fingerprints."""
    parts = {"config.json": slice(0, 32), "weights": slice(32, None)}
    return " and ".join(
        f"different {name} ({calibrated[part][:8]}{between}{here[part][:8]})"
        for name, part in parts.items()
        if calibrated[part] != here[part]
    )
