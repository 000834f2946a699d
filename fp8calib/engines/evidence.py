"""How it is known what an engine does."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """How it is known what an engine does."""

    RUN = "run"
    """The engine itself was run, and the results were compared."""
    LOADER = "loader run"
    """Of the engine only the code that loads scales was run; the rest was read."""
    READ = "read"
    """Its source was read."""
