"""Processes of a run that wait to see the last of them die.

The last one prints its process id and sleeps; meanwhile the others compute, or wait for its values
or its tensors, as the argument says. With `late` its answers from the store come late.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch.distributed import ReduceOp

from fp8calib.calibration.processes import ProcessGroup, open_process_group
from fp8calib.errors import Fp8CalibError
from fp8calib.machine import find_process_rank


class _LateStore:
    """A store that answers when an interrupted process may have ended long ago."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        time.sleep(3)
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def run(group: ProcessGroup, what: str) -> None:
    if group.rank == group.size - 1:
        if what == "tensors":
            group.all_gather({"x": [2]})  # the shapes; its tensors never come
        if what == "late" and group._watch is not None:
            group._watch.store = _LateStore(group._watch.store)
        print(f"pid {os.getpid()}", flush=True)
        time.sleep(600)
    elif what == "tensors":
        group.all_reduce({"x": torch.ones(2)}, ReduceOp.SUM)
    elif what == "values":
        group.all_gather(None)
    else:
        with group.peer_failures():
            while True:
                torch.ones(300, 300) @ torch.ones(300, 300)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    try:
        with open_process_group(find_process_rank(os.environ)) as group:
            run(group, sys.argv[1])
    except (Fp8CalibError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(getattr(error, "exit_code", 130))
