"""Engines whose source was read, and that were never run: one row each.

A row says which methods of quantization the engine starts with, whose KV scales reach its cache,
and what it multiplies by instead. The plugins of vLLM run vLLM's own loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch
from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.engine import VLLM
from fp8calib.engines.weights.weight_rule import MX_UNREAD, NameRules, Opened, WeightRule

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict
    from fp8calib.geometry.model_geometry import Attention, ModelGeometry

_COMPRESSED = "compressed-tensors"
_JAX_CLASSES = (
    *("LlamaForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    *("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"),
    *("DeepseekV3ForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
)
"""The classes that tpu-inference has in JAX too, and prefers (`models/common/model_loader.py`)."""
_CONSTANT_FIX = "serve it with vLLM or SGLang; here, serve a checkpoint without KV scales"
_OVERLAY_FIX = "write a kv-overlay, with one scale per layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """What an engine does with the KV scales of a checkpoint."""

    why: str
    """What it does with those that it does not use."""
    value: float | None = 1.0
    """What it multiplies by then; None where that depends on the GPU."""
    runs_vllm: bool = False
    """It loads as vLLM does, and uses the scales of compressed-tensors."""
    methods: tuple[str, ...] = ()
    """The methods that it starts with; empty for any."""
    splits_heads: bool = True
    """It uses a scale per head."""
    ignores_attention: bool = False
    """The list `ignore` may name the attention layer, which then has no scales."""
    judges_latents: bool = True
    """Whether what it does with scales of latents is known."""
    note: str = ""
    jax_classes: tuple[str, ...] = ()
    """Only models of these classes have the note."""


def replay_row(
    row: CacheRow, folder: ScaleFolder, geometry: ModelGeometry, tp: int
) -> EngineReport:
    """Say what an engine does with a folder by its row.

    Raises:
        Refusal: the engine does not start with the method.
    """
    from fp8calib.engines.replay.load_context import open_indexed  # noqa: PLC0415
    from fp8calib.engines.replay.quantization_config import find_quantization  # noqa: PLC0415
    from fp8calib.engines.replay.verdicts import EngineReport, Refusal  # noqa: PLC0415
    from fp8calib.engines.vllm.replay import replay_vllm  # noqa: PLC0415

    keys = ("quantization_config", "modelopt", "text_config.quantization_config")
    quantization = find_quantization(folder, keys=keys) or {}
    is_own_file = "quantization" in quantization
    method = quantization.get("quant_method") or ("modelopt" if is_own_file else "")
    if row.methods and method and method not in row.methods:
        why = f"quant_method {method!a:.40} is not supported here"
        raise Refusal(why, fix=_OVERLAY_FIX if row.runs_vllm else _CONSTANT_FIX)
    attentions = {layer.index: each for layer, each in geometry.attentions()}
    if not row.runs_vllm:
        context = open_indexed(folder, geometry, error="an error")
        layers = tuple(
            context.judge_absent_layer(index, why=row.why, fix=_CONSTANT_FIX)
            for index in attentions
        )
        report = EngineReport(layers=layers, problems=tuple(context.problems))
        return report.change(lambda one: one.model_copy(update={"value": row.value}))
    report = replay_vllm(folder, geometry, tp, VLLM_RUN, on_gpus=False)
    judged = (
        _judge_plugin(row, quantization, layer, attentions[layer.layer]) for layer in report.layers
    )
    report = report.model_copy(update={"layers": tuple(judged)})
    if geometry.has_latent_attention and not row.judges_latents:
        report = report.doubt("the plugin loads the scales of latents itself, which is not judged")
    named = folder.config.get("architectures")
    classes = set(row.jax_classes).intersection(named if isinstance(named, list) else ())
    is_noted = bool(row.note) and (bool(classes) or not row.jax_classes)
    return report.add_problems(row.note) if is_noted else report


def _judge_plugin(
    row: CacheRow, quantization: Mapping[str, object], layer: LayerVerdict, attention: Attention
) -> LayerVerdict:
    """Call scales dropped that vLLM uses on a GPU, and the plugin does not."""
    from fp8calib.engines.replay.module_targets import matches_target  # noqa: PLC0415

    scheme, ignored = quantization.get("kv_cache_scheme"), quantization.get("ignore")
    why, value = "", row.value
    if quantization.get("quant_method") != _COMPRESSED:
        why = row.why
    elif not row.splits_heads and isinstance(scheme, dict) and scheme.get("strategy") != "tensor":
        why, value = "what its kernels do with a scale per head was not read", None
    elif row.ignores_attention and isinstance(ignored, list):
        path = f"{attention.checkpoint_module}.attn"
        if any(matches_target(target, path) for target in ignored):
            why = f"`ignore` matches the attention layer {path}, which then has no scales"
    if not why:
        return layer
    used = (Status.USED, Status.MISREAD)
    dropped = {"status": Status.DROPPED, "value": value, "why": why, "fix": _OVERLAY_FIX}
    return layer.change(lambda one: one.model_copy(update=dropped) if one.status in used else one)


def _make_engine(row: CacheRow, engine: Engine) -> Engine:
    of_vllm = replace(
        engine, loads_like=VLLM.key, make_reader=VLLM.make_reader, name_rules=VLLM.name_rules
    )
    return replace(
        of_vllm if row.runs_vllm else engine,
        is_brief=True,
        no_numerics="its arithmetic has not been read",
        replay_folder=partial(replay_row, row),
        splits_heads=True,
        weight_rules=(*engine.weight_rules, MX_UNREAD),
    )


def _refuse(
    why: str, source: str, *dialects: str, schemes: tuple[str, ...] = (), has_experts: bool = False
) -> tuple[WeightRule, ...]:
    return tuple(
        WeightRule(
            dialect=dialect,
            schemes=schemes,
            has_experts=has_experts,
            status=Status.REFUSED,
            why=why,
            source=source,
        )
        for dialect in dialects
    )


_TPU = "tpu-inference b8692ff tpu_inference/layers/vllm/quantization"
VLLM_TPU = _make_engine(
    CacheRow(
        runs_vllm=True,
        why="only compressed-tensors' method passes KV scales to the kernels here, so it uses 1.0",
        methods=(_COMPRESSED, "awq", "fp8", "mxfp4", "modelopt_fp4", "deepseek_v4_fp8"),
        ignores_attention=True,
        jax_classes=_JAX_CLASSES,
        note="without MODEL_IMPL_TYPE=vllm it runs its own class in JAX, whose KV scales are 1.0",
    ),
    Engine(
        key="vllm-tpu",
        title="vLLM on TPU",
        version="b8692ff",
        launch=Launch(
            command="MODEL_IMPL_TYPE=vllm vllm serve",
            kv_flag="--kv-cache-dtype fp8",
            ranks_flag="--tensor-parallel-size",
        ),
        weight_rules=(
            *_refuse(
                "it has no scheme for weights alone (NotImplementedError)",
                f"{_TPU}/compressed_tensors/compressed_tensors.py get_scheme",
                _COMPRESSED,
                schemes=("w8a16",),
            ),
            *_refuse(
                "it loads FP8 experts of this method in blocks alone (NotImplementedError)",
                f"{_TPU}/fp8.py VllmFp8MoEMethod",
                "autofp8",
                schemes=("fp8-static", "fp8-dynamic"),
                has_experts=True,
            ),
            *_refuse(
                "it has no such quant_method (NotImplementedError)",
                f"{_TPU}/__init__.py get_tpu_quantization_config",
                *("modelopt", "quark"),
            ),
        ),
    ),
)
VLLM_GAUDI = _make_engine(
    CacheRow(
        runs_vllm=True,
        why="only compressed-tensors' method passes KV scales to the kernels here, so it uses 1.0",
        methods=(_COMPRESSED, "fp8", "inc", "awq_hpu", "gptq_hpu", "modelopt", "gpt_oss_mxfp4"),
        splits_heads=False,
        judges_latents=False,
        note="on Gaudi2, whose largest FP8 value is 240, scales are multiplied by 448/240: the "
        "range stays as calibrated",
    ),
    Engine(
        key="vllm-gaudi",
        title="vLLM on Gaudi",
        version="091bbad",
        launch=Launch(
            command="vllm serve",
            kv_flag="--kv-cache-dtype fp8_inc",
            ranks_flag="--tensor-parallel-size",
        ),
        weight_rules=(
            *_refuse(
                "it loads ModelOpt's FP8 weights only with one scale per tensor (ValueError)",
                "vllm-gaudi 091bbad vllm_gaudi/ops/hpu_modelopt.py HPUModelOptFp8Config",
                "modelopt",
                schemes=("fp8-dynamic", "fp8-block"),
            ),
            *_refuse(
                "it has no such quant_method",
                "vllm-gaudi 091bbad vllm_gaudi/platform.py supported_quantization",
                "quark",
            ),
        ),
    ),
)
_TENSORRT = "TensorRT-LLM 008e0af tensorrt_llm/_torch/model_config.py load_hf_quant_config"
_UNQUANTIZED = "it finds no algorithm in the config, and copies FP8 weights without their scales"
TENSORRT_LLM = _make_engine(
    CacheRow(why="TensorRT-LLM uses KV scales for an NVFP4 cache alone; for FP8, 1.0"),
    Engine(
        key="tensorrt-llm",
        title="TensorRT-LLM",
        version="008e0af",
        launch=Launch(
            command="trtllm-serve", kv_flag="--kv_cache_dtype fp8", ranks_flag="--tp_size"
        ),
        name_rules=NameRules(opened=Opened.ALL),
        weight_rules=(
            *_refuse(
                "of compressed-tensors it reads weights per channel with inputs per token, and "
                "blocks of 128, alone",
                "TensorRT-LLM 21156a7 tensorrt_llm/models/quant_config_utils.py "
                "_quant_config_from_config_group",
                _COMPRESSED,
                schemes=("fp8-static", "w8a16"),
            ),
            WeightRule(
                dialect="autofp8",
                schemes=("fp8-static",),
                status=Status.USED,
                why="it repeats the scale of a weight for every block, and quantizes inputs per "
                "group of 128; on several ranks a scale of shape [] is an IndexError",
                source=f"{_TENSORRT}; TensorRT-LLM 00bbf71 tensorrt_llm/_torch/modules/linear.py "
                "FP8BlockScalesLinearMethod",
            ),
            WeightRule(
                dialect="autofp8",
                schemes=("fp8-dynamic",),
                status=Status.MISREAD,
                why=_UNQUANTIZED,
                source=_TENSORRT,
            ),
            WeightRule(dialect="quark", status=Status.MISREAD, why=_UNQUANTIZED, source=_TENSORRT),
        ),
    ),
)
"""TensorRT-LLM's PyTorch backend, which Dynamo and NIM run too; its KV scales:
`_torch/modules/attention.py`, `_torch/attention_backend/trtllm.py`."""
_LMDEPLOY = "LMDeploy 1263d5c lmdeploy/pytorch/nn/linear/__init__.py build_linear"
LMDEPLOY = _make_engine(
    CacheRow(
        why="LMDeploy's FP8 cache uses 1.0, and its models have no parameter of that name",
        methods=("fp8",),
    ),
    Engine(
        key="lmdeploy",
        title="LMDeploy",
        version="0.16.0",
        launch=Launch(
            command="lmdeploy serve api_server --backend pytorch",
            kv_flag="--quant-policy fp8",
            ranks_flag="--tp",
        ),
        name_rules=NameRules(opened=Opened.SINGLE),
        weight_rules=(
            *_refuse(
                "of FP8 checkpoints it loads quant_method fp8 alone (TypeError)",
                "LMDeploy 1263d5c lmdeploy/pytorch/config.py QuantizationConfig.from_config",
                *(_COMPRESSED, "modelopt", "quark"),
            ),
            *_refuse(
                "it takes dynamic inputs for weights in blocks, and finds no weight_scale "
                "(KeyError)",
                _LMDEPLOY,
                "autofp8",
                schemes=("fp8-dynamic",),
            ),
            *_refuse(
                "it looks for per-tensor scales named weight_scale and input_scale (KeyError)",
                _LMDEPLOY,
                "finegrained",
            ),
        ),
    ),
)
"""LMDeploy with its PyTorch backend; its KV scales: `lmdeploy/pytorch/nn/attention.py`."""
_ATOM = "ATOM ffdf3bb atom/quant_spec.py GenericParser"
ATOM = _make_engine(
    CacheRow(
        why="ATOM makes the scales of its FP8 cache itself, and skips those of the checkpoint",
        value=None,
    ),
    Engine(
        key="atom",
        title="ATOM",
        version="ffdf3bb",
        launch=Launch(
            command="python -m atom.entrypoints.openai_server --model",
            kv_flag="--kv-cache-dtype fp8",
            ranks_flag="--tensor-parallel-size",
        ),
        weight_rules=tuple(
            WeightRule(dialect=dialect, schemes=schemes, status=Status.USED, why=why, source=source)
            for dialect, schemes, why, source in (
                (
                    _COMPRESSED,
                    ("fp8-static",),
                    "it leaves out the static input scales and quantizes inputs dynamically",
                    f"{_ATOM}.parse (is_dynamic)",
                ),
                (
                    _COMPRESSED,
                    ("w8a16",),
                    "it quantizes the inputs too",
                    f"{_ATOM}.parse (is_dynamic)",
                ),
                (
                    "modelopt",
                    (),
                    "it guesses the scheme from words in the config, which is not replayed",
                    f"{_ATOM}._infer_qtype",
                ),
            )
        ),
    ),
)
"""AMD's ATOM; its KV scales: `atom/model_ops/attention_mha.py`, `atom/model_loader/`."""
