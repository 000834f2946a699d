"""Compare `check` with engines on random checkpoints: `scripts/test-engines --fuzz N --seed S`."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.real_engines.fuzz.compare import Finding, Kind
from tests.real_engines.fuzz.draw import Case, draw, parse_case, shrink
from tests.real_engines.fuzz.engines import TransformersObserver, VllmObserver
from tests.real_engines.fuzz.evaluate import Evaluator, Observe, Observers, Result
from tests.real_engines.fuzz.report import Disagreement, print_report
from tests.real_engines.fuzz.sglang import observe_sglang
from tests.real_engines.vllm_job import WeightLoader

ENGINES = ("vllm", "transformers", "sglang")


def main() -> int:
    """Run the command line; 1 where `check` calls something fine that is not."""
    parser = argparse.ArgumentParser(prog="scripts/test-engines", description=__doc__)
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="number of checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one line of a report, instead of random checkpoints")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="instead of all")
    options = parser.parse_args()
    gc.freeze()  # or every fork goes through all of torch's objects
    cases = [parse_case(options.case)] if options.case else draw(options.fuzz, options.seed)
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        evaluate = Evaluator(folder, _make_observers(stack, folder, options.engine or ENGINES))
        results, found = [], []
        for case in cases:
            results.append(_evaluate(evaluate, case))
            found += [_reduce(evaluate, case, *item) for item in results[-1].findings.items()]
    print_report(results, found, seed=options.seed, duration_s=time.monotonic() - started)
    return int(any(item.finding.kind is Kind.FALSE_OK for item in found))


def _make_observers(stack: ExitStack, folder: Path, engines: list[str]) -> Observers:
    observers: dict[str, Observe] = {}
    if "vllm" in engines:
        loader = stack.enter_context(WeightLoader(folder / "vllm.log"))
        observers["vllm"] = VllmObserver(loader, folder)
    if "transformers" in engines:
        observers["transformers"] = TransformersObserver(folder)
    if "sglang" in engines:
        observers["sglang"] = observe_sglang
    return observers


def _evaluate(evaluate: Evaluator, case: Case) -> Result:
    started = time.monotonic()
    result = evaluate(case)
    kinds = {engine: finding.kind.name for engine, finding in result.findings.items()}
    told = result.unwritten or kinds or result.excluded or "agreed"
    _tell(f"{time.monotonic() - started:5.1f} s  {case}: {told}")
    return result


def _reduce(evaluate: Evaluator, case: Case, engine: str, found: Finding) -> Disagreement:
    """Find the simplest case in which the same engine disagrees in the same way."""

    def persists(simpler: Case) -> bool:
        finding = evaluate.find(simpler, engine)
        return finding is not None and finding.kind is found.kind

    simplest = shrink(case, persists)
    finding = evaluate.find(simplest, engine) or found
    _tell(f"         {engine}: {simplest}: {finding.engine}")
    return Disagreement(engine=engine, drawn=case, simplest=simplest, finding=finding)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
