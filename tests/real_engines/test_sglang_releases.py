"""What `check` says of SGLang's older releases is what the code of each release does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.facts.release import PLACELESS, SGLANG_RELEASES, Release
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.sglang.linears import SglangReader
from fp8calib.model.geometry import ModelGeometry
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
from tests.real_engines.package import open_release
from tests.real_engines.release_configs import (
    CONFIGS as CLASSES,
)
from tests.real_engines.release_configs import (
    EMPTY,
    NOTHING,
    PARTS,
    PATHS,
    describe_group,
    open_sglang_configs,
)
from tests.real_engines.sglang_survey import MODELS, OTHERS, SPELLINGS, WRAPPERS, survey_release

CONFIGS: Mapping[str, object] = {
    "compressed-tensors": PER_TENSOR,
    "fp8": FP8,
    "modelopt": MODELOPT,
    "quark": QUARK,
}
by_release = pytest.mark.parametrize("release", SGLANG_RELEASES, ids=lambda each: each.version)


def survey(release: Release) -> Mapping[str, Any]:
    """Run the code of a release."""
    open_release(release)
    return survey_release(f"{release.package}=={release.version}")


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


WRAPPED = {
    name: {
        "model_type": model_type,
        "architecture": architecture,
        "path": "model.language_model.layers.{}.self_attn",
    }
    for name, (architecture, model_type, _) in WRAPPERS.items()
}
"""Models with other inputs."""
PLAIN = {
    model_type: {"model_type": model_type, "architecture": architecture}
    for model_type, architecture in MODELS.items()
}


@by_release
@pytest.mark.parametrize(("kind", "models"), [("models", PLAIN), ("wrappers", WRAPPED)])
def test_every_spelling_ends_as_in_the_models_own_loader(
    release: Release, kind: str, models: Mapping[str, Mapping[str, str]], tmp_path: Path
) -> None:
    found = {
        name: {
            spelling: check_statuses(
                tmp_path / f"{name}-{number}", release, SPELLINGS[spelling], **models[name]
            )
            for number, spelling in enumerate(outcomes)
        }
        for name, outcomes in survey(release)[kind].items()
    }
    assert found == {
        name: {spelling: {outcome} for spelling, outcome in outcomes.items()}
        for name, outcomes in survey(release)[kind].items()
    }


@by_release
def test_a_class_and_its_parameters_are_there_from_their_release_on(
    release: Release, tmp_path: Path
) -> None:
    places = survey(release)["places"]
    for model_type, architecture in (MODELS | OTHERS).items():
        if model_type in places:
            assert release.has(PLACELESS, model_type) is not places[model_type], model_type
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
@pytest.mark.parametrize("lists_parts", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_linears_have_the_scheme_that_the_release_chooses(
    release: Release, name: str, lists_parts: bool
) -> None:
    configs = open_sglang_configs(open_release(release), name)
    parts = PARTS if lists_parts else {}
    for section in CLASSES[name]():
        for path in PATHS:
            whole = {**section, "packed_modules_mapping": parts}
            expected = configs.choose(name, whole, path)
            found = describe_group(
                lambda each=section: SglangReader(NOTHING, each, EMPTY, release),  # type: ignore[misc]
                path,
                "config" if lists_parts or path.rpartition(".")[2] not in PARTS else "joined",
            )
            is_ruled = PATHS[path] == "FusedMoE" and (found, expected) == ("alone", "refused")
            assert is_ruled or found in (expected, "unknown"), (section, path)
