"""Settings of all tests.

They import torch and the package where a test runs: the process that only hands out tests has no
use for them.
"""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")
gc.set_threshold(20_000, 20, 20)  # libraries and models make many objects that stay


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the seconds of each test file, slowest first, to the file that the variable names."""
    if not (path := os.environ.get("FP8CALIB_DURATIONS")):
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for each in reports:
            if isinstance(each, pytest.TestReport):
                seconds[each.nodeid.partition("::")[0]] += each.duration
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    Path(path).write_text("".join(f"{taken:.1f}\t{file}\n" for file, taken in slowest))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Run on one thread: with several, models this small take seven times as long."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_garbage_of_imports() -> Iterator[None]:
    """Keep the collector from scanning the half a million objects of libraries again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # or nanobind reports those of Triton 3.9 as leaks


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Let Triton's interpreter, where it is used, list the functions that it replaces once."""
    if find_spec("triton") is None:
        yield
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def list_builtins(package: Any) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name, None))]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in list_builtins(package):
            member = getattr(package, name)
            if not is_builtin(member):  # they are replaced together
                return
            interpreter._patch_attr(package, name, member, builder, scope)

    with mock.patch.object(interpreter, "_patch_builtin", patch_builtins):
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_answer_of_transformers() -> Iterator[None]:
    from tests.doors import ask_once  # noqa: PLC0415

    with ask_once():
        yield
