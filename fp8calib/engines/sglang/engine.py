"""SGLang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fp8calib.engines.engine import SCALE_FACTOR, Engine, call
from fp8calib.engines.facts.release import SGLANG_RELEASES, Release

_HERE = "fp8calib.engines.sglang"
_NUMERICS = partial(call, "fp8calib.engines.arithmetic:read_numerics", "sglang")
_KERNELS_READ = "kernels and functions that Numerics names are those of 0.5.23"


def _make_engine(release: Release, key: str) -> Engine:
    return Engine(
        key=key,
        title="SGLang",
        version=release.version,
        evidence=release.evidence,
        facts=release,
        command="python -m sglang.launch_server --model-path",
        kv_flag="--kv-cache-dtype fp8_e4m3",
        make_numerics=_NUMERICS,
        cache_types=release.values["--kv-cache-dtype"],
        scale_factor=float(release.values[SCALE_FACTOR][0].partition(" on ")[0]),
        replay_folder=partial(call, f"{_HERE}.replay:replay_sglang", release),
        replay_json=partial(call, f"{_HERE}.replay:replay_json", release),
        make_reader=partial(call, f"{_HERE}.linears:SglangReader.open", release),
    )


_OLDER = tuple(
    replace(
        _make_engine(release, f"sglang=={release.version}"),
        make_numerics=_NUMERICS if release.has(_KERNELS_READ) else None,
        no_numerics="the arithmetic of this release has not been read; --engine sglang is newer",
    )
    for release in reversed(SGLANG_RELEASES[:-1])
)
SGLANG = replace(_make_engine(SGLANG_RELEASES[-1], "sglang"), is_default=True, releases=_OLDER)
