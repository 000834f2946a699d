"""The program, changed to block in C code where its processes exchange values.

No Python signal handler runs there. Run `python -m tests.cli.program_blocked` instead of
`python -m fp8calib`.
"""

import ctypes
from typing import Any

from fp8calib.calibration import processes
from fp8calib.cli import main


def sleep_in_c(*_: Any, **__: Any) -> None:
    print("stuck", flush=True)
    ctypes.CDLL(None).sleep(600)


if __name__ == "__main__":
    processes.STUCK_S = 1.0
    processes.ProcessGroup.broadcast = sleep_in_c  # type: ignore[method-assign]
    main()
