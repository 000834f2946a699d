"""The tiny model, tokenizer and data of the tests of commands."""

from __future__ import annotations

from tests.cli.conftest import _offline, _one_thread, data, model

__all__ = ["_offline", "_one_thread", "data", "model"]
