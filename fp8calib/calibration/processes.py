"""The processes that calibrate one model together, each with its share of the batches.

Anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT starts them, as torchrun does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fp8calib.data.sequences import Share
from fp8calib.errors import CalibrationError, Fp8CalibError, first_line
from fp8calib.machine import ALONE, ProcessRank, count_processors

SILENT_S = 60.0
"""How long a process may take to start, or to answer the others."""
STUCK_S = 30.0
"""A main thread that does not react to a signal for so long is blocked in C++."""
_BEAT_S = 1.0
_PRINT_S = 5.0
"""How long the first process may take to print the error that ends the run."""
_INTERRUPTED = "interrupted"


class RankLostError(CalibrationError):
    """A process of the run died, so the run cannot continue."""


class ProcessGroup:
    """The processes of a run: this one alone, unless `open_process_group` connects it to others.

    A thread tells all processes every second how this one is, and a failure interrupts the main
    thread. Without it a process that computes would not notice that another one has died.
    """

    def __init__(self, process_rank: ProcessRank = ALONE, store: Store | None = None) -> None:
        self.process_rank = process_rank
        self.rank = process_rank.rank
        self.size = process_rank.size
        self.share = Share(index=self.rank + 1, count=self.size)
        """This process's share of a list that is the same in all processes."""
        self.is_first = process_rank.is_first
        self._failure: BaseException | None = None  # of another process
        self._is_noticed = threading.Event()
        """Set once the main thread knows of a failure, or waits for one."""
        self._works = True
        self._has_failed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if store is not None:
            self._store = PrefixStore("fp8calib", store)
            # the first to end waits here for the last; the thread ends a wait in vain
            self._group = distributed.new_group(timeout=timedelta(days=30))
            self._thread.start()

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Make a value in the first process and give it to all."""
        if self.size == 1:
            return make()
        made = [make() if self.is_first else None]
        with self.peer_failures():
            distributed.broadcast_object_list(made, group=self._group)
        return made[0]

    def gather(self, own: Any) -> list[Any]:
        """Give the first process the values of all, by rank, and none to the others."""
        if self.size == 1:
            return [own]
        gathered: list[Any] | None = [None] * self.size if self.is_first else None
        with self.peer_failures():
            distributed.gather_object(own, gathered, group=self._group)
        return gathered or []

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        """Raise the error of a peer if its failure interrupts or breaks what runs inside."""
        try:
            yield
        except (KeyboardInterrupt, RuntimeError) as error:
            if self.size == 1:
                raise
            self._is_noticed.set()
            self._thread.join(3 * _BEAT_S)  # torchrun interrupts before the thread knows why
            if self._failure is None:
                raise
            raise self._failure from error

    def finish(self) -> None:
        """Wait until all processes are done, or raise the error of one that has failed."""
        self._works = False
        self._is_noticed.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def tell(self, error: BaseException) -> None:
        """Tell all processes of an error in this one, unless it is that of another."""
        if self._failure is None:
            known = error if isinstance(error, Fp8CalibError) else Fp8CalibError(first_line(error))
            kind = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else known.kind
            report = [kind, f"rank {self.rank} of {self.size}: {known.message}", known.hint]
            with suppress(RuntimeError):  # the first process has ended, and the store with it
                self._store.set("failure", json.dumps(report))
        self._has_failed = True
        self._is_noticed.set()
        self._thread.join(3 * _BEAT_S)

    def _watch(self) -> None:
        """Watch until all processes are done, or one has failed."""
        try:
            anyone_failed, anyone_works = False, True
            while anyone_works and not anyone_failed:
                time.sleep(_BEAT_S)
                flags = torch.tensor([self._has_failed, self._works]).int()
                distributed.all_reduce(flags, distributed.ReduceOp.MAX)
                anyone_failed, anyone_works = map(bool, flags.tolist())
            if anyone_failed and not self._has_failed:
                kind, message, hint = json.loads(self._store.get("failure"))
                kinds = {error.kind: error for error in Fp8CalibError.__subclasses__()}
                error = kinds.get(kind, Fp8CalibError)(message, hint=hint)
                self._failure = KeyboardInterrupt() if kind == _INTERRUPTED else error
        except RuntimeError:  # gloo does not say which process broke the connection
            self._failure = RankLostError(
                f"another of {self.size} processes died, or was silent for {SILENT_S:.0f} s",
                hint="the statistics gathered so far are kept: run the same command with --resume",
            )
        failure = self._failure
        if failure is None or self._is_noticed.is_set():
            return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if self._is_noticed.wait(STUCK_S):
            return
        # the main thread is blocked inside torch: end the process, whose checkpoints are kept
        if self.is_first and isinstance(failure, Fp8CalibError):
            sys.stderr.write(f"error: {failure.message}\nhint: {failure.hint}\n")
            sys.stderr.flush()
        os._exit(failure.exit_code if isinstance(failure, Fp8CalibError) else 130)


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
    if not os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(max(count_processors() // process_rank.local_size, 1))
    rank, size = process_rank.rank, process_rank.size
    timeout = timedelta(seconds=SILENT_S)
    try:  # through the store of torchrun or of the first process
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        distributed.init_process_group(  # gloo: statistics are on the CPU
            "gloo", store=store, rank=rank, world_size=size, timeout=timeout
        )
    except (RuntimeError, ValueError, OSError) as error:
        peer = "the other processes" if rank == 0 else "rank 0"
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        raise CalibrationError(
            f"rank {rank} of {size} cannot reach {peer} at {address}:{port}: {first_line(error)}",
            hint="start all processes at about the same time, with torchrun",
        ) from error
    group = ProcessGroup(process_rank, store)
    try:
        with group.peer_failures():
            yield group
            group.finish()
    except (Exception, KeyboardInterrupt) as error:
        group.tell(error)
        if group.is_first:
            raise
        time.sleep(_PRINT_S)  # torchrun ends the first one, which prints, when another one exits
        if isinstance(error, Fp8CalibError):
            raise SystemExit(error.exit_code) from None
        raise
    distributed.destroy_process_group()
