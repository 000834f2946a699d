"""Which of vLLM's processes died: it says only that some process did."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing import connection
from threading import Thread

_TITLE = "VLLM::"
"""How vLLM's names of its processes begin, such as `VLLM::Worker_TP1` (0.32.0)."""
_NOTICE_S = 2.0


class ProcessWatch:
    """Watches the processes that vLLM has started on this machine."""

    def __init__(self) -> None:
        self._names = _open_processes()
        self._died: list[str] = []
        self._thread = Thread(target=self._wait, daemon=True)
        if self._names:
            self._thread.start()

    def find_first(self) -> str:
        """Give the name of the process that died first; empty if all live."""
        if self._names:
            self._thread.join(_NOTICE_S)  # the error may be here before the thread has run
        return ", ".join(self._died)

    def _wait(self) -> None:
        # vLLM ends the others as soon as it sees that one is dead.
        ended = connection.wait(self._names)
        self._died = [name for each, name in self._names.items() if each in ended]
        for descriptor in self._names:
            os.close(descriptor)


def _open_processes() -> dict[int, str]:
    """Open the processes, by descriptor."""
    import psutil  # noqa: PLC0415 -- vLLM needs it

    found: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError, IndexError):
            title = process.cmdline()[0]
            if title.startswith(_TITLE):
                found[os.pidfd_open(process.pid)] = title.removeprefix(_TITLE)
    return found
