"""The request of `fp8calib gptq`."""

from __future__ import annotations

from dataclasses import KW_ONLY

from fp8calib.commands import options as shared
from fp8calib.commands.quantize import QuantizeRequest
from fp8calib.commands.request import option, request_class


@request_class
class GptqRequest(QuantizeRequest):
    """Write an FP8 checkpoint whose weights are rounded by GPTQ, which runs text layer by layer.

    The files lose less than those of `quantize`. Static inputs are measured on the same text,
    unless --stats gives their scales.

    Example: fp8calib gptq MODEL --scheme fp8-static --out MODEL-fp8
    """

    _: KW_ONLY
    data: shared.TextData | None = option(shared.DATA, default=None)
    text_column: str | None = option(shared.TEXT_COLUMN, default=None)
    strict_rows: bool = option(shared.STRICT_ROWS, default=False)
    samples: int | None = option(shared.SAMPLES, default=None)
    seq_len: int | None = option(shared.SEQ_LEN, default=None)
    batch_size: int | None = option(shared.BATCH_SIZE, default=None)
    pack: bool | None = option(shared.PACK, default=None)
    dtype: str = option(shared.DTYPE, default="auto")
    memory: float | None = option(shared.MEMORY, default=None)
    dry_run: bool = option("--dry-run", "Print the plan of the run and exit.", default=False)
    trust_remote_code: bool = option(shared.TRUST, default=False)
