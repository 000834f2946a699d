"""Open tasks of lm-evaluation-harness, by name or from a user's YAML file.

Errors in them are found here, before a model is loaded.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8calib.errors import DataError, UsageError, first_line

_FILE_SUFFIXES = frozenset({".yaml", ".yml"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Tasks with their data, ready to run."""

    loaded: Mapping[str, Mapping[str, Any]]
    """As lm_eval's TaskManager gives them: `tasks`, `groups` and `group_map`, each by name."""
    limit: int | None
    """Number of documents of each task, from the first; None: all."""


def require_harness() -> None:
    """Require lm-evaluation-harness to be installed.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(
            "--tasks: lm-evaluation-harness, which runs them, is not installed",
            hint="pip install 'fp8calib[eval]'",
        )


def open_tasks(names: Sequence[str], *, limit: int | None) -> Tasks:
    """Load tasks and their data.

    Args:
        names: tasks, groups and tags of the harness, or paths of YAML files; data files that a
            YAML file names are looked for beside it, then here.
        limit: the number of documents of each task; None: all.

    Raises:
        UsageError: the harness is not installed; or a task is unknown, cannot be loaded or
            cannot be run here.
        DataError: the data of a task cannot be loaded.
    """
    require_harness()
    parts: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    with quiet_harness():
        manager = _make_manager(names)
        for name in names:
            for part, found in _load_task(manager, name).items():
                _require_new(name, parts[part].keys() & found.keys())
                parts[part] |= found
    for name, task in parts["tasks"].items():
        _require_runnable(name, task)
    return Tasks(loaded=parts, limit=limit)


def _is_file(name: str) -> bool:
    return Path(name).suffix in _FILE_SUFFIXES


def _make_manager(names: Sequence[str]) -> Any:
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 -- an extra

    # The harness parses 15,000 files for its own tasks: 20 seconds, which local files do not need.
    manager = TaskManager(include_defaults=not all(map(_is_file, names)))
    for name in names:
        if _is_file(name) and not os.path.isfile(name):  # noqa: PTH113 -- a Path raises if too long
            raise UsageError(
                f"--tasks {name}: no such file", hint="give the name of a task, or a YAML file"
            )
        if not _is_file(name) and name not in manager.task_index:
            raise UsageError(f"--tasks {name}: unknown task", hint=_suggest(name, manager))
    return manager


def _suggest(name: str, manager: Any) -> str:
    near = get_close_matches(name, manager.all_tasks, n=5)
    if near:
        return f"near matches: {', '.join(near)}"
    return "`lm-eval ls tasks` lists all tasks; the name of a file ends in .yaml"


def _load_task(manager: Any, name: str) -> Mapping[str, Mapping[str, Any]]:
    if not _is_file(name):
        return _load_guarded(manager, name, name)
    path = Path(name).resolve()
    try:
        with contextlib.chdir(path.parent):
            return _load_guarded(manager, name, str(path))
    except DataError:
        return _load_guarded(manager, name, str(path))  # from here, as the harness does


def _load_guarded(manager: Any, name: str, found: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        loaded: Mapping[str, Mapping[str, Any]] = manager.load([found])
    except OSError as error:
        raise DataError(
            f"--tasks {name}: its data cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}",
            hint="check the paths of its data files, or the network for a dataset of the Hub",
        ) from error
    except Exception as error:
        raise UsageError(
            f"--tasks {name}: lm-evaluation-harness cannot load it: "
            f"{type(error).__name__}: {first_line(error)}",
            hint="`lm-eval validate --tasks` gives details",
        ) from error
    return loaded


def _require_new(name: str, twice: set[str]) -> None:
    if twice:
        raise UsageError(
            f"--tasks {name}: {', '.join(sorted(twice))} is given twice",
            hint="give each task once, and no group together with its tasks",
        )


def _require_runnable(name: str, task: Any) -> None:
    for flag, what in (
        ("UNSAFE_CODE", "runs code that the model writes"),
        ("MULTIMODAL", "needs more than text"),
    ):
        if getattr(task, flag, False):
            raise UsageError(
                f"--tasks {name}: it {what}, which verify does not do", hint="leave it out"
            )


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Silence the harness' prints (stdout is for data), logs and progress bars."""
    import tqdm  # noqa: PLC0415 -- comes with the harness

    logger = logging.getLogger("lm_eval")
    level = logger.level
    start = tqdm.tqdm.__init__

    def start_silent(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **{**kwargs, "disable": True})

    tqdm.tqdm.__init__ = start_silent
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        tqdm.tqdm.__init__ = start
