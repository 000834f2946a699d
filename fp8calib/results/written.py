"""What a command wrote, and what `check` says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.results.record import Record


class WrittenCheck(Record):
    """What an engine will do with a written checkpoint."""

    path: str
    """Of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Its name and release."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty where it is not ok."""

    def __str__(self) -> str:
        return f"{self.engine}: {self.command or self.summary}"


def describe_checks(checks: Sequence[WrittenCheck]) -> Iterator[str]:
    """Give a line for each checkpoint and engine, with the command that serves it."""
    for each in checks:
        where = "" if each.path == "." else f"{each.path}, "
        command = f":\n    {each.command}" if each.command else ""
        yield f"{where}{each.engine}: {each.summary}{command}"


def list_top_level(files: Sequence[str]) -> str:
    """List files and folders, each folder once: `kv-overlay/, stats.safetensors`."""
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    return ", ".join(dict.fromkeys(names))
