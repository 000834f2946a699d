"""The program with two pretended GPUs.

Run it as `python -m tests.cli.pretending` where `python -m fp8calib` is run.
"""

from __future__ import annotations

from fp8calib.cli import main
from tests.pretended_gpus import pretended_gpus

if __name__ == "__main__":
    with pretended_gpus(2):
        main()
