"""Run a program in a fork of this process, which has imported the libraries already.

That takes them seconds in a process of their own. What is about imports, memory or launchers needs
such a process all the same. What is patched where a fork starts is patched in it.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tqdm import tqdm

from fp8calib.calibration import journal
from fp8calib.calibration.journal import Journal


def start_fork(module: str, *arguments: object, **variables: object) -> subprocess.Popen[str]:
    """Start a module as `python -m` does, with more environment variables."""

    def run() -> None:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits until one of these is closed
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.argv = [module, *map(str, arguments)]
        os.environ.update({name: str(value) for name, value in variables.items()})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm._lock = threading.RLock()  # its own is one of all processes; a killed one may hold it
        # Torch makes its pool of threads anew after a fork; two threads that do so at once fail.
        torch.set_num_threads(torch.get_num_threads())
        code: object = 1
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException:  # noqa: BLE001 -- as the interpreter does
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
            except OSError:
                code = 120  # as the interpreter does
            if "WORLD_SIZE" in os.environ:  # others still read the store of rank 0
                time.sleep(0.3)  # an interpreter with torch takes that long to end
            os._exit(code if isinstance(code, int) else 1)

    return subprocess.Popen(
        [module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=False,  # Python ignores SIGPIPE
        preexec_fn=run,  # noqa: PLW1509 -- it never returns, so that nothing else is started
    )


@contextmanager
def paused() -> Iterator[None]:
    """Let a fork save its progress after one batch and wait to be killed, so that none races it."""
    save_if_due = Journal.save_if_due

    def save_and_wait(self: Journal, *seen: Any) -> None:
        save_if_due(self, *seen)
        while True:
            signal.pause()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "INTERVAL_S", 0.0)
        patch.setattr(Journal, "save_if_due", save_and_wait)
        yield
