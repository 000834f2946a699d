"""What differs between the releases of vLLM, by the code of each."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.engines.facts.release import (
    PLACELESS,
    SGLANG_RELEASES,
    VLLM_RELEASES,
    VLLM_RUN,
    Release,
)
from fp8calib.engines.replay.verdicts import EngineReport, Refusal
from fp8calib.engines.sglang.linears import SglangReader
from fp8calib.engines.vllm.engine import VLLM_CPU
from fp8calib.engines.vllm.kv_method import find_kv_method, name_exclusion_list
from fp8calib.engines.vllm.linears import VllmReader
from fp8calib.formats.kv.config import find_scheme_fault
from fp8calib.formats.kv.kv_scales import name_scales
from fp8calib.model.geometry import ModelGeometry, Role
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
from tests.formats.handmade import make_attention
from tests.real_engines.package import find_symbol, open_release
from tests.real_engines.release_configs import (
    CONFIGS,
    EMPTY,
    NOTHING,
    PARTS,
    PATHS,
    describe_group,
    open_sglang_configs,
    open_vllm_configs,
)
from tests.real_engines.sglang_survey import MODELS, OTHERS, SPELLINGS, WRAPPERS, survey_release
from tests.real_engines.stubs import take
from tests.real_engines.vllm_sources import (
    COMPRESSED,
    make_layer,
    read_modelopt_list,
    take_processing,
)

SCHEMES: tuple[Mapping[str, object], ...] = tuple(
    {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric}
    for kind in ("float", "int")
    for bits in (8, 4)
    for strategy in ("tensor", "attn_head", "channel", "token")
    for symmetric in (True, False)
)
ALGORITHMS = (
    *("FP8", "fp8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4", "MXFP8"),
    *("MIXED_PRECISION", "W4A8_AWQ"),
)
LISTS: tuple[Mapping[str, object], ...] = (
    {},
    {"ignore": ["a"]},
    {"exclude_modules": ["b"]},
    {"ignore": ["a"], "exclude_modules": ["b"]},
)
by_release = pytest.mark.parametrize("release", VLLM_RELEASES, ids=lambda each: each.version)


@by_release
def test_a_kv_cache_scheme_is_accepted_as_by_the_release(release: Release) -> None:
    name = "CompressedTensorsKVCacheMethod.validate_kv_cache_scheme"
    validate = take(open_release(release), COMPRESSED, name)

    for scheme in SCHEMES:
        try:
            validate(scheme)
        except (NotImplementedError, ValueError):
            is_accepted = False
        else:
            is_accepted = True
        assert is_accepted is not bool(find_scheme_fault(scheme)), scheme


@by_release
def test_modelopts_configs_are_read_as_by_the_release(release: Release) -> None:
    read = read_modelopt_list(open_release(release))

    for algorithm in ALGORITHMS:
        section = {**MODELOPT, "quant_algo": algorithm, "quantized_layers": {"a": {}}}
        for lists in LISTS:
            config = {**section, **lists}
            try:
                found = read(config)
            except ValueError:
                with pytest.raises(Refusal):
                    find_kv_method(config, release)
                continue
            find_kv_method(config, release)
            key = name_exclusion_list(config, config, release)
            assert (found or []) == config.get(key, []), config


def test_a_cpu_stores_the_cache_types_that_its_backend_lists() -> None:
    file = open_release(VLLM_RUN).parse("vllm/v1/attention/backends/cpu_attn.py")
    owner = find_symbol(file, "CPUAttentionBackend")
    (listed,) = (
        node.value
        for node in ast.walk(owner)
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "supported_kv_cache_dtypes"
    )
    assert set(ast.literal_eval(listed)) == {"auto", *VLLM_CPU.cache_types}  # type: ignore[arg-type]


PAIRS = ((0.5, 0.25), (-1.0, -1.0), (0.5, -1.0), (0.5, 0.0), (0.0, 0.5), (-1.0, 0.5), (0.0, 0.0))
USED = ((0.5, 0.25), (1.0, 1.0), (0.5, 0.5), (0.5, 0.5), None, None, None)
"""As `judge_pair` has it of 0.32.0; None for a failed assertion."""


@by_release
def test_a_pair_of_scales_is_used_as_in_0_32(release: Release) -> None:
    process = take_processing(open_release(release))

    for pair, used in zip(PAIRS, USED, strict=True):
        layer = make_layer(*pair)
        if used is None:
            with pytest.raises(AssertionError):
                process(layer)
            continue
        process(layer)
        assert (layer._k_scale.item(), layer._v_scale.item()) == used


@by_release
def test_compressed_tensors_sets_the_scales_of_flashinfer(release: Release) -> None:
    name = "CompressedTensorsKVCacheMethod.process_weights_after_loading"
    layer = make_layer(0.5, 0.25)
    layer._k_scale_float = 1.0
    zero_points = ("k_zero_point", "v_zero_point", "q_zero_point")
    vars(layer).update({each: torch.tensor(0.0) for each in zero_points})
    layer.register_buffer = lambda name, value: setattr(layer, name, value)

    take(open_release(release), COMPRESSED, name)(None, layer)

    assert layer._k_scale.item() == 0.5
    assert layer._k_scale_float == 0.5


@by_release
@pytest.mark.parametrize("name", CONFIGS)
def test_linears_have_the_scheme_that_the_release_chooses(release: Release, name: str) -> None:
    """But for experts in a format that no linear may have, which vLLM does not look at."""
    configs = open_vllm_configs(open_release(release), name)
    for section in CONFIGS[name]():
        has_other_format = section.get("format") in ("mixed-precision", "pack-quantized")
        for path in PATHS:
            is_expert = PATHS[path] == "FusedMoE"
            if is_expert and has_other_format:
                continue
            expected = configs.choose(name, section, path, packed_modules_mapping=PARTS)
            found = describe_group(
                lambda each=section: VllmReader(NOTHING, each, EMPTY, release),  # type: ignore[misc]
                path,
            )
            is_ruled = is_expert and (found, expected) == ("alone", "refused")
            assert is_ruled or found in (expected, "unknown"), (section, path)


SGLANG_CONFIGS: Mapping[str, object] = {
    "compressed-tensors": PER_TENSOR,
    "fp8": FP8,
    "modelopt": MODELOPT,
    "quark": QUARK,
}
by_sglang_release = pytest.mark.parametrize(
    "release", SGLANG_RELEASES, ids=lambda each: each.version
)


def survey(release: Release) -> Mapping[str, Any]:
    """Run the code of a release."""
    return survey_release(open_release(release))


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


@by_sglang_release
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


@by_sglang_release
@pytest.mark.parametrize(("kind", "models"), [("models", PLAIN), ("wrappers", WRAPPED)])
def test_a_written_scale_is_loaded_where_no_name_stops_the_loader(
    release: Release, kind: str, models: Mapping[str, Mapping[str, str]]
) -> None:
    attention = make_attention(0)
    spelled = {"k_scale": "ours", "attn.k_scale": "the parameter's"}
    for model, found in survey(release)[kind].items():
        geometry = plain_geometry(architecture=models[model]["architecture"])
        written = {
            found[spelled[name.removeprefix(f"{attention.checkpoint_module}.")]]
            for name in name_scales(geometry, attention, Role.K)
        }
        outcomes = {found[each] for each in spelled.values()}
        if "used" in outcomes and "refused" not in outcomes:  # transformers needs the plain name
            assert "used" in written, model


@by_sglang_release
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


@by_sglang_release
def test_methods_have_parameters_from_their_release_on(release: Release, tmp_path: Path) -> None:
    for method, config in SGLANG_CONFIGS.items():
        folder = save_folder(tmp_path / method, spell("k_scale", "v_scale"), quantization=config)
        report = ask_release(release, folder)
        assert report.ok is (method in survey(release)["methods"]), method


@by_sglang_release
def test_two_scales_of_zero(release: Release, tmp_path: Path) -> None:
    scales = spell("k_scale", "v_scale", value=0.0)
    folder = save_folder(tmp_path / "m", scales, quantization=MODELOPT)
    verdict = ask_release(release, folder).layers[0].k
    expected = survey(release)["zeros"]
    assert (verdict.status == "refused") is (expected == "refused")
    assert expected == "refused" or verdict.value == expected[0]


@by_sglang_release
@pytest.mark.parametrize("lists_parts", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_linears_of_sglang_have_the_scheme_that_the_release_chooses(
    release: Release, name: str, lists_parts: bool
) -> None:
    configs = open_sglang_configs(open_release(release), name)
    parts = PARTS if lists_parts else {}
    for section in CONFIGS[name]():
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
