"""The fixtures of the command line's tests."""

from tests.cli.conftest import calibrated, data, model

__all__ = ["calibrated", "data", "model"]
