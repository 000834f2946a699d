"""SGLang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.engines.engine import SCALE_FACTOR, Engine, Launch
from fp8calib.engines.facts.release import SGLANG_RELEASES, Release, explain_type
from fp8calib.engines.numerics import read_numerics
from fp8calib.engines.weights.rules import NameRules, read_weight_rules

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.model.shapes import ModelGeometry


_KERNELS_READ = "kernels and functions that Numerics names are those of 0.5.23"


def _replay_folder(
    release: Release, folder: ScaleFolder, geometry: ModelGeometry, tp: int
) -> EngineReport:
    from fp8calib.engines.sglang.replay import replay_sglang  # noqa: PLC0415

    return replay_sglang(folder, geometry, tp, release)


def _replay_json(
    release: Release, path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    from fp8calib.engines.sglang.scales_file import replay_sglang_json  # noqa: PLC0415

    return replay_sglang_json(path, geometry, tp, model, release)


def _make_reader(release: Release, folder: ScaleFolder, geometry: ModelGeometry) -> LinearReader:
    from fp8calib.engines.sglang.linears import SglangReader  # noqa: PLC0415

    return SglangReader.open(folder, geometry, release)


_NAME_RULES = NameRules(
    is_silent=True,  # srt/model_loader/loader.py load_weights_and_postprocess compares nothing
    bare_types=("gpt2",),
    tied_types=("gemma", "gemma2", "gemma3_text", "gemma3n_text"),  # not read
)


def _make_engine(release: Release) -> Engine:
    return Engine(
        key="sglang",
        minor_parts=3,
        title="SGLang",
        version=release.version,
        evidence=release.evidence,
        launch=Launch(
            command="python -m sglang.launch_server --model-path",
            kv_flag="--kv-cache-dtype fp8_e4m3",
            ranks_flag="--tp-size",
        ),
        numerics=read_numerics("sglang"),
        cache_types=release.list_values("--kv-cache-dtype"),
        scale_factor=float(release.list_values(SCALE_FACTOR)[0].partition(" on ")[0]),
        replay_folder=partial(_replay_folder, release),
        replay_json=partial(_replay_json, release),
        explain_type=partial(explain_type, release),
        splits_heads=True,
        make_reader=partial(_make_reader, release),
        weight_rules=read_weight_rules(release, "sglang"),
        name_rules=_NAME_RULES,
    )


_OLDER = tuple(
    replace(
        _make_engine(release),
        key=f"sglang=={release.version}",
        loads_like="sglang",
        numerics=read_numerics("sglang") if release.has(_KERNELS_READ) else None,
        no_numerics="the arithmetic of this release has not been read; --engine sglang is newer",
    )
    for release in reversed(SGLANG_RELEASES[:-1])
)
SGLANG = replace(_make_engine(SGLANG_RELEASES[-1]), is_default=True, releases=_OLDER)
