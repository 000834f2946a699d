"""Which text is run through a model: the settings that recipes and requests share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fp8calib.commands import options as keys
from fp8calib.commands.request import Option
from fp8calib.model.geometry import Frozen


def make_field(option: Option, **more: Any) -> Any:
    """Make the field of a recipe's key from the option that overrides it."""
    return Field(
        default=option.key_default,
        ge=option.least,
        le=option.most,
        description=option.about,
        **more,
    )


class Data(Frozen):
    """Which data is run through the model."""

    sources: tuple[str, ...] = make_field(keys.DATA)
    text_column: str | None = make_field(keys.TEXT_COLUMN, min_length=1)
    strict_rows: bool = make_field(keys.STRICT_ROWS, strict=True)
    samples: int = make_field(keys.SAMPLES, strict=True)
    seq_len: int | None = make_field(keys.SEQ_LEN, strict=True)
    batch_size: int | None = make_field(keys.BATCH_SIZE, strict=True)
    pack: bool = make_field(keys.PACK, strict=True)
    seed: int = make_field(keys.SEED, strict=True)
