"""`fbgemm_fp8`: scales per output channel and per token."""

from __future__ import annotations

from pathlib import Path

from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Fields,
    FindScheme,
    StoredScheme,
    is_below,
    read_list,
    refuse_ignored,
)
from fp8calib.formats.refusals import refusal
from fp8calib.numerics.schemes import Granularity, InputScaling

_MAX_BOUND = 1e38


def _make_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of fbgemm: scales per output channel and per token, whose amax is limited."""
    bound = config.get("activation_scale_ub")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < _MAX_BOUND:
        raise refusal(
            path, f"activation_scale_ub is {bound!a:.40}", hint="it must be a number above 0"
        )
    ignored = read_list(path, config, "modules_to_not_convert")
    upper_bound = float(bound)

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, is_below)
        return StoredScheme(
            weights=Granularity.CHANNEL, inputs=InputScaling.TOKEN, upper_bound=upper_bound
        )

    return find


FBGEMM = Fp8Dialect(
    name="fbgemm_fp8",
    description="what transformers writes with fbgemm",
    method="fbgemm_fp8",
    make_finder=_make_finder,
)
