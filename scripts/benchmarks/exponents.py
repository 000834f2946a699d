"""Compare the two rules for the exponents of MXFP8: rounded up, and the OCP specification's.

Started by `scripts/bench --quality --exponents`. Weights are rounded to nearest by both rules, and
scored on the texts of `--rounding` as `fp8calib verify` scores them. Prints a table for
docs/results.md.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping

from scripts.benchmarks.child_process import PROGRAM, call, worker
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table
from scripts.benchmarks.rounding import (
    SCORED,
    WORK,
    Sums,
    compute_kld,
    divide,
    measure_difference,
    name_rows,
    write_rows,
    write_texts,
)

TITLES = ("text", "weights", "inputs", "rounded up", "OCP", "OCP - up", "OCP / up")
ROWS = {
    ("OCP", "16 bits"): ("mxfp8-a16", "up", "saturated", ""),
    ("OCP", "rounded up"): ("mxfp8", "up", "saturated", ""),
    ("rounded up", "OCP"): ("mxfp8", "up", "up", "--saturating-inputs"),
    ("OCP", "OCP"): ("mxfp8", "up", "saturated", "--saturating-inputs"),
}
"""What follows the OCP rule -> the scheme, the two checkpoints, an option of the second score."""


def main() -> None:
    """Write both checkpoints of each scheme, score them, print."""
    options = parse_options()
    with work_folder(WORK):
        write_texts()
        write_rows(options)
        scores = {scheme: score(options, scheme) for scheme in ("mxfp8-a16", "mxfp8")}
        print(format_table(TITLES, [row for text in SCORED for row in format_rows(text, scores)]))
        if options.json:
            options.json.write_text(json.dumps(scores, indent=2) + "\n")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--quality --exponents", __doc__, samples=24, dtypes=("float32",))
    options = parser.parse_args()
    return Namespace(**vars(options), held_out=options.samples, calibrations=0)


def score(options: Namespace, scheme: str) -> Mapping[str, Mapping[str, Sums]]:
    """Score a scheme's checkpoints: option and name of the checkpoint -> text -> sums."""
    up, saturated = (WORK / f"{scheme}-{name}" for name in ("up", "saturated"))
    call(PROGRAM, "quantize", options.model, "--scheme", scheme, "--out", up)
    call(*worker("workers.saturated", options.model, up, saturated))
    out, texts = WORK / "scores.json", list(map(name_rows, SCORED))
    job = (options.model, options.dtype, out, "--engine", "reference")
    found: dict[str, dict[str, Sums]] = {}
    for option in ("", *(["--saturating-inputs"] if scheme == "mxfp8" else [])):
        asked = (*job, *filter(None, [option]), "--texts", *texts, "--checkpoints", up, saturated)
        call(*worker("workers.divergences", *asked))
        for text, sums in json.loads(out.read_text()).items():
            for path in (up, saturated):
                name = f"{option} {path.name.removeprefix(scheme)[1:]}".strip()
                found.setdefault(name, {})[text] = sums[str(path)]
    return found


def format_rows(
    text: str, scores: Mapping[str, Mapping[str, Mapping[str, Sums]]]
) -> list[list[str]]:
    """Format what the OCP rule costs on a text, in the weights, the inputs and both."""
    rows = []
    for (weights, inputs), (scheme, first, second, option) in ROWS.items():
        plain = scores[scheme][first][text]
        ocp = scores[scheme][f"{option} {second}".strip()][text]
        difference, error = measure_difference(ocp, plain, "kld")
        ratio, ratio_error = divide(ocp, plain)
        rows.append(
            [
                text,
                weights,
                inputs,
                f"{compute_kld(plain):.4f}",
                f"{compute_kld(ocp):.4f}",
                f"{difference:+.4f} ± {error:.4f}",
                f"{ratio:.2f} ± {ratio_error:.2f}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
