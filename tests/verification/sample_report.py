"""A report as a 30-layer model would give it, with every part filled in."""

import math

import numpy as np

from fp8calib.text import Table
from fp8calib.verification.page.charts import Figure, histogram
from fp8calib.verification.report import (
    SCALE_ONE,
    Decision,
    LayerResult,
    PositionResult,
    RuleResult,
    Verdict,
    VerifyReport,
)
from tests.kit.reports import make_candidate, make_layer, make_small

LAYERS, SEQUENCES, BINS_PER_OCTAVE = 30, 64, 8
OVERLAY = "SmolLM2-135M-fp8calib/kv-overlay"
HEADS = "SmolLM2-135M-fp8calib/kv-overlay-head"
CHECKPOINT = "out/SmolLM2-135M-fp8-static-compressed-tensors"
CANDIDATES = (
    (OVERLAY, 1.0011, 0.0006, 0.0031, Verdict.PASS),
    (HEADS, 1.0004, 0.0006, 0.0027, Verdict.NO_DIFFERENCE),
    (CHECKPOINT, 1.0316, 0.002, 0.0209, Verdict.WARN),
    (SCALE_ONE, 1.4062, 0.0188, 0.3127, Verdict.FAIL),
)
AMAX = {
    "k": [1180.0, *[18.0] * 15, 655.0, *[20.0] * 13],
    "v": np.exp2(np.linspace(-0.5, 4, LAYERS)).tolist(),
    "q": [22.0] * LAYERS,
}


def make_report() -> VerifyReport:
    """Make a report with every part; a few of its numbers are null, as in real ones."""
    random = np.random.default_rng(5)
    return make_small(
        model="HuggingFaceTB/SmolLM2-135M",
        data=("builtin (last 20 %)",),
        candidates=tuple(
            make_candidate(
                name,
                ppl_ratio=ratio,
                ppl_ratio_se=error,
                kld_mean=kld,
                verdict=verdict,
                by_position=tuple(
                    PositionResult(
                        first=2**octave,
                        last=min(2 ** (octave + 1) - 1, 1023),
                        tokens=64 * 2**octave,
                        kld_mean=kld * (0.5 + octave / 10),
                        ppl_ratio=1 + kld,
                    )
                    for octave in range(10)
                ),
            )
            for name, ratio, error, kld, verdict in CANDIDATES
        ),
        layers=tuple(
            _make_layer(name, layer, role)
            for name, *_ in CANDIDATES
            for role in (*AMAX, *(("input", "weight") if name == CHECKPOINT else ()))
            for layer in range(LAYERS)
        ),
        decision=Decision(
            headline="k of layers 0 and 16 clips at scale 1.0: calibrate. One scale a tensor is "
            "enough; scales by head change nothing that can be measured."
        ),
        histograms=dict(
            _make_histogram(random, role, layer) for role in "kv" for layer in range(LAYERS)
        ),
        sequence_klds={
            name: tuple(kld * np.exp(random.normal(0, 0.4, SEQUENCES)))
            for name, _, _, kld, _ in CANDIDATES
        },
        worst_texts=Table(
            title=f"Texts that lose most with {OVERLAY}",
            columns=["sequence", "KLD mean", "worst token", "its KLD", "text before it"],
            rows=[
                [
                    *("9", "0.0200", " then", "0.5000"),
                    "... the scales of a cache are read once, when the model is loaded,\\nand",
                ]
            ]
            * 5,
            words=(2, 4),
        ),
        rules=(
            RuleResult(
                candidate="stats.safetensors",
                rule="percentile:99.9",
                ppl_ratio=1.0097,
                ppl_ratio_se=0.0021,
                kld_mean=0.0112,
            ),
        ),
        warnings=(
            "calibration and verification text overlap: 3 of 64 sequences were seen in "
            "calibration; name other text with --data",
            "model.layers.29.self_attn: 2 of 3 heads are dead (amax 0 for every token)",
        ),
    )


def _make_layer(name: str, layer: int, role: str) -> LayerResult:
    amax = AMAX.get(role, AMAX["q"])[layer]
    clips = name == SCALE_ONE and amax > 448
    return make_layer(
        name,
        layer,
        role,
        sqnr_db=None if layer == 7 else (17.0 if clips else 31.0) + math.sin(layer + len(name)) / 2,
        clipped=3e-4 * amax / 448 if clips else 0.0,
        flushed=2e-4,
        amax=amax,
        scale=1.0 if name == SCALE_ONE else amax / 448,
    )


def _make_histogram(random: np.random.Generator, role: str, layer: int) -> tuple[str, Figure]:
    largest, site = float(AMAX[role][layer]), f"model.layers.{layer}.self_attn.{role}"
    sample = np.abs(random.standard_t(4, 60_000)) + 1e-9
    octaves = np.log2(sample / sample.max() * largest)
    bins = np.floor(octaves * BINS_PER_OCTAVE).astype(int)
    first = int(bins.min())
    counts = np.bincount(bins - first).tolist()
    by_edge = {(first + n) / BINS_PER_OCTAVE: count for n, count in enumerate(counts)}
    ends = math.ldexp(largest / 448, -10), largest
    return site, histogram(site, by_edge, largest / 448, ends)
