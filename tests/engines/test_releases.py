"""The releases of engines: how they are named, and what differs between them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.facts.release import make_releases
from fp8calib.engines.registry import find_emulated, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Evidence, Status
from fp8calib.errors import UsageError
from fp8calib.model.geometry import ModelGeometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_TENSOR,
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
ROWS = json.loads(Path(__file__).with_name("releases.json").read_text())
KNOWN = "known versions of vllm: 0.33.0, 0.32.0, 0.31.0, 0.30.0, 0.29.0, 0.28.0, 0.27.1, 0.26.0"
SGLANG_KNOWN = ", ".join(f"0.5.{number}" for number in range(23, 15, -1))


@pytest.mark.parametrize("find", [find_replayed, lambda name: find_emulated(name)[0]])
@pytest.mark.parametrize(("name", "key", "version", "evidence"), ROWS["versions"])
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
        ("vllm==0.20", KNOWN),
        ("vllm==", KNOWN),
        ("vllm==0.31==0.32", KNOWN),
        ("sglang==0.5.15", f"known versions of sglang: {SGLANG_KNOWN}"),
        ("reference==1", "known versions of reference: none"),
    ],
)
def test_an_unknown_version_is_an_error_that_lists_the_known_ones(
    find: object, name: str, known: str
) -> None:
    with pytest.raises(UsageError, match=f"--engine {name}: unknown version") as caught:
        find(name)  # type: ignore[operator]

    assert caught.value.hint == known


@pytest.mark.parametrize(("name", "version", "note"), ROWS["other versions"])
def test_another_version_has_the_rules_of_a_release_and_says_so(
    tmp_path: Path, name: str, version: str, note: str
) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    (found,) = check_folder(open_folder(folder), plain_geometry(), [name], 1).values()

    assert found.version == version
    assert any(problem.startswith(note) for problem in found.problems)
    engine = find_emulated(name)[0]
    assert engine.version == version
    assert engine.note.startswith(note)


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


@pytest.mark.parametrize(("engine", "section", "status"), ROWS["excluded modules"])
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

    found = ask(engine, folder, plain_geometry(architecture="LlamaForCausalLM")).weights

    assert (found and found.status) == status
    if found is not None:
        assert found.why.startswith("lm_head is not quantized, but the config quantizes it")


@pytest.mark.parametrize(("engine", "section", "status"), ROWS["no lists"])
def test_a_list_of_modules_that_is_none(
    tmp_path: Path, engine: str, section: dict[str, object], status: str
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    folder = save_folder(tmp_path / "f", scales, quantization={**MODELOPT, **section})

    assert statuses(ask(engine, folder)) == both(status)


@pytest.mark.parametrize(("model_type", "architecture", "outcomes"), ROWS["places"])
def test_from_which_release_a_model_has_a_place_for_scales(
    tmp_path: Path, model_type: str, architecture: str, outcomes: Mapping[str, str]
) -> None:
    """Read in `registry.py` and in the classes of the releases."""
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR, model_type=model_type)
    geometry = plain_geometry(model_type=model_type, architecture=architecture)

    for minor in range(26, 33):
        found = statuses(ask(f"vllm==0.{minor}", folder, geometry))
        first = max(each for each in outcomes if int(each) <= minor)
        assert found == both(outcomes[first]), minor


def test_a_class_that_a_release_lacks_is_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR, model_type="granite_swa")
    geometry = plain_geometry(model_type="granite_swa", architecture="GraniteSWAForCausalLM")

    verdict = ask("vllm==0.28", folder, geometry).layers[0].k

    assert verdict.why == "vLLM 0.28 has no class for GraniteSWAForCausalLM"
    assert verdict.fix == "use vLLM 0.29 or later"


@pytest.mark.parametrize(
    ("words", "releases"),
    [
        ("--calculate-kv-scales", range(26, 28)),
        ("Triton on CUDA)", range(26, 33)),
    ],
)
def test_conditions_of_releases_are_noted(tmp_path: Path, words: str, releases: range) -> None:
    scales = spell("k_scale", "v_scale", "q_scale") if "Triton" in words else PAIR
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)

    found = [
        minor
        for minor in range(26, 33)
        if any(words in problem for problem in ask(f"vllm==0.{minor}", folder).problems)
    ]

    assert found == [*releases]


@pytest.mark.parametrize(
    ("method", "first"),
    [(PER_TENSOR, 19), (FP8, 16), (MODELOPT, 16)],
    ids=["compressed-tensors", "fp8", "modelopt"],
)
def test_sglang_loads_the_scales_of_a_method_from_its_release_on(
    tmp_path: Path, method: object, first: int
) -> None:
    folder = save_folder(tmp_path / "m", PAIR, quantization=method)
    for number in range(16, 23):
        report = ask_sglang(folder, number)
        assert report.ok is (number >= first)
        if not report.ok:
            verdict = report.layers[0].k
            assert (verdict.status, verdict.value) == (Status.DROPPED, 1.0)
            assert verdict.fix == "serve it with a newer release, or without scales"


def test_a_class_that_sglang_did_not_have_loads_no_scales(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", PAIR, quantization=MODELOPT)
    geometry = plain_geometry(model_type="granite_swa", architecture="GraniteSWAForCausalLM")
    why = ask_sglang(folder, 18, geometry).layers[0].k.why
    assert why.endswith(
        "SGLang 0.5.18 has no class GraniteSWAForCausalLM, which came with 0.5.19, and loads no KV "
        "scales with transformers' class, so it uses 1.0"
    )


@pytest.mark.parametrize(("named", "status"), [("PhiMoE", Status.USED), ("Phimoe", Status.DROPPED)])
def test_sglang_may_have_the_class_that_the_config_names(
    tmp_path: Path, named: str, status: Status
) -> None:
    classes = [f"{named}ForCausalLM"]
    folder = save_folder(tmp_path / "m", PAIR, quantization=MODELOPT, architectures=classes)
    geometry = plain_geometry(model_type="phimoe", architecture="PhimoeForCausalLM")
    assert statuses(ask_sglang(folder, 23, geometry)) == both(status)


def test_two_scales_of_zero_stop_sglang_before_0_5_18(tmp_path: Path) -> None:
    scales = spell("k_scale", "v_scale", value=0.0)
    folder = save_folder(tmp_path / "m", scales, quantization=MODELOPT)
    assert statuses(ask_sglang(folder, 17)) == both(Status.REFUSED)
    assert statuses(ask_sglang(folder, 18)) == both(Status.DEFAULTED)


def test_the_arithmetic_of_sglang_is_emulated_from_0_5_19_on() -> None:
    assert find_emulated("sglang==0.5.19")[1] == find_emulated("sglang")[1]
    with pytest.raises(UsageError, match="the arithmetic of this release has not been read"):
        find_emulated("sglang==0.5.18")


def test_sglang_has_no_place_for_fp8_weights_of_a_mixed_precision(tmp_path: Path) -> None:
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

    (reason,) = ask("sglang", folder, plain_geometry(architecture="LlamaForCausalLM")).unknown
    assert f"{linear}.input_scale has no place by the config" in reason


def ask_sglang(folder: Path, number: int, geometry: ModelGeometry | None = None) -> EngineReport:
    name = "sglang" if number == 23 else f"sglang==0.5.{number}"
    return ask(name, folder, geometry)


def test_fp8_weights_without_quantized_inputs_by_release(tmp_path: Path) -> None:
    folder = make(tmp_path, "compressed-tensors", "w8a16", **WHOLE)
    for engine, words in (
        ("vllm==0.26", ""),
        ("sglang==0.5.21", "for packed integers"),
        ("sglang==0.5.22", ""),
    ):
        weights = ask_weights(folder, engine).weights
        assert (weights is None) is (not words), engine
        assert weights is None or words in weights.why, engine


def test_a_fact_is_true_of_the_releases_between_two() -> None:
    seen = {"source": "file.py symbol", "how": "read"}
    written = {
        "engine": "Engine",
        "name_parts": 2,
        "releases": [
            {"version": version, "package": "engine", "evidence": "read"}
            for version in ("0.8.0", "0.9.1", "0.10.0", "0.10.1")
        ],
        "facts": [
            {"fact": "a", "since": "0.9.1", "until": "0.10.1", **seen},
            {"fact": "b", "values": ["x"], **seen},
            {"fact": "b", "values": ["y"], "since": "0.10.0", **seen},
        ],
    }

    releases = make_releases(written)

    assert [each.has("a") for each in releases] == [False, True, True, False]
    assert [each.values["b"] for each in releases] == [("x",), ("x",), ("x", "y"), ("x", "y")]
    assert releases[0].begins == {"a": {"": "0.9"}, "b": {"x": "", "y": "0.10"}}
    assert [each.title for each in releases[:2]] == ["Engine 0.8", "Engine 0.9"]
    with pytest.raises(KeyError, match="c"):
        releases[0].has("c")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"since": "0.9"}, "'0.9' is not in list"),
        ({"until": "0.9.2"}, "'0.9.2' is not in list"),
    ],
)
def test_a_fact_of_an_unknown_release_is_an_error(change: dict[str, str], words: str) -> None:
    release = {"version": "0.9.1", "package": "engine", "evidence": "read"}
    fact = {"fact": "a", "source": "file.py", "how": "read", **change}
    written = {"engine": "Engine", "name_parts": 2, "releases": [release], "facts": [fact]}

    with pytest.raises(ValueError, match=words):
        make_releases(written)
