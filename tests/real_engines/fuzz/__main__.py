"""Compare `check` with engines on random checkpoints: `scripts/test-engines --fuzz N --seed S`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.real_engines.fuzz.compare import Kind
from tests.real_engines.fuzz.draw import Case, draw, parse_case
from tests.real_engines.fuzz.evaluate import RUN_IN_CHECK, Result
from tests.real_engines.fuzz.report import print_report
from tests.real_engines.fuzz.workers import evaluate

ENGINES = ("vllm", "transformers", "sglang")
ASKED_BY_NAME = ("run", RUN_IN_CHECK)
_MOST_JOBS = 4
"""By default: each holds vLLM in memory."""
_UNDAMAGED_IN_AGREEMENT = 0.5


def main() -> int:
    """Run the command line; 1 where `check` crashes, or calls something fine that is not."""
    parser = argparse.ArgumentParser(prog="scripts/test-engines", description=__doc__)
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="number of checkpoints")
    parser.add_argument(
        "--agreement", type=int, default=0, metavar="N", help="compare `vllm check` with vLLM"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one line of a report, instead of random checkpoints")
    parser.add_argument(
        "--engine",
        action="append",
        choices=(*ENGINES, *ASKED_BY_NAME),
        help="instead of the three engines: `run` is the loader of `vllm check`",
    )
    parser.add_argument("--jobs", type=int, default=min(_MOST_JOBS, os.cpu_count() or 1))
    options = parser.parse_args()
    torch.set_num_threads(1)  # forks have no threads but their own
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # nor does transformers start any
    engines = options.engine or ((RUN_IN_CHECK,) if options.agreement else ENGINES)
    cases = _choose_cases(options)
    started = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        jobs = max(1, min(options.jobs, len(cases)))
        for result in evaluate(cases, Path(folder), engines, jobs):
            results.append(result)
            kinds = {engine: finding.kind.name for engine, finding in result.findings.items()}
            outcome = result.unwritten or kinds or result.excluded or "agreed"
            print(f"{len(results):4}/{len(cases)} {result.case}: {outcome}", file=sys.stderr)
    results.sort(key=lambda result: cases.index(result.case))
    print_report(results)
    print(f"\n{len(results)} checkpoints, seed {options.seed}, {time.monotonic() - started:.0f} s")
    kinds_found = {finding.kind for result in results for finding in result.findings.values()}
    return int(not kinds_found.isdisjoint({Kind.CRASH, Kind.FALSE_OK}))


def _choose_cases(options: argparse.Namespace) -> list[Case]:
    if options.case:
        return [parse_case(options.case)]
    if options.agreement:
        return draw(options.agreement, options.seed, undamaged=_UNDAMAGED_IN_AGREEMENT)
    return draw(options.fuzz, options.seed)


if __name__ == "__main__":
    sys.exit(main())
