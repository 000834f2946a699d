"""What was written, and what each engine will do with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.results.written import WrittenCheck


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
