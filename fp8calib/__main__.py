"""Run the command line as `python -m fp8calib`."""

from fp8calib.cli import main

if __name__ == "__main__":
    main()
