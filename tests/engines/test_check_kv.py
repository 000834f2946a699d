"""Verdicts on KV scales for vLLM and SGLang, where the model or the number of ranks counts.

`kv_cases.json` has a case a line: scales by name in the attention layer (with a leading `/` the
whole name; `{}` is every layer), the config, the model where it is no plain Llama, and what the
engine does with k and v of every layer. What vLLM itself answered for a plain Llama is in
`test_vllm_goldens.py`. What SGLang does was read in its `kv_cache.py`, its remapping, and its
models' loaders.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.geometry import ModelGeometry, Role
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    ask,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)
from tests.engines.vllm_cases import PATH, find_config
from tests.formats.handmade import latent_stats, make_geometry

NAN = float("nan")
PAIR = ("k_scale", "v_scale")
CASES = json.loads(Path(__file__).with_name("kv_cases.json").read_text())
IN_16_BITS = [name for part in ("o_proj", "q_norm") for name in spell(part)]
KNOWN: Mapping[str, dict[str, Any]] = {
    "ct": dict(PER_TENSOR),
    "per head": dict(PER_HEAD),
    "fp8": FP8,
    "modelopt": MODELOPT,
    "quark": QUARK,
    "quark, 16 bits": {**QUARK, "exclude": IN_16_BITS},
}


def describe_model(case: Mapping[str, Any]) -> ModelGeometry:
    keys = ("model_type", "architecture", "num_draft_layers")
    named = {key: case[key] for key in keys if key in case}
    if case.get("latent"):
        return make_geometry([latent_stats().geometry.layers[0].attention], **named)
    return moved_geometry(case["path"], **named) if "path" in case else plain_geometry(**named)


def compare(engine: str, case: Mapping[str, Any], folder: Path) -> EngineReport:
    """Ask the engine about a case, and compare what it says with what is wanted."""
    known = "LlamaForCausalLM" if engine.startswith("sglang") else "Handmade"
    geometry = describe_model({"architecture": known, **case})
    scales = {
        (name[1:] if name.startswith("/") else f"{PATH}.{name}").format(layer.index): value
        for layer in geometry.layers
        for name, value in case["scales"].items()
    }
    config = find_config(case.get("quantization"), KNOWN)
    save_folder(folder, scales, quantization=config, **case.get("config", {}))
    report = ask(engine, folder, geometry, tp=case.get("tp", 1))
    wanted = [case["status"]] * 2 if isinstance(case["status"], str) else case["status"]
    assert set(statuses(report)) == {tuple(wanted)}
    if "number" in case:
        pair = case["number"] if isinstance(case["number"], list) else [case["number"]] * 2
        assert set(values(report)) == {tuple(pair)}
    assert case.get("why", "") in report.layers[0].k.why
    return report


@pytest.mark.parametrize("name", CASES["vllm"])
def test_vllm(tmp_path: Path, name: str) -> None:
    compare("vllm", CASES["vllm"][name], tmp_path / "f")


@pytest.mark.parametrize("name", CASES["sglang"])
def test_sglang(tmp_path: Path, name: str) -> None:
    """All loaders of the wheel are run on names by `tests/real_engines/test_releases.py`."""
    case = CASES["sglang"][name]
    report = compare("sglang", case, tmp_path / "f")
    if case["status"] == "dropped":
        assert all(layer.k.fix and layer.v.fix for layer in report.layers)
        doubted = report.model_copy(update={"unknown": ("something else",)})
        assert doubted.fault == report.fault


@pytest.mark.parametrize("quantization", [FP8, MODELOPT, QUARK])
@pytest.mark.parametrize(
    ("model_type", "dtype", "held"),
    [
        ("llama", "bfloat16", 0.0123291015625),
        ("llama", "float32", 0.0123291015625),
        ("llama", "float16", 0.0123443603515625),
        ("gemma2", "float16", 0.0123291015625),
    ],
)
def test_scales_are_rounded_to_the_dtype_that_the_model_is_served_in(
    tmp_path: Path, quantization: dict[str, object], model_type: str, dtype: str, held: float
) -> None:
    """What vLLM 0.32 held on a CPU with --dtype auto; compressed-tensors' scales stay fp32."""
    geometry = plain_geometry(model_type=model_type, checkpoint_dtype=dtype)
    scales = spell("k_scale", value=0.0123456) | spell("v_scale", value=0.5)
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)
    exact = save_folder(tmp_path / "g", scales, quantization=PER_TENSOR)

    report = ask("vllm", folder, geometry)

    assert report.ok
    assert values(report) == [(held, 0.5)] * 2
    assert any("are rounded to" in problem for problem in report.problems)
    is_half = (model_type, dtype) == ("llama", "float16")
    assert any("FlashAttention 3 stops" in problem for problem in report.problems) is is_half
    assert "FlashAttention 3 stops" not in str(ask("vllm-cpu", folder, geometry).problems)
    unrounded = ask("vllm", exact, geometry)
    assert values(unrounded)[0][0] == pytest.approx(0.0123456, rel=1e-7)
    assert len(unrounded.problems) == is_half


@pytest.mark.parametrize(("value", "is_said"), [(0.25, False), (0.5, True)])
def test_two_names_of_one_scale_are_told_where_they_differ(
    tmp_path: Path, value: float, *, is_said: bool
) -> None:
    scales = spell(*PAIR) | spell("attn.k_scale", value=value)
    report = ask("vllm", save_folder(tmp_path / "f", scales, quantization=PER_TENSOR))
    assert any("same target; one is lost" in each for each in report.problems) is is_said


@pytest.mark.parametrize(
    ("quantization", "names", "is_said"),
    [
        (PER_TENSOR, PAIR, False),
        (PER_TENSOR | {"kv_cache_scheme": None}, PAIR, True),
        (MODELOPT, PAIR, False),
        (FP8, PAIR, True),
        (FP8, ("mlp.up_proj.input_scale",), False),
        (None, PAIR, False),
    ],
)
def test_where_vllm_turns_on_no_fp8_cache_by_itself(
    tmp_path: Path, quantization: object, names: tuple[str, ...], *, is_said: bool
) -> None:
    """`utils/torch_utils.py` of vLLM 0.32 (resolve_kv_cache_dtype_string) decides."""
    report = ask("vllm", save_folder(tmp_path / "f", spell(*names), quantization=quantization))
    assert any("auto does not turn it on" in each for each in report.problems) is is_said


@pytest.mark.parametrize("value", [-1.0, NAN, 0.0, 2.5e-21, 1e15])
def test_a_scale_of_q_that_was_never_set_is_not_fine(tmp_path: Path, value: float) -> None:
    """llm-compressor leaves q_scale as memory is, such as 2.5e-21: q in FP8 would clip."""
    scales = spell(*PAIR) | spell("q_scale", value=value)
    folder = save_folder(tmp_path / "f", scales, quantization=PER_TENSOR)
    report = ask("vllm", folder)
    assert not report.ok
    assert "is not a scale, but used if q is quantized" in report.suspicious[0]
    assert all(each.status == "used" for each in report.slots.values())
    assert ask("vllm-cpu", folder).ok


@pytest.mark.parametrize(
    ("engine", "quantization", "names", "value", "words", "said"),
    [
        ("vllm", PER_TENSOR, PAIR, 0.25, "q_scale", "q_scale is loaded (2, such as model.layers"),
        ("vllm", FP8, PAIR, 0.0, "q_scale", "is not a scale: vLLM uses 1.0"),
        ("vllm", FP8, PAIR, 0.25, "attn.prob_scale", "prob_scale is loaded"),
        (
            "vllm",
            PER_TENSOR,
            ("k_cache.scale", "v_cache.scale"),
            0.25,
            "q.scale",
            "q_scale is loaded",
        ),
        ("vllm", PER_TENSOR, PAIR, 0.25, "", ""),
        ("sglang", PER_TENSOR, PAIR, 0.25, "q_scale", "does not read it"),
        ("sglang", PER_TENSOR, PAIR, 0.25, "", ""),
    ],
)
def test_scales_of_q_and_of_probabilities_are_told_and_decide_nothing(
    tmp_path: Path,
    engine: str,
    quantization: object,
    names: tuple[str, str],
    value: float,
    words: str,
    said: str,
) -> None:
    scales = spell(*names) | (spell(words, value=value) if words else {})
    report = ask(engine, save_folder(tmp_path / "f", scales, quantization=quantization))

    assert report.ok
    told = [text for text in report.problems if "q_scale" in text or "prob" in text]
    assert len(told) == bool(said)
    assert all(said in text and words in text for text in told)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("names", [PAIR, ("attn.k_scale", "attn.v_scale"), ("qkv_proj.k_scale",)])
def test_sglang_uses_scales_under_the_name_that_the_fix_gives(
    tmp_path: Path, model_type: str, names: tuple[str, ...]
) -> None:
    geometry = plain_geometry(model_type=model_type)
    folder = save_folder(tmp_path / "f", spell(*names), quantization=PER_TENSOR)
    for number, layer in enumerate(ask("sglang", folder, geometry).layers):
        if layer.k.fix:
            path = layer.k.fix.partition("(")[2].partition(".k_scale")[0]
            named = {f"{path}.k_scale": 0.5, f"{path}.v_scale": 0.25}
            renamed = save_folder(tmp_path / f"r{number}", named, quantization=PER_TENSOR)
            mended = ask("sglang", renamed, geometry).layers[number]
            assert (mended.k.value, mended.v.value) == (0.5, 0.25)


def test_a_kv_head_is_computed_with_the_largest_scale_of_its_query_heads(tmp_path: Path) -> None:
    """FlashAttention 3 takes one scale of q for a KV head; the model has two of four heads."""
    heads = {"q_scale": [0.25, 0.5, 2.0, 1.0], "k_scale": [0.25, 0.5], "v_scale": [1.0, 2.0]}
    named = {f"{PATH}.{name}".format(0): [[[x]] for x in each] for name, each in heads.items()}
    named |= {f"{PATH}.{name}".format(1): [[[x]] for x in each] for name, each in heads.items()}
    report = ask("vllm", save_folder(tmp_path / "f", named, quantization=PER_HEAD))

    assert report.held[0, Role.Q] == (0.5, 2.0)
    assert report.held[0, Role.K] == (0.25, 0.5)


def test_the_number_of_a_head_that_is_no_scale_is_told(tmp_path: Path) -> None:
    heads = {"q_scale": [0.25, 0.5, math.inf, 1.0], "k_scale": [0.25, 0.5], "v_scale": [1.0, 2.0]}
    named = {
        f"{PATH}.{name}".format(layer): [[[x]] for x in each]
        for name, each in heads.items()
        for layer in range(2)
    }
    report = ask("vllm", save_folder(tmp_path / "f", named, quantization=PER_HEAD))
    assert "(inf) is not a scale" in " ".join((*report.suspicious, *report.problems))
