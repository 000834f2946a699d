"""The request of `fp8calib gptq`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from fp8calib.commands import options as shared
from fp8calib.commands.option import Option
from fp8calib.commands.options import (
    BATCH_SIZE,
    PACK,
    SAMPLES,
    SEQ_LEN,
    STRICT_ROWS,
    TEXT_COLUMN,
)
from fp8calib.commands.quantize import QuantizeRequest


@dataclass(frozen=True, slots=True)
class GptqRequest(QuantizeRequest):
    """Write an FP8 checkpoint whose weights are rounded by GPTQ, which runs text layer by layer.

    Later columns of a weight make up for the errors of earlier ones: the files lose less than those
    of `quantize`. Scales of static inputs are measured on the same text, unless --stats gives them.

    Example: fp8calib gptq MODEL --scheme fp8-static --data calib.jsonl --out model-fp8
    """

    _: KW_ONLY
    data: shared.DataOption = None
    text_column: Annotated[str | None, TEXT_COLUMN] = None
    strict_rows: Annotated[bool, STRICT_ROWS] = False
    samples: Annotated[int | None, SAMPLES] = None
    seq_len: Annotated[int | None, SEQ_LEN] = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    pack: Annotated[bool | None, PACK] = None
    dtype: shared.DtypeOption = "auto"
    memory: shared.MemoryOption = None
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan of the run and exit.")] = (
        False
    )
    trust_remote_code: shared.TrustOption = False
