"""Verdicts on KV scales for vLLM and SGLang, where the model or the number of ranks counts.

What vLLM itself answered for a plain Llama is in `test_vllm_goldens.py`. What SGLang does was read
in its `kv_cache.py`, its remapping, and its models' loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.shapes import ModelGeometry
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    QUARK,
    Numbers,
    ask,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
    statuses,
    values,
)
from tests.formats.handmade import (
    latent_stats,
    make_geometry,
)

NAN, INF = float("nan"), float("inf")
PAIR = ("k_scale", "v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
OUTPUTS = ("k_proj.output_scale", "v_proj.output_scale")
INNER = ("attn.k_scale", "attn.v_scale")
HYV3 = ("k_cache.scale", "v_cache.scale")
GPT2, NEOX = "transformer.h.{}.attn", "gpt_neox.layers.{}.attention"
ATTENTION, MIXER = "model.layers.0.self_attn", "backbone.layers.{}.mixer"
LINEARS = spell("k_proj.weight", "v_proj.weight", "o_proj.weight", value=[[1.0]])
NORMS = spell("q_norm.weight", value=[1.0]) | {"lm_head.weight": [[1.0]]}
EXCLUDING_QUARK = {
    **QUARK,
    "exclude": [name.removesuffix(".weight") for name in spell("o_proj.weight", "q_norm.weight")],
}
GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
QUANTIZED = {**PER_TENSOR, "ignore": [], "config_groups": {"group_0": GROUP}}
NO_SCHEME = {**PER_TENSOR, "kv_cache_scheme": None}
FNUZ = {"kv_cache_torch_dtype": "float8_e4m3fnuz"}
E5M2 = {"kv_cache_torch_dtype": "float8_e5m2"}


def of(model_type: str, architecture: str = "", **changes: Any) -> ModelGeometry:
    named = {"architecture": architecture} if architecture else {}
    return plain_geometry(model_type=model_type, **named, **changes)


def latent(model_type: str = "deepseek_v2") -> ModelGeometry:
    attention = latent_stats().header.geometry.layers[0].attention
    assert attention is not None
    return make_geometry([attention], model_type=model_type)


def one(*suffixes: str, value: object = 0.25) -> Mapping[str, object]:
    """Spell the scales of a model of one layer."""
    return spell(*suffixes, value=value, layers=1)


def kv(k: float, v: float) -> Mapping[str, object]:
    return spell("k_scale", value=k) | spell("v_scale", value=v)


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, and what an engine does with k and v of every layer."""

    scales: Numbers
    quantization: object
    status: str | tuple[str, str]
    geometry: ModelGeometry | None = None
    """Of a plain Llama where None."""
    number: object = None
    """What k and v are served with; not compared where None."""
    why: str = ""
    tp: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint."""
        return save_folder(folder, self.scales, quantization=self.quantization, **self.config)

    def compare(self, engine: str, folder: Path) -> EngineReport:
        """Ask the engine, and compare what it says with what is wanted."""
        report = ask(engine, folder, self.geometry, tp=self.tp)
        wanted = (self.status,) * 2 if isinstance(self.status, str) else self.status
        assert set(statuses(report)) == {wanted}
        if self.number is not None:
            pair = self.number if isinstance(self.number, tuple) else (self.number,) * 2
            assert set(values(report)) == {pair}
        assert self.why in report.layers[0].k.why
        return report


def list_stray(model_type: str, quantization: object) -> dict[str, Case]:
    """List scales of weights that are not quantized, some of which Qwen3's loader ignores."""
    scales = spell(*PAIR) | LINEARS | NORMS
    refused = ["o_proj.output_scale", "k_proj.weight_scale", "q_norm.output_scale"]
    ignored = ["o_proj.weight_scale", "q_norm.input_scale"]
    if model_type == "llama":
        refused, ignored = [*refused, *ignored, "q_norm.weight_zero_point"], []
    return {
        name: Case(
            {**scales, f"{ATTENTION}.{name}": 1.0},
            quantization,
            "refused" if name in refused else "used",
            of(model_type),
            why=name if name in refused else "",
        )
        for name in (*refused, *ignored)
    }


NO_PLACE = "has no parameters for scales"
VLLM: dict[str, Case] = {
    "nothing": Case({}, None, "defaulted", number=1.0),
    **{
        f"no place in {name}": Case(spell(*PAIR), PER_TENSOR, "refused", of(name), why=NO_PLACE)
        for name in ("jamba", "lfm2", "lfm2_moe", "zamba2")
    },
    "no place for q": Case(spell("q_scale"), FP8, "refused", of("lfm2"), why=NO_PLACE),
    "no place and no scales": Case({}, PER_TENSOR, "defaulted", of("jamba"), number=1.0),
    "a root that is added": Case(
        spell(*PAIR, path=NEOX.partition(".")[2]),
        PER_TENSOR,
        "used",
        moved_geometry(NEOX, model_type="gpt_neox"),
    ),
    "a root that is added for Quark": Case(
        spell(*OUTPUTS, path=GPT2.partition(".")[2]),
        QUARK,
        "used",
        moved_geometry(GPT2, model_type="gpt2"),
    ),
    # gpt_oss renames q_proj before it looks for a parameter; others skip the name
    "q of gpt_oss": Case(spell(*PAIR, "q_proj.q_scale"), PER_TENSOR, "refused", of("gpt_oss")),
    "q of DeepSeek": Case(spell(*PAIR, "q_proj.q_scale"), PER_TENSOR, "used", of("deepseek_v2")),
    "a model that it does not run": Case(spell(*PAIR), PER_TENSOR, "refused", of("diffllama")),
    "an expert is no draft layer": Case(
        spell(*PAIR) | spell("experts.2.down_proj.k_scale", path="model.layers.{}.mlp"),
        PER_TENSOR,
        "refused",
        plain_geometry(num_draft_layers=1),
    ),
    "scales of weights": Case(
        spell(*PAIR) | LINEARS | spell("o_proj.weight_scale"), QUANTIZED, "used"
    ),
    "Quark where names come first": Case(
        spell(*OUTPUTS) | LINEARS, QUARK, "used", of("gemma2", "PaliGemmaForConditionalGeneration")
    ),
    "Quark where k_proj becomes qkv_proj first": Case(
        spell(*OUTPUTS) | LINEARS,
        FP8,
        "refused",
        of("llama", "VipLlavaForConditionalGeneration"),
        why="qkv_proj",
    ),
    "Falcon": Case(spell(*PAIR), PER_TENSOR, "used", of("falcon"), 0.25),
    **{
        f"Falcon under {quantization.get('quant_method')}, {index}": Case(
            spell(*PAIR), quantization, "dropped", of("falcon"), 1.0
        )
        for index, quantization in enumerate((FP8, MODELOPT, QUARK, NO_SCHEME))
    },
    **{
        f"bare latents of {name}": Case(one(*PAIR), None, "dropped", latent(name), 1.0)
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    },
    # ModelOpt's method attaches, but 0.32's DeepSeek maps every name to one that is not there
    "latents": Case(one(*PAIR), PER_TENSOR, "dropped", latent("deepseek_v3"), 1.0, "latent"),
    "latents of ModelOpt": Case(one(*PROJECTIONS), MODELOPT, "dropped", latent(), 1.0, "latent"),
    "expanded heads": Case(one(*PAIR), PER_TENSOR, "misread", latent("youtu"), 0.25),
    "expanded heads in FP8": Case(one(*PAIR), FP8, "misread", latent("minicpm3"), 0.25),
    "one head for two ranks": Case(spell(*PAIR, value=[0.25]), PER_HEAD, "refused", tp=2),
    "the inner name of gpt2": Case(
        spell(*PAIR, path=f"{GPT2}.attn"),
        PER_TENSOR,
        "used",
        moved_geometry(GPT2, model_type="gpt2"),
    ),
    "the attn of gptj": Case(
        spell(*PAIR, path=GPT2), PER_TENSOR, "dropped", moved_geometry(GPT2, model_type="gptj"), 1.0
    ),
    "awq": Case(spell(*PAIR), {"quant_method": "awq"}, "dropped"),
    "mxfp8": Case(spell(*PAIR), {"quant_method": "mxfp8"}, "used"),
    "an empty scheme": Case(spell(*PAIR), {"kv_cache_scheme": {}}, "refused"),
    "nothing ignored": Case(spell(*PAIR), {**FP8, "ignored_layers": None}, "used"),
    "blocks": Case(
        spell(*PAIR),
        {**FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "used",
    ),
    "fnuz in FP8": Case(
        spell(*PAIR), FP8, "misread", why="doubles it on AMD gfx94x", config=dict(FNUZ)
    ),
    "e5m2": Case(spell(*PAIR), PER_TENSOR, "misread", why="fp8_e5m2", config=dict(E5M2)),
    "a mixer": Case(
        spell(*PROJECTIONS, path=MIXER),
        MODELOPT,
        "used",
        moved_geometry(MIXER, model_type="nemotron_h"),
    ),
    **{
        f"{quantization['quant_method']}: {name} of {model_type}": case
        for quantization in (PER_TENSOR, EXCLUDING_QUARK)
        for model_type in ("llama", "qwen3_moe")
        for name, case in list_stray(model_type, quantization).items()
    },
}


@pytest.mark.parametrize("case", VLLM.values(), ids=VLLM)
def test_vllm(tmp_path: Path, case: Case) -> None:
    case.compare("vllm", case.save(tmp_path / "f"))


SGLANG: dict[str, Case] = {
    **{
        f"own names {index}": Case(spell(*suffixes), quantization, "used", number=0.25)
        for index, (quantization, suffixes) in enumerate(
            (
                *((PER_TENSOR, PAIR), (PER_TENSOR, ("kv_scale",)), (FP8, PAIR)),
                *((FP8, ("kv_scale",)), (MODELOPT, PROJECTIONS), (QUARK, OUTPUTS)),
                ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, PROJECTIONS),
            )
        )
    },
    "inner names": Case(spell(*INNER), PER_TENSOR, "dropped"),
    "inner names where none is remapped": Case(spell(*INNER), PER_TENSOR, "used", of("mixtral")),
    **{
        f"{name}: {suffixes}": Case(spell(*suffixes), FP8, status, of(name))
        for name, suffixes, status in (
            *(("qwen3_5_text", PAIR, "used"), ("qwen3_5_text", PROJECTIONS, "used")),
            *(("qwen3_next", PAIR, "refused"), ("qwen3_next", PROJECTIONS, "used")),
            *(("phimoe", PAIR, "used"), ("phimoe", PROJECTIONS, "refused")),
            *(("cohere", (*PAIR, "q_scale"), "refused"), ("llama", (*PAIR, "q_scale"), "used")),
            *(("gemma3_text", HYV3, "refused"), ("mixtral", PROJECTIONS, "refused")),
            *(("gemma2", PROJECTIONS, "refused"), ("gemma3n_text", PROJECTIONS, "dropped")),
            *(("olmo", PAIR, "refused"), ("falcon_h1", PAIR, "refused")),
            *(("granite", ("kv_scale",), "dropped"), ("gemma", ("kv_scale",), "refused")),
            *(("beam", PAIR, "dropped"), ("qwen3", PAIR, "dropped"), ("gpt_oss", INNER, "dropped")),
            *(("glm4_moe", OUTPUTS, "dropped"), ("lfm2", PAIR, "dropped")),
        )
    },
    "ones of qwen3_next": Case(spell(*PAIR, value=1.0), FP8, "dropped", of("qwen3_next")),
    "drafts of qwen3_next": Case(
        {**spell(*PROJECTIONS), "mtp.layers.0.self_attn.k_scale": 0.5},
        FP8,
        "used",
        of("qwen3_next"),
    ),
    "bare": Case(spell(*PAIR), None, "dropped", number=1.0),
    **{
        f"{quantization['quant_method']}: {k}, {v}": Case(
            kv(k, v), quantization, status, number=numbers
        )
        for quantization in (PER_TENSOR, FP8)
        for k, v, status, numbers in (
            (0.5, 0.0, ("used", "misread"), (0.5, 0.5)),
            (0.0, 0.0, "defaulted", 1.0),
            (-0.5, 0.0, "defaulted", 1.0),
            (0.0, 0.5, "refused", None),
            (NAN, NAN, "refused", None),
            (INF, 0.5, ("bad", "used"), (None, 0.5)),
            (2.0**-127, 2.0**-126, ("bad", "used"), (2.0**-127, 2.0**-126)),
        )
    },
    "k alone": Case(spell("k_scale"), PER_TENSOR, ("used", "misread")),
    "v alone": Case(spell("v_scale"), PER_TENSOR, "refused"),
    "a scheme per head": Case(
        spell(*PAIR, value=[[[0.25]], [[0.5]]]), PER_HEAD, "dropped", number=1.0
    ),
    "shapes per head": Case(spell(*PAIR, value=[[[0.25]], [[0.5]]]), PER_TENSOR, "refused"),
    "latents": Case(one(*PAIR), PER_TENSOR, "dropped", latent()),
    "latents of one": Case(one(*PROJECTIONS, value=1.0), MODELOPT, "used", latent(), 1.0),
    "latents that are not multiplied back": Case(
        one(*PROJECTIONS), MODELOPT, "misread", latent(), 0.25, "multiply the logits by k_scale"
    ),
    "the name of gpt2": Case(
        spell(*PAIR, path=GPT2),
        PER_TENSOR,
        "refused",
        moved_geometry(GPT2, model_type="gpt2"),
        why="KeyError",
    ),
    "the inner name of gpt2": Case(
        spell(*PAIR, path=f"{GPT2}.attn"),
        PER_TENSOR,
        "used",
        moved_geometry(GPT2, model_type="gpt2"),
    ),
    "a method alone": Case(spell(*PAIR), {"quant_method": "modelopt"}, "refused"),
    "a scheme that is a number": Case(
        spell(*PAIR), {**PER_TENSOR, "kv_cache_scheme": 7}, "refused"
    ),
    "a number": Case(spell(*PAIR), 7, "refused"),
    "awq": Case(spell(*PAIR), {"quant_method": "awq"}, "dropped"),
    "no cache": Case(spell(*PAIR), {"quant_method": "modelopt", "quant_algo": "FP8"}, "dropped"),
    "fnuz": Case(spell(*PAIR), PER_TENSOR, "misread", config=dict(FNUZ)),
    "e5m2": Case(spell(*PAIR), PER_TENSOR, "misread", config=dict(E5M2)),
    "hunyuan": Case(spell(*HYV3), PER_TENSOR, "dropped"),
    "a mixer": Case(
        spell(*PROJECTIONS, path=MIXER),
        MODELOPT,
        "used",
        moved_geometry(MIXER, model_type="nemotron_h"),
    ),
    **{
        f"an export of {name} {architecture}": Case(
            spell(*PAIR),
            PER_TENSOR,
            status,
            of(name, architecture),
            why="KeyError" if status == "refused" else "",
        )
        for name, status, architecture in (
            ("llama4_text", "dropped", "Llama4ForConditionalGeneration"),
            ("gemma3n_text", "used", "Gemma3nForConditionalGeneration"),
            ("qwen2", "refused", "Qwen2AudioForConditionalGeneration"),
            ("qwen2_vl_text", "refused", "Qwen2VLForConditionalGeneration"),
            ("llama", "used", "LlavaForConditionalGeneration"),
            *((each, "used", "") for each in ("mistral", "exaone4", "phi3", "gemma2", "gemma3")),
            *((each, "dropped", "") for each in ("qwen2", "mixtral", "qwen3_moe", "opt")),
            *((each, "refused", "") for each in ("gemma", "granite", "olmo2", "stablelm", "gpt2")),
        )
    },
}


@pytest.mark.parametrize("case", SGLANG.values(), ids=SGLANG)
def test_sglang(tmp_path: Path, case: Case) -> None:
    """All loaders of the wheel are run on names by `tests/real_engines/test_sglang_releases.py`."""
    report = case.compare("sglang", case.save(tmp_path / "f"))
    if case.status == "dropped":
        assert all(layer.k.fix and layer.v.fix for layer in report.layers)


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
    scales = kv(0.0123456, 0.5)
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)
    exact = save_folder(tmp_path / "g", scales, quantization=PER_TENSOR)

    report = ask("vllm", folder, geometry)

    assert report.ok
    assert values(report) == [(held, 0.5)] * 2
    assert any("are rounded to" in problem for problem in report.problems)
    is_half = (model_type, dtype) == ("llama", "float16")
    assert any("FlashAttention 3 stops" in problem for problem in report.problems) is is_half
    assert "FlashAttention 3 stops" not in str(ask("vllm-cpu", folder, geometry).problems)
    assert values(ask("vllm", exact, geometry))[0][0] == pytest.approx(0.0123456, rel=1e-7)


@pytest.mark.parametrize(
    ("engine", "quantization", "names", "value", "words", "said"),
    [
        ("vllm", PER_TENSOR, PAIR, 0.25, "q_scale", "q_scale is loaded (2, such as model.layers"),
        ("vllm", PER_TENSOR, PAIR, -1.0, "q_scale", "is not a scale, but vLLM uses it"),
        ("vllm", PER_TENSOR, PAIR, NAN, "q_scale", "is not a scale, but vLLM uses it"),
        ("vllm", FP8, PAIR, 0.0, "q_scale", "vLLM uses 1.0"),
        ("vllm", FP8, PAIR, 0.25, "attn.prob_scale", "prob_scale is loaded"),
        ("vllm", PER_TENSOR, HYV3, 0.25, "q.scale", "q_scale is loaded"),
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
