"""Time verifications of a reference and one candidate, and the plain forward pass.

python -m scripts.benchmarks.workers.verification_pass MODEL TOKENS DTYPE DEVICE ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fp8calib.commands.recipe import load_recipe
from fp8calib.commands.request import PythonReporter
from fp8calib.data.sequences import batches
from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.candidates import Target, build_kv_candidate, build_scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.score import score
from scripts.benchmarks.workers.calibration_pass import Setup, set_up
from scripts.benchmarks.workers.timing import print_seconds, run_plain


def main(folder: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time a KV candidate with two engines' arithmetic, and a static W8A8 one."""
    with set_up(folder, tokens, dtype, device, load_recipe("w8a8-static")) as setup:
        runs: dict[str, Callable[[], object]] = {
            "plain": partial(run_plain, setup.model, setup.sequences)
        }
        for name, engine, kind in (
            ("reference", "reference", "kv"),
            ("vllm", "vllm", "kv"),
            ("w8a8", "reference", "w8a8"),
        ):
            numerics = find_emulated(engine)[1]
            candidate = build_candidates(setup, numerics)[kind]
            runs[name] = partial(
                score,
                *(setup.prepared, [candidate], list(batches(setup.plan, 1))),
                progress=PythonReporter(None),
                stage="verifying",
                shares_batch=device != "cpu",  # of this size, as the command does
            )
        prepared = {name: (lambda run=run: run) for name, run in runs.items()}
        print_seconds(prepared, rounds=rounds, device=device)


def build_candidates(setup: Setup, numerics: Numerics) -> dict[str, Candidate]:
    """Calibrate, and build a KV candidate and a static W8A8 one from the statistics."""
    stats = setup.calibrate()
    target = Target(prepared=setup.prepared, fingerprint="", numerics=numerics)
    return {
        "kv": build_kv_candidate("kv", compute_kv_scales(stats, E4M3FN), numerics, origin="bench"),
        "w8a8": build_scheme("w8a8", "fp8-static", target, stats),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
