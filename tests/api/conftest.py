"""The tiny model, tokenizer and data of the tests of commands."""

from __future__ import annotations

from tests.cli.conftest import _offline, data, model

__all__ = ["_offline", "data", "model"]
