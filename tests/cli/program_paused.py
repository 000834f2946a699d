"""The program, changed to save its progress after one batch and then wait to be killed.

Run `python -m tests.cli.program_paused` instead of `python -m fp8calib`, so that a test can kill a
run in the middle without racing against its end.
"""

import signal
from typing import Any

from fp8calib.calibration import journal
from fp8calib.calibration.journal import Journal
from fp8calib.cli import main

save_if_due = Journal.save_if_due


def save_and_wait(self: Journal, *seen: Any) -> None:
    save_if_due(self, *seen)
    while True:
        signal.pause()


if __name__ == "__main__":
    journal.INTERVAL_S = 0.0
    Journal.save_if_due = save_and_wait  # type: ignore[method-assign]
    main()
