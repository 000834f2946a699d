"""Terminal output: tables, progress bars, errors. The only module that imports rich."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.table import Column, Table
from rich.text import Text

from fp8calib.cli.signals import received
from fp8calib.errors import ExportError, escape_controls
from fp8calib.machine import PeakMemory


class _Console(Console):
    """A console that discards what a closed pipe no longer takes; rich itself would exit.

    A message that stderr cannot take (a full disk, say) stops no run.
    """

    def on_broken_pipe(self) -> None:
        discard(self.file)

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            if not self.stderr:
                raise
            discard(self.file)


_out = _Console(highlight=False, soft_wrap=True)
_err = _Console(stderr=True, highlight=False, soft_wrap=True)


def be_silent(is_silent: bool = True) -> None:
    """Print nothing from now on; the first process prints for all."""
    _out.quiet = _err.quiet = is_silent


def _clean(text: str, style: str = "") -> Text:
    """Make text for a terminal, to which no name from a file or a path can give commands."""
    return Text(escape_controls(text), style=style)


def say(text: str) -> None:
    """Print a message on stderr."""
    _err.print(_clean(text))


def warn(text: str) -> None:
    """Print a warning on stderr."""
    _err.print(_clean(f"warning: {text}", "yellow"))


def print_text(text: str) -> None:
    """Print a result on stdout."""
    with _to_stdout():
        _out.print(_clean(text))


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; NaN, which JSON does not have, is an error."""
    if not _out.quiet:
        with _to_stdout():
            sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def _to_stdout() -> Iterator[None]:
    """Report a failed write to stdout (a full disk, say) as an error.

    A pipe that its reader closes (`| head -1`) is none: the command goes on, for its exit code.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        raise refuse_stdout(error) from error


def refuse_stdout(error: OSError) -> ExportError:
    """Discard what stdout cannot take, and make the error that names why."""
    discard(sys.stdout)
    return ExportError(
        f"stdout cannot be written: {error.strerror}", hint="redirect it to another disk"
    )


def discard(stream: IO[str]) -> None:
    """Discard further output, so that neither a write nor flushing at exit can fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout, with numbers right-aligned."""
    # a table in a pipe or a file is not cut to the width of a terminal
    is_piped = not (_out.is_terminal or _out.quiet)
    console = _Console(highlight=False, width=200) if is_piped else _out
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        cells = [row[index].replace(".", "").replace("e-", "").replace("e+", "") for row in rows]
        numeric = all(cell in {"", "-"} or cell.isdigit() for cell in cells)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_clean, row))
    shown = [*([_clean(title, "bold")] if title else []), table]
    if is_piped:
        with console.capture() as captured:
            console.print(*shown, sep="\n")
        print_text("\n".join(map(str.rstrip, captured.get().splitlines())))
        return
    with _to_stdout():
        console.print(*shown, sep="\n")


def show_error(kind: str, message: str, hint: str, exit_code: int, *, as_json: bool) -> int:
    """Print an error on stderr, and as JSON on stdout when asked.

    Returns:
        The exit code.
    """
    _err.print(_clean(f"error: {message}", "bold red"))
    if hint:
        _err.print(_clean(f"hint: {hint}"))
    if as_json:
        from fp8calib.commands.result import ErrorResult  # noqa: PLC0415 -- pydantic

        failed = ErrorResult(error={"kind": kind, "message": message, "hint": hint})
        print_json(failed.to_json())
    return exit_code


class _Stage(ProgressColumn):
    """What the bar of a terminal, or a line a minute, says of a stage."""

    def __init__(self, memory: PeakMemory) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._memory = memory

    def render(self, task: Task) -> Text:
        return _clean(self.describe(task))

    def describe(self, task: Task) -> str:
        """Give the progress, of the layer that runs now, the rate, time left and peak memory."""
        done, total, name = int(task.completed), int(task.total or 0), task.description
        unit, layers = task.fields["unit"], task.fields["layers"]
        rate, parts = done / max(task.elapsed or 0.0, 1e-9), [name]
        if total:
            left = timedelta(seconds=round((total - done) / rate)) if rate else "?"
            parts = [f"{done / total:.0%}", f"{left} left"]
            if layers:
                total //= layers
                layer = min(done // max(total, 1), layers - 1)
                name, done = f"layer {layer + 1} of {layers}", done - layer * total
            parts.insert(0, f"{name}: {done:,} of {total:,} {unit}")
        elif done:
            parts = [f"{name}: {done:,} {unit}"]
        if task.total or done:
            parts.append(f"{rate / max(layers, 1):,.0f} {unit}/s")
        if peak := self._memory.peak_bytes:
            parts.append(f"peak {peak / 2**30:.2f} GiB")
        return ", ".join(parts)


_BAR_WIDTH = 8
_LINE_EVERY_S = 60.0


class ConsoleReporter(ExitStack):
    """Prints what a command says, and its progress until the end of the context.

    The progress is a bar on a terminal's stderr; where stderr is piped, a line a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = PeakMemory()
        self._stage = _Stage(self._memory)
        self._progress = Progress(
            SpinnerColumn(table_column=Column(no_wrap=True)),  # so that the text alone is cut
            BarColumn(bar_width=_BAR_WIDTH, table_column=Column(no_wrap=True)),
            self._stage,
            console=_err,
            get_time=time.monotonic,
            disable=_err.quiet or not _err.is_terminal,
        )
        self._task: TaskID | None = None
        self._printed = 0.0
        self._told: set[str] = set()

    say = staticmethod(say)

    def warn(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._told:
            self._told.add(text)
            warn(text)

    def stage(self, name: str, total: int | None, *, unit: str = "steps", layers: int = 0) -> None:
        """Begin a stage of `total` steps, which may all go through `layers` layers in turn."""
        if self._task is None:
            self.enter_context(self._memory)
            self.enter_context(self._progress)
        else:
            self._progress.remove_task(self._task)
        self._printed = time.monotonic()
        self._task = self._progress.add_task(name, total=total, unit=unit, layers=layers)

    def advance(self, steps: int) -> None:
        """Advance by `steps`.

        Raises:
            KeyboardInterrupt: a signal came, and Python swallowed its exception.
        """
        if received:
            raise KeyboardInterrupt
        if self._task is None:
            return
        self._progress.advance(self._task, steps)
        now = time.monotonic()
        if self._progress.disable and now - self._printed >= _LINE_EVERY_S:
            self._printed = now
            say(self._stage.describe(self._progress.tasks[0]))
