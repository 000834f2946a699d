"""Two processes of a run, of which the first fails and ends at once."""

from __future__ import annotations

import os
import signal

from fp8calib.calibration.processes import open_process_group
from fp8calib.errors import CalibrationError
from fp8calib.machine import find_process_rank

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    try:
        with open_process_group(find_process_rank(os.environ)) as group:
            group.all_gather(None)
            if group.is_first:
                raise CalibrationError("planted")
            group.broadcast(lambda: None)
    except CalibrationError as error:
        print(error.message, flush=True)
        os._exit(error.exit_code)
