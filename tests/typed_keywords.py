"""Type checkers see the keywords of public functions: `scripts/check` runs mypy on this module.

mypy refuses a `type: ignore` that is not needed, so each of these lines has to be an error.
"""

from typing import assert_type

import fp8calib
from fp8calib.commands.calibrate import CalibrateResult


def use_keywords() -> None:
    """Call public functions, rightly and wrongly."""
    assert_type(fp8calib.calibrate("model", seq_len=512, memory=2.5), CalibrateResult)
    fp8calib.calibrate("model", seq_len="512")  # type: ignore[arg-type]
    fp8calib.calibrate("model", seqlen=512)  # type: ignore[call-arg]
    fp8calib.quantize("model")  # type: ignore[call-arg]
    fp8calib.export(["one", "two"], "out", "rfc")  # type: ignore[call-arg]
