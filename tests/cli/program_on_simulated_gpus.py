"""The program with two simulated GPUs.

Run `python -m tests.cli.program_on_simulated_gpus` instead of `python -m fp8calib`.
"""

from fp8calib.cli import main
from tests.simulated_gpus import simulated_gpus

if __name__ == "__main__":
    with simulated_gpus(2):
        main()
