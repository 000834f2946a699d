"""Several processes that calibrate one model together, each its share of the batches.

torchrun starts them. They agree through its store, and join what they have seen by maxima and sums:
exact, so the number of processes changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from fp8calib.data.shares import Item, Share
from fp8calib.errors import CalibrationError, Fp8CalibError
from fp8calib.geometry.sites import Site
from fp8calib.machine.launch import ProcessRank
from fp8calib.run.distributed.heartbeat import FailureDetector, PeerFailure
from fp8calib.run.distributed.rendezvous import POLL_S, START_HINT, meet, open_store, wait_for
from fp8calib.stats.calibration_stats import COUNT_FIELDS, TENSOR_FIELDS, SiteStats

_TIMEOUT = timedelta(minutes=5)
_ANSWER_S = 20.0
_NOTICE_S = 2.0


class RankLostError(CalibrationError):
    """A process of the run died: the others cannot go on."""


class _ToldError(Fp8CalibError):
    """The error of another process, as it is told here."""

    def __init__(self, message: str, lost: PeerFailure) -> None:
        super().__init__(message, hint=lost.hint)
        of_kind = {each.kind: each.exit_code for each in Fp8CalibError.__subclasses__()}
        self.kind = lost.kind or CalibrationError.kind  # type: ignore[misc]
        self.exit_code = of_kind.get(self.kind, CalibrationError.exit_code)  # type: ignore[misc]


class ProcessGroup:
    """The processes of a run; made by `open_crew`."""

    def __init__(
        self, place: ProcessRank, store: Any, watch: FailureDetector, device: torch.device
    ) -> None:
        self.place = place
        self._store = store
        self._watch = watch
        self.device = device
        self._num_shared = 0

    def take(self, items: Sequence[Item]) -> Sequence[Item]:
        """Give this process's part of a list that all have."""
        return Share(index=self.place.rank + 1, count=self.place.size).take(items)

    def share(self, make: Callable[[], Any]) -> Any:
        """Let the first process make something that JSON can say, and give it to all."""
        key = self._next_key()
        with self.in_touch():
            if self.place.is_first:
                self._store.set(key, json.dumps(make()))
            wait_for(self._store, key)
            return json.loads(self._store.get(key))

    def gather(self, own: Any) -> list[Any]:
        """Give to all what each process has, by rank: something that JSON can say."""
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.place.size)]
        with self.in_touch():
            self._store.set(keys[self.place.rank], json.dumps(own))
            wait_for(self._store, *keys)
            return [json.loads(self._store.get(each)) for each in keys]

    def reduce(self, sites: Mapping[Site, SiteStats]) -> dict[Site, SiteStats]:
        """Join what all processes have seen.

        Returns:
            The whole in the first process, nothing in the others.

        Raises:
            RankLostError: a process died.
        """
        layout: dict[str, list[int]] = {}
        for each in self.gather({key: list(tensor.shape) for key, tensor in _tensors(sites)}):
            layout |= each
        layout = dict(sorted(layout.items()))
        with self.in_touch():
            floats = self._all_reduce(_flatten(sites, layout, _is_float), distributed.ReduceOp.MAX)
            counts = self._all_reduce(_flatten(sites, layout, _is_count), distributed.ReduceOp.SUM)
        return _rebuild(layout, floats, counts) if self.place.is_first else {}

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """Turn what the death or the error of another process causes here into what it is.

        Raises:
            RankLostError: a process died.
            Fp8CalibError: of the kind of the error that it told of.
        """
        try:
            yield
        except KeyboardInterrupt:
            if (lost := self._watch.lost or self._watch.look()) is None:
                raise
            raise _explain(lost, self.place) from None
        except RuntimeError as error:
            if (lost := _find_lost(self._watch)) is None:
                raise
            raise _explain(lost, self.place) from error

    def _next_key(self) -> str:
        self._num_shared += 1
        return f"shared/{self._num_shared}"

    def _all_reduce(self, flat: torch.Tensor, operation: Any) -> torch.Tensor:
        on_device = flat.to(self.device)
        work = distributed.all_reduce(on_device, operation, async_op=True)
        while not work.is_completed():  # waiting in C++ could not be interrupted
            time.sleep(POLL_S)
        work.wait()
        return on_device.cpu()


@contextmanager
def open_crew(place: ProcessRank, device: str) -> Iterator[ProcessGroup | None]:
    """Meet the other processes; None where there are none.

    An error of one process ends all: the first one raises it, naming the rank it comes from.

    Raises:
        RankLostError: a process died or failed.
        CalibrationError: the others cannot be reached.
    """
    if place.size == 1:
        yield None
        return
    torch.set_num_threads(choose_threads(place, os.environ))
    target = torch.device(device)
    store = PrefixStore("fp8calib", base := open_store(place))
    others = range(1, place.size) if place.is_first else [0]
    watch = FailureDetector(store, place.rank, others, lambda lost: _give_up(lost, place))
    watch.start()
    crew = ProcessGroup(place, store, watch, target)
    try:
        with crew.in_touch():
            meet(place, store)
            _join_group(crew, base)
            yield crew
    except _ToldError as error:
        if place.is_first:
            raise
        raise SystemExit(error.exit_code) from None
    except RankLostError:
        raise
    except Fp8CalibError as error:
        watch.tell(error)
        if place.is_first or not _is_answered(store):
            raise
        raise SystemExit(error.exit_code) from None
    finally:
        watch.stop()
    distributed.destroy_process_group()


def choose_threads(place: ProcessRank, environment: Mapping[str, str]) -> int:
    """Give the threads of each process: OMP_NUM_THREADS, or its part of the machine's cores."""
    asked = environment.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return max(len(os.sched_getaffinity(0)) // place.local_size, 1)


def _join_group(crew: ProcessGroup, store: Any) -> None:
    """Open torch's process group over the store."""
    place = crew.place
    try:
        with crew.in_touch():
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if crew.device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.size,
                timeout=_TIMEOUT,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CalibrationError(
            f"rank {place.rank} of {place.size} cannot reach the others: {error}", hint=START_HINT
        ) from error


def _is_answered(store: Any) -> bool:
    """Wait until the first process has told of an error, before its starter ends all."""
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        try:
            if store.check(["left/0"]):
                time.sleep(_NOTICE_S)  # it is about to tell
                return True
        except RuntimeError:  # the first process has gone, and the store with it
            return False
        time.sleep(POLL_S)
    return False


def _find_lost(watch: FailureDetector) -> PeerFailure | None:
    """Find out who is gone, when a connection has broken: the system may need a moment."""
    until = time.monotonic() + _NOTICE_S
    while (lost := watch.lost or watch.look()) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    return lost


def _give_up(lost: PeerFailure, place: ProcessRank) -> None:
    """End this process, whose main thread is caught in torch; what all had seen is kept."""
    error = _explain(lost, place)
    if place.is_first:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.stderr.flush()
    os._exit(error.exit_code)


def _explain(lost: PeerFailure, place: ProcessRank) -> Fp8CalibError:
    message = f"rank {lost.rank} of {place.size}: {lost.why}"
    if lost.kind is None:
        hint = "what all had seen is kept: start the same command with --resume"
        return RankLostError(message, hint=hint)
    return _ToldError(message, lost)


# --- statistics as two long vectors ------------------------------------------------------------


def _tensors(sites: Mapping[Site, SiteStats]) -> Iterator[tuple[str, torch.Tensor]]:
    for site, stats in sites.items():
        yield f"{site}/count", torch.tensor(stats.count)
        for name in TENSOR_FIELDS:
            if (tensor := getattr(stats, name)) is not None:
                yield f"{site}/{name}", tensor


def _is_count(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name == "count" or name in COUNT_FIELDS


def _is_float(key: str) -> bool:
    return not _is_count(key)


def _flatten(
    sites: Mapping[Site, SiteStats],
    layout: Mapping[str, Sequence[int]],
    belongs: Callable[[str], bool],
) -> torch.Tensor:
    """Lay all tensors of one kind in a row, zeros where there is none: they change nothing."""
    found = dict(_tensors(sites))
    dtype = torch.int64 if belongs is _is_count else torch.float32
    parts = [
        found[key].flatten() if key in found else torch.zeros(shape, dtype=dtype).flatten()
        for key, shape in layout.items()
        if belongs(key)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _rebuild(
    layout: Mapping[str, Sequence[int]], floats: torch.Tensor, counts: torch.Tensor
) -> dict[Site, SiteStats]:
    taken = {True: 0, False: 0}
    by_site: dict[str, dict[str, Any]] = {}
    for key, shape in layout.items():
        flat = counts if (is_count := _is_count(key)) else floats
        start = taken[is_count]
        taken[is_count] = stop = start + torch.Size(shape).numel()
        site, _, name = key.rpartition("/")
        tensor = flat[start:stop].view(shape).clone()
        by_site.setdefault(site, {})[name] = int(tensor) if name == "count" else tensor
    return {Site.parse(site): SiteStats(**found) for site, found in by_site.items()}
