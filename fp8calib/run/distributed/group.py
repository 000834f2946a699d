"""The processes that calibrate one model together, each with its share of the batches.

torchrun starts them. Their statistics are joined by maxima and sums, which are exact: the number
of processes changes nothing in the result.

Small values go through the store as JSON. torch's object collectives block in C++, where neither
Ctrl-C nor the failure detector reaches the main thread; in a thread they abort the exit (2.13).
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
from fp8calib.machine.process_rank import ALONE, ProcessRank
from fp8calib.run.distributed.heartbeat import POLL_S, FailureDetector, PeerFailure, wait_until
from fp8calib.run.distributed.rendezvous import (
    START_HINT,
    connect_store,
    rendezvous,
    wait_for_keys,
)
from fp8calib.stats.statistic import STATISTICS, SiteStats, group_tensors, name_tensors

_TIMEOUT = timedelta(minutes=5)
_FINISH_S = 20.0
"""How long a failed process waits for the first one to print its error."""
_NOTICE_S = 2.0


class RankLostError(CalibrationError):
    """A process of the run died, so the run cannot continue."""


class _PeerError(Fp8CalibError):
    """The error of another process, with its kind and exit code."""

    def __init__(self, message: str, failure: PeerFailure) -> None:
        super().__init__(message, hint=failure.hint)
        of_kind = {each.kind: each.exit_code for each in Fp8CalibError.__subclasses__()}
        self.kind = failure.kind or CalibrationError.kind  # type: ignore[misc]
        self.exit_code = of_kind.get(self.kind, CalibrationError.exit_code)  # type: ignore[misc]


class ProcessGroup:
    """The processes of a run: this one alone, unless `open_process_group` connects it to others.

    What a process alone would get from others is its own.
    """

    def __init__(self, process_rank: ProcessRank = ALONE) -> None:
        self.process_rank = process_rank
        self.rank = process_rank.rank
        self.size = process_rank.size
        self.is_first = process_rank.is_first

    def share_of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Give this process's share of a list that is the same in all processes."""
        return Share(index=self.rank + 1, count=self.size).take(items)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Make a JSON value in the first process and give it to all."""
        return make()

    def all_gather(self, own: Any) -> list[Any]:
        """Give every process the JSON values of all, by rank."""
        return [own]

    def reduce(self, sites: Mapping[Site, SiteStats]) -> dict[Site, SiteStats]:
        """Join the statistics of all processes.

        Returns:
            The joined statistics in the first process, nothing in every other process.

        Raises:
            RankLostError: a process died.
        """
        return dict(sites)

    def sum_tensors(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum named fp32 tensors over all processes; each may lack some.

        Sums round: their last bits depend on the number of processes.

        Raises:
            RankLostError: a process died.
        """
        return dict(own)

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        """Re-raise errors caused by a failed peer, naming the peer.

        Raises:
            RankLostError: a process died.
            Fp8CalibError: another process failed; the error is of the same kind.
        """
        yield


LONE = ProcessGroup()


class _ConnectedGroup(ProcessGroup):
    """Several processes, which share a store."""

    def __init__(self, process_rank: ProcessRank, store: Any, detector: FailureDetector) -> None:
        super().__init__(process_rank)
        self._store = store
        self._detector = detector
        self._num_values = 0

    def broadcast(self, make: Callable[[], Any]) -> Any:
        key = self._next_key()
        with self.peer_failures():
            if self.is_first:
                self._store.set(key, json.dumps(make()))
            wait_for_keys(self._store, key)
            return json.loads(self._store.get(key))

    def all_gather(self, own: Any) -> list[Any]:
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        with self.peer_failures():
            self._store.set(keys[self.rank], json.dumps(own))
            wait_for_keys(self._store, *keys)
            return [json.loads(self._store.get(each)) for each in keys]

    def reduce(self, sites: Mapping[Site, SiteStats]) -> dict[Site, SiteStats]:
        counts = {f"{site}/count": torch.tensor(stats.count) for site, stats in sites.items()}
        own = counts | dict(name_tensors(sites))
        shapes = self._gather_shapes(own)
        joined: dict[str, torch.Tensor] = {}
        for is_count in (False, True):
            dtype = torch.int64 if is_count else torch.float32
            keys = [key for key in sorted(shapes) if _is_count(key) is is_count]
            # Where a process saw nothing, zeros leave the maximum and the sum as they are.
            tensors = [own[k] if k in own else torch.zeros(shapes[k], dtype=dtype) for k in keys]
            if keys:
                operation = distributed.ReduceOp.SUM if is_count else distributed.ReduceOp.MAX
                found = self._all_reduce(tensors, operation)
                joined |= zip(keys, found, strict=True)
        return _rebuild(joined) if self.is_first else {}

    def sum_tensors(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = self._gather_shapes(own)
        summed: dict[str, torch.Tensor] = {}
        for name in sorted(shapes):
            tensor = own[name].cpu() if name in own else torch.zeros(shapes[name])
            (found,) = self._all_reduce([tensor], distributed.ReduceOp.SUM)
            summed[name] = found.to(own[name].device) if name in own else found
        return summed

    def _gather_shapes(self, own: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
        """Gather the shapes of the named tensors of all processes; each may lack some."""
        shapes: dict[str, list[int]] = {}
        for each in self.all_gather({name: list(tensor.shape) for name, tensor in own.items()}):
            shapes |= each
        return shapes

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if (failure := self._find_failure()) is None:
                raise
            raise _make_error(failure, self.size) from None
        except RuntimeError as error:
            # After a connection broke, the system may take a moment to show who failed.
            if (failure := wait_until(self._find_failure, _NOTICE_S)) is None:
                raise
            raise _make_error(failure, self.size) from error

    def _find_failure(self) -> PeerFailure | None:
        return self._detector.failure or self._detector.check_peers()

    def _next_key(self) -> str:
        self._num_values += 1
        return f"value/{self._num_values}"

    def _all_reduce(self, tensors: Sequence[torch.Tensor], operation: Any) -> list[torch.Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with self.peer_failures():
            work = distributed.all_reduce(flat, operation, async_op=True)
            while not work.is_completed():  # waiting in C++ could not be interrupted
                time.sleep(POLL_S)
            work.wait()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


@contextmanager
def open_process_group(process_rank: ProcessRank) -> Iterator[ProcessGroup]:
    """Connect to the other processes, if there are any.

    An error of one process ends all of them. The first one raises it and names its rank.

    Raises:
        RankLostError: a process died or failed.
        CalibrationError: the other processes cannot be reached.
    """
    if process_rank.size == 1:
        yield LONE
        return
    torch.set_num_threads(choose_threads(process_rank, os.environ))
    base = connect_store(process_rank)
    store = PrefixStore("fp8calib", base)
    peers = range(1, process_rank.size) if process_rank.is_first else [0]
    detector = FailureDetector(
        store, process_rank.rank, peers, lambda failure: _abort(failure, process_rank)
    )
    detector.start()
    group = _ConnectedGroup(process_rank, store, detector)
    try:
        with group.peer_failures():
            rendezvous(process_rank, store)
            _init_torch(group, base)
            yield group
    except _PeerError as error:
        if group.is_first:
            raise
        detector.stop()  # or it interrupts the wait
        _first_has_finished(store)
        raise SystemExit(error.exit_code) from None
    except RankLostError:
        raise
    except Fp8CalibError as error:
        detector.report(error)
        if group.is_first:
            detector.await_notice(_NOTICE_S)  # the store may end with this process
            raise
        detector.stop()  # or an error of the first process interrupts the wait
        if not _first_has_finished(store):
            raise
        raise SystemExit(error.exit_code) from None
    finally:
        detector.stop()
    distributed.destroy_process_group()


def choose_threads(process_rank: ProcessRank, environment: Mapping[str, str]) -> int:
    """Choose the threads of a process: OMP_NUM_THREADS, or its share of the machine's cores."""
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(len(os.sched_getaffinity(0)) // process_rank.local_size, 1)


def _init_torch(group: ProcessGroup, store: Any) -> None:
    try:
        with group.peer_failures():
            distributed.init_process_group(
                "gloo",  # statistics are on the CPU
                store=PrefixStore("group", store),
                rank=group.rank,
                world_size=group.size,
                timeout=_TIMEOUT,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CalibrationError(
            f"rank {group.rank} of {group.size} cannot reach the other processes: {error}",
            hint=START_HINT,
        ) from error


def _first_has_finished(store: Any) -> bool:
    """Wait until the first process has raised an error; torchrun ends all when this one exits."""
    try:
        has_finished = bool(wait_until(lambda: store.check(["finished/0"]), _FINISH_S))
    except RuntimeError:  # the first process has exited, and the store with it
        return False
    if has_finished:
        time.sleep(_NOTICE_S)  # it is about to print the error
    return has_finished


def _abort(failure: PeerFailure, process_rank: ProcessRank) -> None:
    """End this process, whose main thread is blocked inside torch; its checkpoints are kept."""
    error = _make_error(failure, process_rank.size)
    if process_rank.is_first:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.stderr.flush()
    os._exit(error.exit_code)


def _make_error(failure: PeerFailure, size: int) -> Fp8CalibError:
    message = f"rank {failure.rank} of {size}: {failure.why}"
    if failure.kind is None:
        hint = "the statistics gathered so far are kept: run the same command with --resume"
        return RankLostError(message, hint=hint)
    return _PeerError(message, failure)


# --- statistics as named tensors ---------------------------------------------------------------


def _is_count(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name == "count" or STATISTICS[name].is_count


def _rebuild(tensors: Mapping[str, torch.Tensor]) -> dict[Site, SiteStats]:
    """Build the sites of tensors, which are views of larger ones."""
    by_site = group_tensors({key: tensors[key].clone() for key in sorted(tensors)})
    return {
        Site.parse(site): SiteStats(count=int(found.pop("count")), tensors=found)
        for site, found in by_site.items()
    }
