"""The processes that calibrate one model together, each with its share of the batches.

Anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT starts them, as torchrun does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fp8calib.data.shares import Item, Share
from fp8calib.errors import CalibrationError, Fp8CalibError, first_line
from fp8calib.machine import ALONE, ProcessRank

RENDEZVOUS_S = 40.0
SILENT_S = 60.0
"""A process that takes no part in the watch for so long counts as dead."""
STUCK_S = 30.0
"""A main thread that does not react to a signal for so long is blocked in C++."""
_BEAT_S = 1.0
_POLL_S = 0.02
_ANSWER_S = 5.0
"""How long the threads of a living process may take to answer."""
_PRINT_S = 5.0
"""How long the first process may take to print the error that ends the run."""
_LARGE = 2**20
_RUNS, _DONE, _INTERRUPTED, _FAILED = range(4)
_START_HINT = "start all processes at about the same time, with torchrun"


class RankLostError(CalibrationError):
    """A process of the run died, so the run cannot continue."""


class ProcessGroup:
    """The processes of a run: this one alone, unless `open_process_group` connects it to others."""

    def __init__(self, process_rank: ProcessRank = ALONE, watch: _Watch | None = None) -> None:
        self.process_rank = process_rank
        self.rank = process_rank.rank
        self.size = process_rank.size
        self.is_first = process_rank.is_first
        self._watch = watch
        self._num_values = 0

    def share_of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Give this process's share of a list that is the same in all processes."""
        return Share(index=self.rank + 1, count=self.size).take(items)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Make a JSON value in the first process and give it to all."""
        return self.all_gather(make() if self.is_first else None)[0]

    def all_gather(self, own: Any) -> list[Any]:
        """Give every process the JSON values of all, by rank."""
        if self._watch is None:
            return [own]
        # torch's object collectives wait in C++, where no signal reaches the main thread.
        store = self._watch.store
        self._num_values += 1
        keys = [f"value/{self._num_values}/{rank}" for rank in range(self.size)]
        with self.peer_failures():
            store.set(keys[self.rank], json.dumps(own))
            while not store.check(keys):
                time.sleep(_POLL_S)
            return [json.loads(store.get(key)) for key in keys]

    def all_reduce(
        self,
        own: Mapping[str, torch.Tensor],
        operation: distributed.ReduceOp.RedOpType,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, torch.Tensor]:
        """Join named tensors of all processes by maxima (not of negative values) or sums.

        Each process may lack some. Sums of fp32 round: their last bits depend on the number of
        processes.
        """
        if self._watch is None:
            return dict(own)
        shapes: dict[str, list[int]] = {}
        for gathered in self.all_gather({name: list(tensor.shape) for name, tensor in own.items()}):
            shapes |= gathered
        # Thousands of small tensors travel as one; large ones, Hessians, are not copied together.
        small = [name for name in sorted(shapes) if math.prod(shapes[name]) < _LARGE]
        large = [[name] for name in sorted(shapes) if math.prod(shapes[name]) >= _LARGE]
        joined: dict[str, torch.Tensor] = {}
        for names in filter(None, (small, *large)):
            # Where a process saw nothing, zeros leave the maximum and the sum as they are.
            tensors = [own[n] if n in own else torch.zeros(shapes[n], dtype=dtype) for n in names]
            flat = torch.cat([tensor.cpu().flatten() for tensor in tensors])
            with self.peer_failures():
                work = distributed.all_reduce(flat, operation, async_op=True)
                while not work.is_completed():  # waiting in C++ could not be interrupted
                    time.sleep(_POLL_S)
                work.wait()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            for name, tensor, part in zip(names, tensors, parts, strict=True):
                joined[name] = part.view_as(tensor).to(tensor.device)
        return joined

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        """Where the failure of a peer interrupts or breaks something, raise its error.

        Raises:
            RankLostError: a process died.
            Fp8CalibError: another process failed; the error is of the same kind.
            KeyboardInterrupt: a process was interrupted.
        """
        try:
            yield
        except (KeyboardInterrupt, RuntimeError) as error:
            failure = None if self._watch is None else self._watch.settle(error)
            if failure is None or type(failure) is type(error):
                raise
            raise failure from error


LONE = ProcessGroup()


@contextmanager
def open_process_group(process_rank: ProcessRank) -> Iterator[ProcessGroup]:
    """Connect to the other processes, if there are any; an error in any of them ends all.

    The first one raises it, with its rank; the others exit.

    Raises:
        CalibrationError: the other processes cannot be reached; `RankLostError`: one died.
    """
    if process_rank.size == 1:
        yield LONE
        return
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal():
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // process_rank.local_size, 1))
    watch = _Watch(process_rank, connect(process_rank))
    watch.start()
    group = ProcessGroup(process_rank, watch)
    try:
        with group.peer_failures():
            group.all_gather(None)  # from here on all of them tell what happens to them
            yield group
            watch.finish()
    except (Exception, KeyboardInterrupt) as error:
        watch.settle(error)
        if group.is_first or watch.lost == 0:
            raise
        time.sleep(_PRINT_S)  # torchrun ends the first one, which prints, when another one exits
        if isinstance(error, Fp8CalibError):
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        if group.is_first:
            watch.wait_for_others()
    distributed.destroy_process_group()


def connect(process_rank: ProcessRank) -> PrefixStore:
    """Connect all processes, through the store of torchrun or of the first one."""
    rank, size = process_rank.rank, process_rank.size
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    until = time.monotonic() + RENDEZVOUS_S
    try:
        while not is_server:  # torch itself waits in C++, and reports a wrong name as a time-out
            try:
                socket.create_connection((address, port), timeout=5.0).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_S)
        store = TCPStore(address, port, is_master=is_server, wait_for_workers=False)
        own = PrefixStore("fp8calib", store)
        rendezvous(process_rank, own)
        group_store = PrefixStore("group", store)
        distributed.init_process_group(  # gloo: statistics are on the CPU
            "gloo", store=group_store, rank=rank, world_size=size, timeout=timedelta(minutes=5)
        )
    except (RuntimeError, ValueError, OSError) as error:
        peer = "the other processes" if rank == 0 else "rank 0"
        raise CalibrationError(
            f"rank {rank} of {size} cannot reach {peer} at {address}:{port}: {first_line(error)}",
            hint=_START_HINT,
        ) from error
    return own


def rendezvous(process_rank: ProcessRank, store: Any) -> None:
    """Wait until all processes have started; the first one names those that have not.

    Raises:
        CalibrationError: some have not started, or died while they waited.
    """
    size, started = process_rank.size, time.monotonic()
    counts, changed = [0] * size, [started] * size
    while not store.check(["rendezvous"]):
        store.add(f"here/{process_rank.rank}", 1)
        time.sleep(_POLL_S)
        if not process_rank.is_first:
            continue
        now = time.monotonic()
        for rank in range(size):
            if (count := store.add(f"here/{rank}", 0)) != counts[rank]:
                counts[rank], changed[rank] = count, now
        dead = [r for r in range(size) if counts[r] > 0 and now - changed[r] > _ANSWER_S]
        missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
        why = ""
        if dead:
            why = f"rank {dead[0]} of {size}: its process has died"
        elif missing and now - started > RENDEZVOUS_S:
            names = f"rank{'s'[: len(missing) - 1]} {', '.join(missing)}"
            why = f"{names} of {size} did not start within {RENDEZVOUS_S:.0f} s"
        if why:
            store.set("rendezvous", "failed")
            time.sleep(_BEAT_S)  # the others read it
            hint = f"see whether it died or was never started. {_START_HINT}"
            raise CalibrationError(why, hint=hint)
        if not missing:
            store.set("rendezvous", "complete")
    if store.get("rendezvous") == b"failed":
        raise SystemExit(CalibrationError.exit_code)  # the first one says why


class _Watch(threading.Thread):
    """Tells all processes every second how each one is; a failure interrupts the main thread.

    Without it a process that computes would not notice that another one has died.
    """

    def __init__(self, process_rank: ProcessRank, store: Any) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.failure: BaseException | None = None
        self._rank, self._size = process_rank.rank, process_rank.size
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=SILENT_S))
        self._state = _RUNS
        self.lost: int | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        """Watch until all processes are done, or one has failed."""
        states = [_RUNS]
        beat = time.monotonic()
        try:
            while max(states) <= _DONE and min(states) < _DONE:
                time.sleep(_BEAT_S)
                beat = time.monotonic()
                states = self._exchange()
            self.failure = self._read_failure(states)
        except RuntimeError:  # gloo does not say which process broke the connection
            is_silent = time.monotonic() - beat > SILENT_S
            why = f"no heartbeat for {SILENT_S:.0f} s" if is_silent else "its process has died"
            self.failure = self._call_roll(why)
        self._is_over.set()
        with suppress(RuntimeError):  # the first process has ended, and the store with it
            self.store.set(f"over/{self._rank}", "")
        if self.failure is not None and self._state == _RUNS:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            time.sleep(STUCK_S)
            if self._state == _RUNS:
                self._abort(self.failure)

    def settle(self, error: BaseException) -> BaseException | None:
        """Tell all processes of an error in this one, and give the failure of another, if any."""
        if self._state == _RUNS:
            own = error if isinstance(error, Fp8CalibError) else Fp8CalibError(first_line(error))
            report = [own.kind, f"rank {self._rank} of {self._size}: {own.message}", own.hint]
            with suppress(RuntimeError):  # the first process has ended, and the store with it
                self.store.set(f"error/{self._rank}", json.dumps(report))
            self._state = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
        self._is_over.wait(2 * _ANSWER_S)
        return self.failure

    def finish(self) -> None:
        """Wait until all processes are done, or one has failed."""
        self._state = _DONE
        self._is_over.wait()
        if self.failure is not None:
            raise self.failure

    def wait_for_others(self) -> None:
        """Wait until the others no longer read the store, which ends with the first process."""
        others = [f"over/{rank}" for rank in range(self._size) if rank not in {0, self.lost}]
        until = time.monotonic() + 2 * _ANSWER_S
        with suppress(RuntimeError):  # torchrun has ended, and its store with it
            while others and not self.store.check(others) and time.monotonic() < until:
                time.sleep(_POLL_S)

    def _exchange(self) -> list[int]:
        """Give the states of all processes."""
        states = torch.zeros(self._size, dtype=torch.int64)
        states[self._rank] = self._state
        work = distributed.all_reduce(states, distributed.ReduceOp.MAX, self._group, async_op=True)
        while not work.is_completed():
            if self.store.check(["lost"]):
                raise RuntimeError("another process has lost one")
            time.sleep(_POLL_S)
        work.wait()
        return states.tolist()

    def _read_failure(self, states: Sequence[int]) -> BaseException | None:
        if _FAILED in states and states[self._rank] != _FAILED:
            kind, message, hint = json.loads(self.store.get(f"error/{states.index(_FAILED)}"))
            kinds = {error.kind: error for error in Fp8CalibError.__subclasses__()}
            return kinds.get(kind, Fp8CalibError)(message, hint=hint)
        return KeyboardInterrupt() if _INTERRUPTED in states else None

    def _call_roll(self, why: str) -> RankLostError:
        """Find the process that was lost: all others answer."""
        try:
            self.store.set("lost", "")
            self.store.set(f"answer/{self._rank}", "")
            time.sleep(_ANSWER_S)
            silent = [r for r in range(self._size) if not self.store.check([f"answer/{r}"])]
        except RuntimeError:  # the first process has ended, and the store with it
            silent = [0]
        self.lost = min(silent, default=self._rank)
        if not silent:
            why = "its connection to another process broke"
        hint = "the statistics gathered so far are kept: run the same command with --resume"
        return RankLostError(f"rank {self.lost} of {self._size}: {why}", hint=hint)

    def _abort(self, failure: BaseException) -> None:
        """End this process, whose main thread is blocked inside torch; its checkpoints are kept."""
        if self._rank == 0 and isinstance(failure, Fp8CalibError):
            sys.stderr.write(f"error: {failure.message}\nhint: {failure.hint}\n")
            sys.stderr.flush()
        os._exit(failure.exit_code if isinstance(failure, Fp8CalibError) else 130)
