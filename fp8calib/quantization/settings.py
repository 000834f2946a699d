"""The settings of a quantization, from the names of schemes and of a dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.errors import UsageError
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.registry import find_written, list_written
from fp8calib.numerics.schemes import choose_block_scales, find_scheme, list_without_calibration
from fp8calib.quantization.layer_schemes import OPTION, LayerSchemes
from fp8calib.quantization.plan import PlanSettings


def make_settings(
    scheme: str,
    layer_schemes: Mapping[str, str] | None = None,
    ignore: Sequence[str] | None = None,
    *,
    dialect: str = COMPRESSED_TENSORS.name,
    drafters: bool = False,
    power_of_two: bool = False,
    measures_inputs: bool = True,
) -> PlanSettings:
    """Find schemes and dialect by their names.

    Args:
        scheme: of linears that no pattern names.
        layer_schemes: the schemes of other linears, by pattern.
        ignore: patterns of linears that stay unquantized.
        dialect: of the checkpoint.
        drafters: whether drafters are quantized too.
        power_of_two: whether scales of blocks are powers of two.
        measures_inputs: whether the scales of static inputs are known, or will be.

    Raises:
        UsageError: a name is unknown, the dialect cannot express the schemes, or input scales are
            missing.
    """
    chosen = {
        pattern: choose_block_scales(
            find_scheme(name, option=pattern and f"{OPTION} {pattern}={name}"),
            power_of_two=power_of_two,
        )
        for pattern, name in {"": scheme, **(layer_schemes or {})}.items()
    }
    schemes = LayerSchemes(chosen.pop(""), tuple(chosen.items()))
    written = find_written(dialect, schemes.default)
    if schemes.by_pattern and not written.has_groups:
        others = (each.name for each in list_written() if each.has_groups)
        raise UsageError(
            f"{OPTION}: --format {written.name} has one scheme for all linears",
            hint=f"leave it out, or write {', '.join(others)}",
        )
    if schemes.has_static_inputs and not measures_inputs:
        named = (
            f"{OPTION} {p}={each.name}" for p, each in chosen.items() if each.has_static_inputs
        )
        option = f"--scheme {scheme}" if schemes.default.has_static_inputs else next(named)
        raise UsageError(
            f"{option}: its input scales come from calibration",
            hint="pass the --stats of `fp8calib calibrate --recipe w8a8-static`, or choose a "
            f"scheme that needs no calibration: {', '.join(list_without_calibration())}",
        )
    return PlanSettings(
        schemes=schemes, dialect=written, ignore=tuple(ignore or ()), drafters=drafters
    )
