"""Quantize one layer at a time, to find layers worth leaving unquantized."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from fp8calib.data.sequences import Batch, DataPlan, batches
from fp8calib.engines.numerics import Numerics
from fp8calib.geometry.model_geometry import Layer, ModelGeometry
from fp8calib.selection.ignored import spell_options
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import Sensitivity, SensitivityResult
from fp8calib.verification.score import count_in_rounds
from fp8calib.verification.summary import summarize
from fp8calib.verification.text_runs import TextRuns

SEQUENCES = 8
"""Number of sequences: every layer costs a forward pass over them."""
STANDS_OUT = 8.0
"""A layer whose KLD is above this multiple of the lower median, by more than twice its standard
error, is worth leaving unquantized."""


def measure_sensitivity(
    runs: TextRuns,
    geometry: ModelGeometry,
    candidate: Candidate,
    numerics: Numerics,
    *,
    sequences: int,
) -> Sensitivity:
    """Quantize one layer at a time as `candidate` does, on the text of `choose_batches`."""
    parts = split_by_layer(geometry, candidate)
    runs.begin_stage("one layer at a time", count_in_rounds(len(parts)))
    results = []
    for compared in runs.run_rounds({str(index): part for index, part in parts.items()}):
        for index, scores in compared.candidates.items():
            summary = summarize(scores, compared.reference, runs.lengths)
            results.append(
                SensitivityResult(
                    layer=int(index),
                    kld_mean=summary.kld_mean,
                    kld_se=summary.kld_se,
                    ppl_ratio=summary.ppl_ratio,
                )
            )
    return find_skippable(candidate, geometry, results, numerics, sequences=sequences)


def choose_batches(plan: DataPlan, batch_size: int) -> list[Batch]:
    """Choose the batches that single layers are measured on."""
    return [batch for batch in batches(plan, batch_size) if batch.first < SEQUENCES]


def split_by_layer(geometry: ModelGeometry, emulation: Candidate) -> dict[int, Candidate]:
    """Split an emulation into those of single layers, without layers that it leaves as they are."""
    parts = {layer.index: emulation.only(_list_modules(layer)) for layer in geometry.layers}
    return {index: part for index, part in parts.items() if part.quantizers or part.weights}


def find_skippable(
    candidate: Candidate,
    geometry: ModelGeometry,
    layers: Sequence[SensitivityResult],
    numerics: Numerics,
    *,
    sequences: int,
) -> Sensitivity:
    """Choose the layers whose cost stands out, and the option that leaves them unquantized.

    Of a KV cache it is the engine's flag; of FP8 weights, `--ignore` of `fp8calib quantize`.
    """
    usual = median_low(layer.kld_mean for layer in layers) if layers else 0.0
    chosen = tuple(layer.layer for layer in layers if _find_least(layer) > STANDS_OUT * usual)
    flag = ""
    if candidate.weights:
        named = {layer.index: layer.checkpoint_name for layer in geometry.layers}
        names = [name for index in chosen if (name := named[index]) is not None]
        flag = spell_options(names) if len(names) == len(chosen) else ""
    elif chosen and numerics.kv_skip_flag:
        chosen = geometry.with_readers(chosen)
        flag = numerics.spell_skip(chosen)
    return Sensitivity(
        candidate=candidate.name,
        sequences=sequences,
        layers=tuple(sorted(layers, key=lambda layer: -layer.kld_mean)),
        skip_layers=chosen,
        flag=flag,
    )


def _find_least(layer: SensitivityResult) -> float:
    """Give the divergence less twice its error, which is unknown where all sequences are equal."""
    return layer.kld_mean - 2 * (layer.kld_se or 0.0)


def _list_modules(layer: Layer) -> frozenset[str]:
    attention = [layer.attention.module] if layer.attention else []
    return frozenset([*attention, *(linear.module for linear in layer.linears)])
