"""What is or would be uploaded to the Hub."""

from __future__ import annotations

from fp8calib.results.record import Record


class PushedFile(Record):
    """A file of the folder."""

    name: str
    size_bytes: int


class PushResult(Record):
    """The files that go to a repository."""

    repo: str
    files: tuple[PushedFile, ...]
    commit: str = ""
    """The page of the commit; empty where nothing was uploaded."""
