"""The program, which writes a checkpoint after a batch and then waits to be killed.

Run it as `python -m tests.cli.held` where `python -m fp8calib` is run: a test that kills a run
in the middle must not race it to its end.
"""

from __future__ import annotations

import signal

from fp8calib.cli import main
from fp8calib.observe.recorder import Recorder
from fp8calib.run.resume import journal
from fp8calib.run.resume.journal import Journal

save_if_due = Journal.save_if_due


def save_and_wait(self: Journal, recorder: Recorder) -> None:
    save_if_due(self, recorder)
    while True:
        signal.pause()


if __name__ == "__main__":
    journal.LONGEST_INTERVAL_S = 0.0
    Journal.save_if_due = save_and_wait  # type: ignore[method-assign]
    main()
