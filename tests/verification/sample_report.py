"""A report as a 30-layer model would give it: seeded, with every part filled in."""

from __future__ import annotations

import math

import numpy as np

from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    HistogramResult,
    LayerResult,
    PositionResult,
    RuleResult,
    Verdict,
    VerifyReport,
    WorstText,
)
from tests.kit.reports import make_candidate, make_layer, make_small

LAYERS, SEQUENCES = 30, 64
OVERLAY = "SmolLM2-135M-fp8calib/kv-overlay"
HEADS = "SmolLM2-135M-fp8calib/kv-overlay-head"
CHECKPOINT = "out/SmolLM2-135M-fp8-static-compressed-tensors"
_PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_BINS_PER_OCTAVE = 8


def make_report() -> VerifyReport:
    """Make a report with every part; a few of its numbers are null, as in real ones."""
    random = np.random.default_rng(5)
    amax = _draw_amax(random)
    candidates = _make_candidates(random)
    return make_small(
        model="HuggingFaceTB/SmolLM2-135M",
        data=("builtin (last 20 %)",),
        candidates=candidates,
        layers=(*_make_cache_layers(random, amax), *_make_linear_layers(random)),
        decision=Decision(
            headline="k of layers 0 and 16 clips at scale 1.0: calibrate. One scale a tensor is "
            "enough; scales by head change nothing that can be measured."
        ),
        histograms=_make_histograms(random, amax),
        sequence_klds={
            one.name: tuple(one.kld_mean * np.exp(random.normal(0, 0.4, SEQUENCES)))
            for one in candidates
        },
        worst_texts=tuple(
            WorstText(
                candidate=OVERLAY,
                sequence=number,
                kld=0.02 - index / 1000,
                before="... the scales of a cache are read once, when the model is loaded,\\nand",
                worst=" then",
                worst_kld=0.5,
            )
            for index, number in enumerate((9, 2, 12, 3, 7))
        ),
        rules=_make_rules(),
        warnings=(
            "calibration and verification text overlap: 3 of 64 sequences were seen in "
            "calibration; name other text with --data",
            "model.layers.29.self_attn: 2 of 3 heads are dead (amax 0 for every token)",
        ),
    )


def _draw_amax(random: np.random.Generator) -> dict[str, np.ndarray]:
    keys = np.exp2(random.normal(4.2, 0.5, LAYERS))
    values = np.exp2(np.linspace(-0.5, 4, LAYERS) + random.normal(0, 0.6, LAYERS))
    keys[[0, 16]] = [1180.0, 655.0]
    return {"k": keys, "v": values, "q": np.exp2(random.normal(4.5, 0.4, LAYERS))}


def _make_candidates(random: np.random.Generator) -> tuple[CandidateResult, ...]:
    rows = (
        (OVERLAY, 1.0011, 0.0006, 0.0031, Verdict.PASS),
        (HEADS, 1.0004, 0.0006, 0.0027, Verdict.NO_DIFFERENCE),
        (CHECKPOINT, 1.0316, 0.002, 0.0209, Verdict.WARN),
        (SCALE_ONE, 1.4062, 0.0188, 0.3127, Verdict.FAIL),
    )
    return tuple(
        make_candidate(
            name,
            ppl_ratio=ratio,
            ppl_ratio_se=error,
            kld_mean=kld,
            verdict=verdict,
            by_position=_make_positions(random, kld),
        )
        for name, ratio, error, kld, verdict in rows
    )


def _make_positions(random: np.random.Generator, kld: float) -> tuple[PositionResult, ...]:
    return tuple(
        PositionResult(
            first=2**octave,
            last=min(2 ** (octave + 1) - 1, 1023),
            tokens=64 * 2**octave,
            kld_mean=kld * (0.5 + octave / 10) * float(np.exp(random.normal(0, 0.1))),
            ppl_ratio=1 + kld,
        )
        for octave in range(10)
    )


def _make_cache_layers(
    random: np.random.Generator, amax: dict[str, np.ndarray]
) -> tuple[LayerResult, ...]:
    gains = {OVERLAY: 0.0, HEADS: 0.9, CHECKPOINT: -1.5, SCALE_ONE: -0.6}
    return tuple(
        make_layer(
            name,
            layer,
            role,
            sqnr_db=_draw_sqnr(random, gain, amax[role][layer], name),
            clipped=3e-4 * amax[role][layer] / 448
            if name == SCALE_ONE and amax[role][layer] > 448
            else 0.0,
            flushed=float(random.uniform(1, 3)) * (2e-3 if name == SCALE_ONE else 1e-4),
            amax=float(amax[role][layer]),
            scale=1.0 if name == SCALE_ONE else float(amax[role][layer] / 448),
        )
        for name, gain in gains.items()
        for role in ("k", "v", "q")
        for layer in range(LAYERS)
    )


def _draw_sqnr(random: np.random.Generator, gain: float, amax: float, name: str) -> float | None:
    clip_db = 14.0 if name == SCALE_ONE and amax > 448 else 0.0
    drawn = 31.2 + gain - clip_db + float(random.normal(0, 0.25))
    return None if drawn > 32.5 else drawn


def _make_linear_layers(random: np.random.Generator) -> tuple[LayerResult, ...]:
    return tuple(
        make_layer(
            CHECKPOINT,
            layer,
            role,
            site=f"model.layers.{layer}.{projection}.{role}",
            sqnr_db=float(random.normal(30, 1))
            - (11 if "down" in projection and role == "input" and layer in {1, 28} else 0),
            flushed=float(random.uniform(0, 2e-3)) if role == "input" else 0.0,
        )
        for role in ("input", "weight")
        for layer in range(LAYERS)
        for projection in _PROJECTIONS
    )


def _make_histograms(
    random: np.random.Generator, amax: dict[str, np.ndarray]
) -> tuple[HistogramResult, ...]:
    made = []
    for role in ("k", "v"):
        for layer in range(LAYERS):
            top = float(amax[role][layer])
            sample = np.abs(random.standard_t(4, 60_000)) + 1e-9
            octaves = np.log2(sample / sample.max() * top)
            bins = np.floor(octaves * _BINS_PER_OCTAVE).astype(int)
            first = int(bins.min())
            counts = np.bincount(bins - first)
            made.append(
                HistogramResult(
                    site=f"model.layers.{layer}.self_attn.{role}",
                    layer=layer,
                    lower_edges_log2=tuple(
                        (first + index) / _BINS_PER_OCTAVE for index in range(len(counts))
                    ),
                    counts=tuple(int(count) for count in counts),
                    scale=top / 448,
                    largest=top,
                    smallest=math.ldexp(top / 448, -10),
                )
            )
    return tuple(made)


def _make_rules() -> tuple[RuleResult, ...]:
    rows = (
        ("mse", 1.0006, 0.0006, 0.00290),
        ("amax", 1.0011, 0.0006, 0.00310),
        ("headroom:1.25", 1.0013, 0.0007, 0.00330),
        ("percentile:99.9", 1.0097, 0.0021, 0.01120),
    )
    return tuple(
        RuleResult(
            candidate="stats.safetensors",
            rule=rule,
            ppl_ratio=ratio,
            ppl_ratio_se=error,
            kld_mean=kld,
        )
        for rule, ratio, error, kld in rows
    )
