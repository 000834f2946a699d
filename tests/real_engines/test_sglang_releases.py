"""What `check` says of SGLang's older releases is what the code of each release does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp8calib.engines.facts.release import SGLANG_RELEASES, Release
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.sglang.linears import SglangSchemes
from fp8calib.engines.sglang.model_types import (
    JSON_TYPES,
    has_place,
    takes_sglang_json,
)
from fp8calib.geometry.model_geometry import ModelGeometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_TENSOR,
    QUARK,
    ask,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
)
from tests.real_engines.release_configs import (
    CONFIGS as CLASSES,
)
from tests.real_engines.release_configs import (
    PARTS,
    PATHS,
    ReleaseConfigs,
    describe_group,
)
from tests.real_engines.test_sglang_models import MODELS, OTHERS, SPELLINGS, WRAPPERS

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "sglang"
CONFIGS: Mapping[str, object] = {
    "compressed-tensors": PER_TENSOR,
    "fp8": FP8,
    "modelopt": MODELOPT,
    "quark": QUARK,
}
by_release = pytest.mark.parametrize("release", SGLANG_RELEASES, ids=lambda each: each.version)


@cache
def survey(release: Release) -> Mapping[str, Any]:
    """Run the code of a release."""
    folder = find_wheel(release).parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_engines.sglang_survey"],
        env={**os.environ, "SGLANG_WHEELS": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def find_wheel(release: Release) -> Path:
    """Find the wheel of a release; skip the test where it cannot be had."""
    folder = CACHE / release.version
    if not [*folder.glob("sglang-*.whl")]:
        version = release.version
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"sglang=={version} cannot be had: {done.stderr[-300:]}")
    return next(folder.glob("sglang-*.whl"))


def ask_release(
    release: Release, folder: Path, geometry: ModelGeometry | None = None
) -> EngineReport:
    name = "sglang" if release == SGLANG_RELEASES[-1] else f"sglang=={release.version}"
    return ask(name, folder, geometry)


def check_statuses(
    folder: Path, release: Release, leaves: tuple[str, ...], **geometry: str
) -> set[str]:
    path = geometry.pop("path", "model.layers.{}.self_attn")
    save_folder(folder, spell(*leaves, path=path), quantization=FP8)
    shape = moved_geometry(path, **geometry)
    report = ask_release(release, folder, shape)
    return {verdict.status.value for layer in report.layers for verdict in (layer.k, layer.v)}


def list_folders(tmp_path: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield tmp_path / str(number)


@by_release
def test_every_spelling_ends_as_in_the_models_own_loader(release: Release, tmp_path: Path) -> None:
    folders = list_folders(tmp_path)
    wrong = {}
    for model_type, outcomes in survey(release)["models"].items():
        for spelling, expected in outcomes.items():
            found = check_statuses(
                next(folders),
                release,
                SPELLINGS[spelling],
                model_type=model_type,
                architecture=MODELS[model_type],
            )
            if found != {expected}:
                wrong[model_type, spelling] = (found, expected)
    assert not wrong


@by_release
def test_likewise_in_models_with_other_inputs(release: Release, tmp_path: Path) -> None:
    folders = list_folders(tmp_path)
    wrong = {}
    for name, outcomes in survey(release)["wrappers"].items():
        architecture, model_type, _ = WRAPPERS[name]
        for spelling, expected in outcomes.items():
            found = check_statuses(
                next(folders),
                release,
                SPELLINGS[spelling],
                model_type=model_type,
                architecture=architecture,
                path="model.language_model.layers.{}.self_attn",
            )
            if found != {expected}:
                wrong[name, spelling] = (found, expected)
    assert not wrong


@by_release
def test_a_class_and_its_parameters_are_there_from_their_release_on(
    release: Release, tmp_path: Path
) -> None:
    places = survey(release)["places"]
    for model_type, architecture in (MODELS | OTHERS).items():
        if model_type in places:
            assert has_place(model_type, release) is places[model_type], model_type
            continue
        folder = save_folder(tmp_path / model_type, spell("k_scale", "v_scale"), quantization=QUARK)
        geometry = plain_geometry(model_type=model_type, architecture=architecture)
        report = ask_release(release, folder, geometry)
        assert not report.ok
        assert f"has no class {architecture}" in report.layers[0].k.why


@by_release
def test_methods_have_parameters_from_their_release_on(release: Release, tmp_path: Path) -> None:
    for method, config in CONFIGS.items():
        folder = save_folder(tmp_path / method, spell("k_scale", "v_scale"), quantization=config)
        report = ask_release(release, folder)
        assert report.ok is (method in survey(release)["methods"]), method


@by_release
def test_two_scales_of_zero(release: Release, tmp_path: Path) -> None:
    scales = spell("k_scale", "v_scale", value=0.0)
    folder = save_folder(tmp_path / "m", scales, quantization=MODELOPT)
    verdict = ask_release(release, folder).layers[0].k
    expected = survey(release)["zeros"]
    assert (verdict.status == "refused") is (expected == "refused")
    assert expected == "refused" or verdict.value == expected[0]


@by_release
def test_the_classes_that_take_a_file_of_scales(release: Release) -> None:
    taken = set(survey(release)["files"])
    for model_type in set(JSON_TYPES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        geometry = plain_geometry(model_type=model_type, architecture=architecture)
        assert takes_sglang_json(geometry, release) is (architecture in taken), model_type


QUANTIZATION = "sglang/srt/layers/quantization/"
FILES: Mapping[str, tuple[str, ...]] = {
    "CompressedTensorsConfig": tuple(
        f"compressed_tensors/{name}.py"
        for name in ("utils", "compressed_tensors_moe", "compressed_tensors")
    ),
    "Fp8Config": ("utils.py", "fp8.py"),
    "ModelOptFp8Config": ("utils.py", "modelopt_quant.py"),
    "ModelOptMixedPrecisionConfig": ("utils.py", "modelopt_quant.py"),
}
"""By class: its module, after those that it uses."""


@by_release
@pytest.mark.parametrize("lists_parts", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_linears_have_the_scheme_that_the_release_chooses(
    release: Release, name: str, lists_parts: bool
) -> None:
    with zipfile.ZipFile(find_wheel(release)) as wheel:
        there = [QUANTIZATION + file for file in FILES[name]]
        texts = [wheel.read(file).decode() for file in there if file in wheel.namelist()]
    configs = ReleaseConfigs(texts)
    parts, unlisted = (PARTS, ()) if lists_parts else ({}, tuple(PARTS))
    for section in CLASSES[name]():
        for path in PATHS:
            whole = {**section, "packed_modules_mapping": parts}
            expected = configs.choose(name, whole, path)
            found = describe_group(
                lambda each=section: SglangSchemes(each, {}, release, unlisted),  # type: ignore[misc]
                path,
            )
            is_ruled = PATHS[path] == "FusedMoE" and (found, expected) == ("alone", "refused")
            assert is_ruled or found in (expected, "unknown"), (section, path)
