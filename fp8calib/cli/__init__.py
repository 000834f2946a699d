"""The command line; its entry point is `main`."""

from fp8calib.cli.program import main, main_inner

__all__ = ["main", "main_inner"]
