"""Processes of a run that wait to see the last of them die.

The last one prints its process id and sleeps; meanwhile the others compute, or wait for its values,
as the argument says.
"""

import os
import signal
import sys
import time

import torch

from fp8calib.calibration.processes import ProcessGroup, open_process_group
from fp8calib.errors import Fp8CalibError
from fp8calib.machine import find_process_rank


def run(group: ProcessGroup, what: str) -> None:
    if group.rank == group.size - 1:
        print(f"pid {os.getpid()}", flush=True)
        time.sleep(600)
    elif what == "values":
        group.gather(None)
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
