"""Compare `check` with engines on random checkpoints: `scripts/test-engines --fuzz N --seed S`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.real_engines.fuzz.compare import Kind
from tests.real_engines.fuzz.draw import Case, draw, parse_case
from tests.real_engines.fuzz.evaluate import RUN_IN_CHECK, Result
from tests.real_engines.fuzz.report import Disagreement, list_disagreements, print_report
from tests.real_engines.fuzz.workers import Timed, Workers

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
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        jobs = max(1, min(options.jobs, len(cases)))
        with Workers(Path(folder), engines, jobs) as workers:
            results: list[Result] = []
            for timed in workers.evaluate(cases):
                results.append(timed.result)
                done = len({result.case.seed for result in results})
                _tell(f"{done:4}/{len(cases)} {_describe(timed)}")
            order = {case.seed: number for number, case in enumerate(cases)}
            results.sort(key=lambda result: order[result.case.seed])
            found = _reduce(workers, list_disagreements(results))
    print_report(results, found, seed=options.seed, duration_s=time.monotonic() - started)
    return int(any(item.finding.kind in {Kind.CRASH, Kind.FALSE_OK} for item in found))


def _choose_cases(options: argparse.Namespace) -> list[Case]:
    if options.case:
        return [parse_case(options.case)]
    if options.agreement:
        return draw(options.agreement, options.seed, undamaged=_UNDAMAGED_IN_AGREEMENT)
    return draw(options.fuzz, options.seed)


def _describe(timed: Timed) -> str:
    result = timed.result
    kinds = {engine: finding.kind.name for engine, finding in result.findings.items()}
    outcome = result.unwritten or kinds or result.excluded or "agreed"
    return f"{timed.duration_s:5.1f} s  {result.case}: {outcome}"


def _reduce(workers: Workers, found: Sequence[Disagreement]) -> list[Disagreement]:
    reduced: list[Disagreement] = []
    for item in workers.reduce(found):
        reduced.append(item)
        _tell(f"{len(reduced):4}/{len(found)} simplest: {item.engine}: {item.simplest}")
    return reduced


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
