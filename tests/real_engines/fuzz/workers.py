"""Processes that evaluate cases side by side, each with a vLLM of its own."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from tests.real_engines.fuzz.draw import Case
from tests.real_engines.fuzz.engines import RunObserver, TransformersObserver, VllmObserver
from tests.real_engines.fuzz.evaluate import RUN_IN_CHECK, Evaluator, Observe, Result
from tests.real_engines.fuzz.sglang import observe_sglang, read_wheel
from tests.real_engines.vllm_job import ForkServer


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
            if not {"vllm", "run", RUN_IN_CHECK}.isdisjoint(engines):
                servers[name] = stack.enter_context(ForkServer(folder / f"vllm-{name}.log"))
        if "sglang" in engines:
            read_wheel()  # once, while vLLM is imported
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
    def evaluate(cls, cases: Sequence[Case]) -> list[Result]:
        return [cls.evaluator(case) for case in cases]
