"""Memory and processors that a process may use, computed from kernel files written by hand."""

import mmap
import os
import time
from pathlib import Path

import pytest

from fp8calib.errors import UsageError
from fp8calib.machine import (
    PeakMemory,
    ProcessRank,
    anonymous_bytes,
    available_bytes,
    count_processors,
    find_process_rank,
)

MIB = 2**20
STATUS = "Name:\tpython\nVmSize:\t 900 kB\nVmData:\t 300 kB\nRssAnon:\t 200 kB\nVmSwap:\t 8 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a tree of `proc` and `sys`, with 1000 MiB available in the machine."""
    plain = {
        "proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n",
        "proc/self/status": STATUS,
    }
    for name, text in {**plain, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limits(data: str, space: str) -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {data:<20} unlimited            bytes     \n"
        f"Max address space         {space:<20} unlimited            bytes     \n"
    )


CASES = {
    "nothing limits it": ({}, 1000 * MIB),
    "a v2 group": (
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(500 * MIB),
            "sys/fs/cgroup/job/memory.current": str(300 * MIB),
        },
        200 * MIB,
    ),
    "a v2 group whose cache can be given up, but for what lies in tmpfs": (
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(500 * MIB),
            "sys/fs/cgroup/job/memory.current": str(300 * MIB),
            "sys/fs/cgroup/job/memory.stat": f"anon 9\nfile {90 * MIB}\nshmem {20 * MIB}\n",
        },
        270 * MIB,
    ),
    "a v2 group without a limit inside one with": (
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "1\n",
            "sys/fs/cgroup/outer/memory.max": str(50 * MIB),
            "sys/fs/cgroup/outer/memory.current": str(10 * MIB),
        },
        40 * MIB,
    ),
    "a container, whose group is named from outside": (
        {
            "proc/self/cgroup": "0::/../../docker/abc\n",
            "sys/fs/cgroup/memory.max": str(70 * MIB),
            "sys/fs/cgroup/memory.current": "0\n",
        },
        70 * MIB,
    ),
    "a v1 group": (
        {
            "proc/self/cgroup": "5:cpu:/a\n4:hugetlb,memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(400 * MIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(300 * MIB),
            "sys/fs/cgroup/memory/job/memory.stat": f"cache 7\ntotal_cache {50 * MIB}\n",
        },
        150 * MIB,
    ),
    "a limit of data": (
        {"proc/self/limits": limits(str(10 * MIB), "unlimited")},
        10 * MIB - 300 * 1024,
    ),
    "a limit of address space": (
        {"proc/self/limits": limits(str(90 * MIB), str(10 * MIB))},
        10 * MIB - 900 * 1024,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_limit_counts(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    assert available_bytes(root=write(tmp_path, files)) == expected


PROCESSORS = {
    "nothing limits it": ({}, 64),
    "a quota of v2": (
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "350000 100000\n"},
        4,
    ),
    "less than a processor": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5000 100000"},
        1,
    ),
    "a quota of v1": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_smallest_number_of_processors_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, expected = PROCESSORS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert count_processors(root=write(tmp_path, files)) == expected


def test_the_peak_is_sampled_by_a_thread() -> None:
    """Memory that is freed again before the end counts."""
    before = anonymous_bytes()
    assert before is not None
    with PeakMemory() as memory:
        # A mapping of its own: an allocator could reuse memory that the process already has.
        block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"1" * len(block))
        deadline = time.monotonic() + 10
        while (memory.peak_bytes or 0) < before + 48 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        block.close()
    assert memory.peak_bytes is not None
    assert memory.peak_bytes - before >= 48 * MIB


# --- the rank of a process, read from the environment that torchrun sets -------------------------


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_all_variables_of_torchrun_are_read() -> None:
    process_rank = find_process_rank(TORCHRUN)
    assert process_rank == ProcessRank(rank=5, size=8, local_rank=1, local_size=4)
    assert not process_rank.is_first


def test_without_local_variables_all_are_on_one_machine() -> None:
    environment = {key: value for key, value in TORCHRUN.items() if "LOCAL" not in key}
    assert find_process_rank(environment) == ProcessRank(rank=5, size=8, local_rank=5, local_size=8)


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"RANK": "x"},
        {"MASTER_PORT": "x"},
        {"MASTER_PORT": "65536"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "0"},
    ],
)
def test_contradicting_variables_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"contradict each other|not a port|not a number"):
        find_process_rank({**TORCHRUN, **change})
