"""Processes that evaluate cases side by side, each with a vLLM of its own."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from tests.real_engines.fuzz.architectures import SIMPLEST
from tests.real_engines.fuzz.draw import Case, shrink
from tests.real_engines.fuzz.engines import RunObserver, TransformersObserver, VllmObserver
from tests.real_engines.fuzz.evaluate import RUN_IN_CHECK, Evaluator, Observe, Result
from tests.real_engines.fuzz.report import Disagreement, describe_effect
from tests.real_engines.fuzz.sglang import observe_sglang, read_wheel
from tests.real_engines.vllm_job import ForkServer


@dataclass(frozen=True, slots=True)
class Timed:
    """A result, and how long it took."""

    result: Result
    duration_s: float


class Workers:
    """A pool of forks of this process; a context manager."""

    def __init__(self, folder: Path, engines: Collection[str], count: int) -> None:
        self._stack = ExitStack()
        names = [str(number) for number in range(count)]
        servers = {
            name: self._stack.enter_context(ForkServer(folder / f"vllm-{name}.log"))
            for name in names
            if not {"vllm", "run", RUN_IN_CHECK}.isdisjoint(engines)
        }
        if "sglang" in engines:
            read_wheel()  # once, while vLLM is imported
        gc.freeze()  # or every fork goes through all of torch's objects
        context = multiprocessing.get_context("fork")
        waiting: SimpleQueue[str] = context.SimpleQueue()
        for name in names:
            waiting.put(name)
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=context,
            initializer=_Worker.begin,
            initargs=(waiting, folder, engines, servers),
        )
        self._stack.enter_context(self._pool)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def evaluate(self, cases: Iterable[Case]) -> Iterator[Timed]:
        """Give the results as they come; one worker gets all cases of an architecture."""
        groups: dict[str, list[Case]] = {}
        for case in cases:
            groups.setdefault(case.architecture, []).append(case)
        futures = [self._pool.submit(_Worker.evaluate, group) for group in groups.values()]
        for future in as_completed(futures):
            yield from future.result()

    def reduce(self, found: Iterable[Disagreement]) -> Iterator[Disagreement]:
        """Give the same disagreements as they come, each with the simplest case that shows it."""
        futures = [self._pool.submit(_Worker.reduce, item) for item in found]
        for future in as_completed(futures):
            yield future.result()


class _Worker:
    """What runs in one of the forks."""

    evaluator: Evaluator

    @classmethod
    def begin(
        cls,
        waiting: SimpleQueue[str],
        folder: Path,
        engines: Collection[str],
        servers: dict[str, ForkServer],
    ) -> None:
        """Make the evaluator, with the first server that no other worker has."""
        name = waiting.get()
        own = folder / name
        own.mkdir()
        observers: dict[str, Observe] = {}
        run = RunObserver(servers[name], own) if name in servers else None
        if run is not None:
            vllm = VllmObserver(servers[name], own)
            vllms = {"vllm": vllm, RUN_IN_CHECK: vllm, "run": run}
            observers |= {each: vllms[each] for each in vllms if each in engines}
        if "transformers" in engines:
            observers["transformers"] = TransformersObserver(own)
        if "sglang" in engines:
            observers["sglang"] = observe_sglang
        cls.evaluator = Evaluator(own, observers, run.ask if run is not None else None)

    @classmethod
    def evaluate(cls, cases: Sequence[Case]) -> list[Timed]:
        return evaluate_all(cls.evaluator, cases)

    @classmethod
    def reduce(cls, found: Disagreement) -> Disagreement:
        return reduce_one(cls.evaluator, found)


def evaluate_all(evaluator: Evaluator, cases: Iterable[Case]) -> list[Timed]:
    """Evaluate cases; one that cannot be written is made of the simplest model as well."""
    found = []
    for case in cases:
        found.append(_time(evaluator, case))
        if found[-1].result.unwritten and case.architecture != SIMPLEST:
            found.append(_time(evaluator, replace(case, architecture=SIMPLEST)))
    return found


def _time(evaluator: Evaluator, case: Case) -> Timed:
    started = time.monotonic()
    result = evaluator(case)
    return Timed(result, time.monotonic() - started)


def reduce_one(evaluator: Evaluator, found: Disagreement) -> Disagreement:
    """Find the simplest case in which the same engine disagrees in the same way."""
    effect = describe_effect(found.finding)

    def persists(simpler: Case) -> bool:
        finding = evaluator.find(simpler, found.engine)
        return finding is not None and describe_effect(finding) == effect

    simplest = shrink(found.simplest, persists)
    if simplest == found.simplest:
        return found
    finding = evaluator.find(simplest, found.engine)
    assert finding is not None
    return replace(found, simplest=simplest, finding=finding)
