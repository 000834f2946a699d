"""What a user should know where FP8 weights are quantized in another way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from fp8calib.errors import cut_list
from fp8calib.formats.kv.parse_names import find_spelling
from fp8calib.numerics.encode import decode_rows, encode_rows
from fp8calib.numerics.formats import SMALLEST_SCALE
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.layer_schemes import LayerSchemes
from fp8calib.quantization.matrices import SUFFIX, Matrix
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.sources.decoded import DecodedCheckpoint, StoredCodes
from fp8calib.quantization.weight_reader import read_matrix
from fp8calib.quantization.weight_scales import part_amax, scale_parts, spread_scales

_SAMPLED, _SAMPLED_ROWS = 8, 64
"""The weights, and the rows of each, on which a second rounding is measured."""


def describe_changes(
    checkpoint: DecodedCheckpoint, plan: QuantizePlan, kept: StoredCodes | None
) -> Iterator[str]:
    """Say what rounding costs, and what the new checkpoint does not have as its source has it.

    `kept` are the codes that are not rounded again.
    """
    decoded, selection = checkpoint.weights, plan.selection
    others = [each for each in selection.quantized if kept is None or each not in kept]
    yield from _describe_second_rounding(checkpoint, others, plan.settings.schemes)
    more = [each.module for each in selection.quantized if each.source not in decoded]
    if more:
        patterns = dict.fromkeys(map(span_layers, more))
        yield (
            f"in 16 bits in MODEL, and quantized now: {cut_list(more)}; to leave them: "
            f"{spell_options(patterns)}"
        )
    fewer = [
        each.module
        for each in selection.unquantized
        if {each.module, each.module + SUFFIX} & decoded.keys()
    ]
    if fewer:
        yield f"in FP8 in MODEL, and not quantized now: {cut_list(fewer)}"
    if not plan.has_kv and any(map(find_spelling, checkpoint.stored.tensors)):
        yield (
            "the KV scales of MODEL are left out; `fp8calib extract-kv-scales --quantized-model "
            "MODEL --model OUT` adds them to a copy of the new checkpoint"
        )


def _describe_second_rounding(
    checkpoint: DecodedCheckpoint, matrices: Sequence[Matrix], schemes: LayerSchemes
) -> Iterator[str]:
    """Measure on a few weights what rounding FP8 codes to MXFP8 costs."""
    again = [
        each
        for each in matrices
        if each.source in checkpoint.weights and schemes.of(each.module).is_mx
    ]
    sample = again[:: max(1, len(again) // _SAMPLED)]
    if not sample:
        return
    errors = []
    for matrix in sample:
        values = read_matrix(checkpoint, matrix, range(min(matrix.shape[0], _SAMPLED_ROWS)))
        scheme = schemes.of(matrix.module)
        scale = scale_parts(part_amax(values, scheme), scheme)
        spread = spread_scales(scale, matrix.shape, scheme)[: len(values)]
        rounded = decode_rows(encode_rows(values, spread)).mul_(spread)
        errors.append(float((rounded - values).norm() / values.norm().clamp(min=SMALLEST_SCALE)))
    loss = 100 * fmean(errors)
    yield (
        f"the weights are FP8 already, and MXFP8 rounds them a second time: {loss:.1f} % of their "
        f"norm, measured on {len(sample)} linears; from the unquantized model it rounds once"
    )
