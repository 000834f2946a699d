"""Compare all types of the KV cache on the demo model and on tiny models of other families.

Started by `scripts/bench --caches`. The demo model is calibrated on Python's documentation and
scored on some of its modules, as it is and with outliers: K of two layers is 2^11 times as large,
and q as much smaller. The tiny models are random. Prints a table for docs/results.md.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import fp8calib
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table
from scripts.benchmarks.sinks import cut_texts, plant_outliers
from tests.verification.test_cache_figures import FAMILIES, TEXT, build

Scores = Mapping[str, tuple[float, float | None]]


def main() -> None:
    """Score, print."""
    parser = make_parser("--caches", str(__doc__), samples=4, dtypes=("float32",))
    options = parser.parse_args()
    warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
    found = dict(score_all(options))
    names = dict.fromkeys(name for scores in found.values() for name in scores)
    rows = [
        [f"`{name}`", *(format_score(scores.get(name)) for scores in found.values())]
        for name in names
    ]
    print(format_table(("type", *found), rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def score_all(options: Any) -> Iterator[tuple[str, Scores]]:
    """Give the scores of each model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 -- slow to import

    first, second = cut_texts(AutoTokenizer.from_pretrained(options.model), options)
    for name in ("SmolLM2", "with outliers"):
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
        if name != "SmolLM2":
            plant_outliers(model)
        yield name, score(model, first, second, options.seq_len)
    for family in FAMILIES:
        yield f"tiny {family}", score(build(family), TEXT[:3], TEXT[3:], len(TEXT[0]))


def score(model: Any, first: Any, second: Any, seq_len: int) -> Scores:
    """Calibrate on one text, and compare all types on the other: divergence and error by type."""
    stats = fp8calib.calibrate(model, first, seq_len=seq_len).stats
    report = fp8calib.verify(
        model, stats, second, seq_len=seq_len, engine="reference", kv_cache_dtype=["all"]
    )
    return {
        one.name: (one.kld_mean, one.kld_se)
        for one in report.candidates
        if one.kld_mean is not None
    }


def format_score(score: tuple[float, float | None] | None) -> str:
    """Format a divergence with its error."""
    if score is None:
        return ""
    mean, error = score
    return f"{mean:.2g}" if error is None else f"{mean:.2g} ± {error:.1g}"


if __name__ == "__main__":
    main()
