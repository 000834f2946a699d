"""Compare `check` with engines on random checkpoints: `scripts/test-engines --fuzz N --seed S`."""

import argparse
import gc
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from tests.real_engines.fuzz.compare import Kind
from tests.real_engines.fuzz.draw import Case, draw, parse_case
from tests.real_engines.fuzz.engines import (
    TransformersObserver,
    VllmObserver,
    observe_sglang,
    open_sglang,
)
from tests.real_engines.fuzz.evaluate import RUN_IN_CHECK, Evaluator, Observe, Result
from tests.real_engines.vllm_job import ForkServer

ENGINES = ("vllm", "transformers", "sglang")
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
        choices=(*ENGINES, RUN_IN_CHECK),
        help=f"instead of the three engines: {RUN_IN_CHECK} compares `vllm check` with vLLM",
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


def evaluate(
    cases: Iterable[Case], folder: Path, engines: Collection[str], count: int
) -> Iterator[Result]:
    """Give the results as they come; one fork of this process gets all cases of an architecture."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.architecture, []).append(case)
    context = multiprocessing.get_context("fork")
    names: SimpleQueue[str] = context.SimpleQueue()
    servers = {}
    with ExitStack() as stack:
        for number in range(count):
            name = str(number)
            names.put(name)
            if not {"vllm", RUN_IN_CHECK}.isdisjoint(engines):
                servers[name] = stack.enter_context(ForkServer(folder / f"vllm-{name}.log"))
        if "sglang" in engines:
            open_sglang()  # once, while vLLM is imported
        gc.freeze()  # or every fork goes through all of torch's objects
        pool = stack.enter_context(
            ProcessPoolExecutor(
                count,
                mp_context=context,
                initializer=_Worker.begin,
                initargs=(names, folder, engines, servers),
            )
        )
        for future in as_completed([pool.submit(_Worker.evaluate, g) for g in groups.values()]):
            yield from future.result()


class _Worker:
    """What runs in one of the forks."""

    evaluator: Evaluator

    @classmethod
    def begin(
        cls,
        names: SimpleQueue[str],
        folder: Path,
        engines: Collection[str],
        servers: dict[str, ForkServer],
    ) -> None:
        """Make the evaluator, with the first server that no other worker has."""
        name = names.get()
        own = folder / name
        own.mkdir()
        observers: dict[str, Observe] = {}
        server = servers.get(name)
        if server is not None:
            vllm = VllmObserver(server, own)
            observers |= {each: vllm for each in ("vllm", RUN_IN_CHECK) if each in engines}
        if "transformers" in engines:
            observers["transformers"] = TransformersObserver(own)
        if "sglang" in engines:
            observers["sglang"] = observe_sglang
        cls.evaluator = Evaluator(own, observers, server)

    @classmethod
    def evaluate(cls, cases: Sequence[Case]) -> list[Result]:
        return [cls.evaluator(case) for case in cases]


_WIDTH = 400
_EXAMPLES = 8
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|/\S+|\w+(?:\.\w+)*[._]\w+|-?\b\d[\w.+-]*")
"""What differs between checkpoints in texts of the same cause: names, paths, numbers."""


def print_report(results: Sequence[Result]) -> None:
    """Print the disagreements by kind and cause, then how many cases agree."""
    causes = defaultdict(list)
    for result in results:
        for engine, finding in result.findings.items():
            lines = ("".join(text.splitlines()[:1]) for text in (finding.check, finding.engine))
            cause = tuple(_VARYING.sub("", line)[:80] for line in lines)
            causes[list(Kind).index(finding.kind), engine, cause].append((result.case, finding))
    for (_, engine, _), items in sorted(causes.items()):
        _, first = items[0]
        print(f"\n{first.kind.value.upper()}\n* {engine}, {len(items)} times")
        print(f"  check:  {_cut(first.check)}\n  engine: {_cut(first.engine)}")
        for case, _ in items[:_EXAMPLES]:
            print(f'  repeat: scripts/test-engines --engine {engine} --case "{case}"')
    for engine in sorted({e for r in results for e in (*r.agreed, *r.findings, *r.excluded)}):
        print(f"\n{engine}: {sum(engine in result.agreed for result in results)} agree")
        kinds = Counter(r.findings[engine].kind for r in results if engine in r.findings)
        excluded = Counter(r.excluded[engine] for r in results if engine in r.excluded)
        _print_counts({kind.value: kinds[kind] for kind in Kind})
        _print_counts({f"not compared: {why}": count for why, count in excluded.items()})
    _print_counts(Counter(f"not written: {r.unwritten}" for r in results if r.unwritten))


def _cut(text: str) -> str:
    """Shorten a text in the middle: the end of an error names the engine's line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 90]} ... {line[-80:]}"


def _print_counts(counts: Mapping[str, int]) -> None:
    for text, count in counts.items():
        print(f"  {count:4}  {_cut(text)}")


if __name__ == "__main__":
    sys.exit(main())
