"""The program, changed to block in C code while its processes join their group.

No Python signal handler runs there. Run `python -m tests.cli.program_blocked` instead of
`python -m fp8calib`.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import distributed

from fp8calib.cli import main
from fp8calib.run.distributed import heartbeat


def sleep_in_c(*_: Any, **__: Any) -> None:
    print("stuck", flush=True)
    ctypes.CDLL(None).sleep(600)


if __name__ == "__main__":
    heartbeat.STUCK_S = 1.0
    distributed.init_process_group = sleep_in_c
    main()
