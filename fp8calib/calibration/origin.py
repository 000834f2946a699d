"""Which model and run scales are of, and the names of a run's files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fp8calib.errors import ModelError

STATS_NAME = "stats.safetensors"
"""The name of the stats file in the output folder of a run."""
REPORT_NAME = "report.json"
"""The name of the report in the same folder."""
METADATA_KEY = "fp8calib"
"""The metadata key by which a file is known to be one."""
_KEYS = ("model", "data", "text_start")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def calibrate_first(option: str, *, recipe: str = "") -> str:
    """Say how to measure what is missing, and the option that takes it."""
    chosen = f" --recipe {recipe}" if recipe else ""
    return f"run `fp8calib calibrate MODEL{chosen} --out DIR`, then add {option} DIR/{STATS_NAME}"


def spell_export(stats: Path, model: str = "MODEL") -> str:
    """Spell the command that makes a checkpoint from statistics, for hints."""
    options = f"--format kv-overlay --model {shlex.quote(model)} --out DIR"
    return f"`fp8calib export {shlex.quote(str(stats))} {options}`"


def is_stats_file(path: Path) -> bool:
    """Whether the metadata of a safetensors file marks it as calibration statistics."""
    if not path.is_file():
        return False
    from fp8calib.checkpoint.header import read_header  # noqa: PLC0415 -- the parser needs none

    try:
        return METADATA_KEY in read_header(path)[1]
    except ModelError:
        return False


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
        given = fields if isinstance(fields, Mapping) else {}
        model, data, start = (str(given.get(key, "")) for key in _KEYS)
        is_known = set(given) <= {*_KEYS, "text"}
        if not (is_known and all(map(_FINGERPRINT.fullmatch, (model, data or model)))):
            raise ValueError("not a fingerprint of 64 hexadecimal digits")
        return cls(model=model, data=data, text_start=start)


def explain_difference(calibrated: str, here: str, *, between: str = ", here ") -> str:
    """Explain how the calibrated model differs from the one here, by their fingerprints."""
    parts = {"config.json": slice(0, 32), "weights": slice(32, None)}
    return " and ".join(
        f"different {name} ({calibrated[part][:8]}{between}{here[part][:8]})"
        for name, part in parts.items()
        if calibrated[part] != here[part]
    )
