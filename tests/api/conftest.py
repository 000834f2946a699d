"""The tiny model, tokenizer and data of the tests of commands."""

from tests.cli.conftest import _offline, data, model

__all__ = ["_offline", "data", "model"]
