"""The process and its machine: memory and processors that it may use, its rank in a run.

Every command reads the rank, so nothing heavy is imported.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from fp8calib.errors import UsageError
from fp8calib.text import GIB

_ROOT = Path("/")
_SAMPLE_EVERY_S = 0.02
_V2_NAMES = ("memory.max", "memory.current", "file", "shmem")
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
"""Files with the limit and the use of a group; page cache and tmpfs in its `memory.stat`."""
_V1_UNLIMITED = 2**60
"""cgroup v1 spells "no limit" as the largest multiple of a page below 2^63."""


def available_bytes(*, root: Path = _ROOT) -> int:
    """Compute how much more memory the process may allocate.

    This is the least of what the machine has available, of what the control groups (v2 or v1)
    allow, and of the limits of data and address space. Page cache counts as available: the kernel
    evicts it. `root` has `proc` and `sys`.
    """
    of_machine = _read_sizes(root / "proc/meminfo").get("MemAvailable")
    if of_machine is None:
        of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = [of_machine, *_group_bytes(root)]
    used = _read_sizes(root / "proc/self/status")
    for line in _read_lines(root / "proc/self/limits"):  # of `ulimit -d` and `ulimit -v`
        for title, name in (("Max data size", "VmData"), ("Max address space", "VmSize")):
            soft = line.removeprefix(title).split()[0] if line.startswith(title) else ""
            if soft.isdigit() and name in used:
                sizes.append(int(soft) - used[name])
    return max(min(sizes), 0)


def anonymous_bytes() -> int | None:
    """Read the process's anonymous memory, swap included; None where the system has no count."""
    found = _read_sizes(_ROOT / "proc/self/status")
    return None if "RssAnon" not in found else found["RssAnon"] + found.get("VmSwap", 0)


def count_processors(*, root: Path = _ROOT) -> int:
    """Count the processors that the process may use, one at least.

    A quota of a control group, which containers have, counts as so many whole processors. `root`
    has `proc` and `sys`.
    """
    counts = [len(os.sched_getaffinity(0))]
    for folder, is_v2 in _list_groups(root, "cpu"):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [
            word for name in names for line in _read_lines(folder / name) for word in line.split()
        ]
        if len(numbers) == 2 and all(map(str.isdigit, numbers)):  # not `max`, nor -1
            counts.append(math.ceil(int(numbers[0]) / int(numbers[1])))
    return max(min(counts), 1)


def check_gib(memory: float) -> None:
    """Refuse a --memory that is not a size.

    Raises:
        UsageError: it is not a number above 0.
    """
    if not 0 < memory * GIB < math.inf:
        raise UsageError(f"--memory {memory}: must be a number of GiB above 0")


class PeakMemory:
    """Measures the peak of this process's anonymous memory while the context is open.

    The kernel keeps no such peak (VmHWM counts mapped files too), so a thread samples the size 50
    times a second.

    Attributes:
        peak_bytes: the largest sample; None where the system has no count.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while True:
            if (found := anonymous_bytes()) is not None:
                self.peak_bytes = max(self.peak_bytes or 0, found)
            if is_last:
                return
            is_last = self._done.wait(_SAMPLE_EVERY_S)


def _group_bytes(root: Path) -> Iterator[int]:
    """Give what each control group of the process allows beyond the present use.

    Page cache can be evicted, except that of tmpfs.
    """
    for folder, is_v2 in _list_groups(root, "memory"):
        limit, used, cache, shared = _V2_NAMES if is_v2 else _V1_NAMES
        counts = ["".join(_read_lines(folder / name)).strip() for name in (limit, used)]
        if not all(map(str.isdigit, counts)) or int(counts[0]) >= _V1_UNLIMITED:  # `max`: no limit
            continue
        pairs = (line.split() for line in _read_lines(folder / "memory.stat"))
        found = {name: int(value) for name, value in pairs if name in (cache, shared)}
        evictable = max(found.get(cache, 0) - found.get(shared, 0), 0)
        yield int(counts[0]) - int(counts[1]) + evictable


def _list_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """List the folders of the control groups of the process, and whether they are of cgroup v2.

    The groups above each are listed too; in a container the mount is its own.
    """
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        steps = [step for step in PurePosixPath(path).parts if step not in {"/", ".."}]
        for length in range(len(steps), -1, -1):
            folder = mount.joinpath(*steps[:length])
            if folder.is_dir():
                yield folder, not controllers


def _read_sizes(path: Path) -> dict[str, int]:
    """Read lines like `RssAnon:  12 kB`: bytes by name."""
    pairs = (line.split() for line in _read_lines(path) if line.endswith("kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in pairs}


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # no such file: another system, or no such controller


# --- memory that is freed -------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's `malloc.h`."""
_KEPT_BYTES = 2**27
_MAPPED_BYTES = 2**24
"""Larger allocations have pages of their own, which are returned when they are freed."""


def return_freed_memory() -> None:
    """Return memory that is freed but still held by glibc; without glibc do nothing.

    Small results settle in the gaps that large tensors leave. The next large tensors then need new
    pages, and the process grows beyond what it uses at any one time. Takes some milliseconds.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory until `return_freed_memory`; without glibc do nothing.

    By default glibc returns tensors of some megabytes one by one as they are freed, and the next
    ones get new pages from the system: in a streamed run this doubled the page faults. After it
    has freed one larger block, such as logits, it puts such blocks among small ones, where they
    leave holes: 30 MB for each batch that `verify` scored. The setting holds for the whole process.
    """
    with suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


# --- the rank among the processes of a run, from the environment that torchrun sets -------------

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRank:
    """The rank of this process among those of a run."""

    rank: int
    size: int
    local_rank: int
    """The rank among the processes on this machine."""
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes the output and prints messages."""
        return self.rank == 0


ALONE = ProcessRank(rank=0, size=1, local_rank=0, local_size=1)


def find_process_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Read the rank from the environment; `ALONE` where a variable is missing.

    Raises:
        UsageError: a variable is not a number, or the numbers contradict each other.
    """
    if not all(environment.get(name) for name in _NEEDED):
        return ALONE
    rank, size, port = (
        _read(environment, name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    found = ProcessRank(
        rank=rank,
        size=size,
        local_rank=_read(environment, "LOCAL_RANK", rank),
        local_size=_read(environment, "LOCAL_WORLD_SIZE", size),
    )
    is_rank = 0 <= rank < size and 0 <= found.local_rank < found.local_size <= size
    if not is_rank or port >= _PORTS:
        raise UsageError(
            f"RANK {rank}, WORLD_SIZE {size}, LOCAL_RANK {found.local_rank} and LOCAL_WORLD_SIZE "
            f"{found.local_size} contradict each other, or MASTER_PORT {port} is no port",
            hint="start all processes with torchrun, or unset these variables",
        )
    return found


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: not a number", hint="start all processes with torchrun")
    return int(text)
