"""What differs between the releases of vLLM, by the code of each."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8calib.engines.facts.release import VLLM_RELEASES, Release
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.vllm.linears import VllmSchemes
from fp8calib.engines.vllm.quantization_config import find_exclusions, find_kv_method
from tests.engines.check_handmade import MODELOPT, PER_TENSOR
from tests.real_engines.release_configs import (
    CONFIGS,
    PARTS,
    PATHS,
    ReleaseConfigs,
    describe_group,
)
from tests.real_engines.vllm_sources import (
    COMPRESSED,
    FILES,
    QUANTIZATION,
    SOME_FILES,
    fetch_sources,
    take,
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


def _judge_scheme(release: Release, scheme: Mapping[str, object]) -> bool:
    try:
        find_kv_method({**PER_TENSOR, "kv_cache_scheme": scheme}, release)
    except Refusal:
        return False
    return True


@by_release
def test_a_kv_cache_scheme_is_accepted_as_by_the_release(release: Release) -> None:
    name = "CompressedTensorsKVCacheMethod.validate_kv_cache_scheme"
    validate = take(release.version, COMPRESSED, name)

    for scheme in SCHEMES:
        try:
            validate(scheme)
        except (NotImplementedError, ValueError):
            is_accepted = False
        else:
            is_accepted = True
        assert _judge_scheme(release, scheme) == is_accepted, scheme


class _Reader:
    """What from_config calls, in the place of its class: it gives the list of excluded modules."""

    def __call__(self, *args: Any) -> Any:
        return args[-1]

    def _from_config(self, **kwargs: Any) -> Any:
        return kwargs["exclude_modules"]

    def get_from_keys(self, config: Mapping[str, Any], keys: list[str]) -> Any:
        return next(config[key] for key in keys if key in config)


def _read_algorithms(version: str) -> list[str]:
    """Read QUANT_ALGOS, which from 0.30 on is made of the keys of a table."""
    tree = ast.parse(fetch_sources(version)[f"{QUANTIZATION}modelopt.py"])
    space: dict[str, Any] = {}
    for node in tree.body:
        text = ast.unparse(node)
        if text.startswith(("QUANT_ALGOS", "LINEAR_ALGOS")):
            exec(text, space)  # noqa: S102
    found: list[str] = space["QUANT_ALGOS"]
    return found


@by_release
def test_modelopts_configs_are_read_as_by_the_release(release: Release) -> None:
    algorithms = _read_algorithms(release.version)
    file, name = f"{QUANTIZATION}modelopt.py", "ModelOptQuantConfigBase.from_config"
    read = take(release.version, file, name, QUANT_ALGOS=algorithms)

    for algorithm in ALGORITHMS:
        section = {**MODELOPT, "quant_algo": algorithm, "quantized_layers": {"a": {}}}
        for lists in LISTS:
            config = {**section, **lists}
            try:
                found = read(_Reader(), config)
            except ValueError:
                with pytest.raises(Refusal):
                    find_kv_method(config, release)
                continue
            find_kv_method(config, release)
            key = find_exclusions(config, config, release)
            assert (found or []) == config.get(key, []), config


PAIRS = ((0.5, 0.25), (-1.0, -1.0), (0.5, -1.0), (0.5, 0.0), (0.0, 0.5), (-1.0, 0.5), (0.0, 0.0))
USED = ((0.5, 0.25), (1.0, 1.0), (0.5, 0.5), (0.5, 0.5), None, None, None)
"""As `judge_pair` has it of 0.32.0; None for a failed assertion."""


@by_release
def test_a_pair_of_scales_is_used_as_in_0_32(release: Release) -> None:
    file = f"{QUANTIZATION}kv_cache.py"
    process = take(release.version, file, "BaseKVCacheMethod.process_weights_after_loading")

    for pair, used in zip(PAIRS, USED, strict=True):
        layer = _make_layer(*pair)
        if used is None:
            with pytest.raises(AssertionError):
                process(None, layer)
            continue
        process(None, layer)
        assert (layer._k_scale.item(), layer._v_scale.item()) == used


@by_release
def test_the_scales_of_the_first_batch_replace_the_files_until_0_27(release: Release) -> None:
    file = f"{QUANTIZATION}kv_cache.py"
    process = take(release.version, file, "BaseKVCacheMethod.process_weights_after_loading")
    layer = _make_layer(0.5, 0.25)
    layer.calculate_kv_scales = True

    process(None, layer)

    assert (layer._k_scale.item() == 1.0) is release.has(
        "--calculate-kv-scales exists: the scales are then those of the first batch"
    )


def _make_layer(k: float, v: float) -> Any:
    scales = {"k_scale": k, "v_scale": v, "q_scale": -1.0, "prob_scale": -1.0}
    made = {name: torch.tensor(value) for name, value in scales.items()}
    made |= {f"_{name}": torch.tensor(1.0) for name in scales}
    made |= {"_k_scale_cpu": torch.tensor(1.0), "_v_scale_cpu": torch.tensor(1.0)}
    return SimpleNamespace(**made, kv_cache_dtype="fp8", calculate_kv_scales=False)


@by_release
def test_compressed_tensors_sets_the_scales_of_flashinfer(release: Release) -> None:
    name = "CompressedTensorsKVCacheMethod.process_weights_after_loading"
    layer = _make_layer(0.5, 0.25)
    layer._k_scale_float = 1.0
    zero_points = ("k_zero_point", "v_zero_point", "q_zero_point")
    vars(layer).update({each: torch.tensor(0.0) for each in zero_points})
    layer.register_buffer = lambda name, value: setattr(layer, name, value)

    take(release.version, COMPRESSED, name)(None, layer)

    assert layer._k_scale.item() == 0.5
    assert layer._k_scale_float == 0.5


@by_release
def test_classes_are_those_of_the_registry(release: Release) -> None:
    text = fetch_sources(release.version)["model_executor/models/registry.py"]
    native = _list_native(text)

    for fact in release.facts:
        if fact.name == "class":
            name = str(fact.value)
            assert (name in native) is (name in release.list_values("class")), name


def _list_native(text: str) -> set[str]:
    """List the classes in the dicts of `registry.py` but those of transformers and of the past."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        target = ast.unparse(node).partition("=")[0]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if "_MODELS" not in target or not isinstance(value, ast.Dict):
            continue
        if "TRANSFORMERS" in target or "PREVIOUS" in target:
            continue
        pairs = zip(value.keys, value.values, strict=True)
        found |= {key.value for key, _ in pairs if isinstance(key, ast.Constant)}  # type: ignore[misc]
    return found


@by_release
@pytest.mark.parametrize("name", CONFIGS)
def test_linears_have_the_scheme_that_the_release_chooses(release: Release, name: str) -> None:
    """But for experts in a format that no linear may have, which vLLM does not look at."""
    texts = fetch_sources(release.version)
    utils = (*SOME_FILES[::-1], *FILES[-2:])
    own = {"CompressedTensorsConfig": COMPRESSED, "Fp8Config": f"{QUANTIZATION}fp8.py"}
    files = (*utils, own.get(name, f"{QUANTIZATION}modelopt.py"))
    configs = ReleaseConfigs((texts[file] for file in files if file in texts), "RoutedExperts")
    for section in CONFIGS[name]():
        has_other_format = section.get("format") in ("mixed-precision", "pack-quantized")
        for path in PATHS:
            is_expert = PATHS[path] == "FusedMoE"
            if is_expert and has_other_format:
                continue
            expected = configs.choose(name, section, path, packed_modules_mapping=PARTS)
            found = describe_group(lambda each=section: VllmSchemes(each, {}, release), path)  # type: ignore[misc]
            is_ruled = is_expert and (found, expected) == ("alone", "refused")
            assert is_ruled or found in (expected, "unknown"), (section, path)
