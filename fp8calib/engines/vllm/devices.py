"""What vLLM does with KV scales on CPUs, TPUs and Gaudi, beside what it does on a GPU.

The CPU backend is that of vLLM 0.32.0 (`v1/attention/backends/cpu_attn.py`, run). The plugins were
read in tpu-inference b8692ff (`tpu_inference/layers/vllm/`, `models/common/model_loader.py`) and
vllm-gaudi 091bbad (`vllm_gaudi/ops/hpu_compressed_tensors.py`). All run vLLM's own loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8calib.engines.replay.folder import ScaleFolder, StoredScale
from fp8calib.engines.replay.kv_cache_method import require_scalar
from fp8calib.engines.replay.load_context import match_to_layers
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.releases import VLLM_0_32
from fp8calib.engines.vllm.replay import replay_vllm
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import KV_ROLES, Role
from fp8calib.geometry.tensor_parallel import rank_range

_COMPRESSED = "compressed-tensors"
_TPU_METHODS = (_COMPRESSED, "awq", "fp8", "mxfp4", "modelopt_fp4", "deepseek_v4_fp8")
_GAUDI_METHODS = (_COMPRESSED, "fp8", "inc", "awq_hpu", "gptq_hpu", "modelopt", "gpt_oss_mxfp4")
_JAX_CLASSES = (
    *("LlamaForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    *("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"),
    *("DeepseekV3ForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
)
"""The classes that tpu-inference has in JAX too, and prefers; their KV scales are constants."""
_JAX = (
    "without MODEL_IMPL_TYPE=vllm in the environment it runs its own {} in JAX, whose KV scales "
    "are 1.0"
)
_IGNORED = "`ignore` matches the attention layer {}, which then has no scales, so it uses 1.0"
_IGNORED_FIX = "write the overlay again: its `ignore` matches no attention layer"
_OTHER_METHOD = (
    "only compressed-tensors' method passes KV scales to the kernels here, so it uses 1.0"
)
_OTHER_FIX = "write a kv-overlay, with one scale per layer"
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
"""Model types with latent attention whose loader in vLLM calls `maybe_remap_kv_scale_name`, which
the plugin replaces."""
_RESCALED = (
    "on Gaudi2, whose largest FP8 value is 240, scales are multiplied by 448/240: the range stays "
    "as calibrated"
)
_NO_HEADS = "what its kernels do with a scale per head was not read"

_LARGEST = "{}: on a CPU the largest of a layer's scales serves all heads of a rank"
_LARGEST_FIX = "write a kv-overlay, with one scale per layer"

_Judge = Callable[[LayerVerdict, Attention], LayerVerdict]


def replay_cpu(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay loading on CPUs: the largest per-head scale of a layer's heads on a rank serves all.

    Raises:
        Refusal: vLLM does not start.
    """
    stored = match_to_layers(
        geometry, (each for held in folder.scales.values() for each in held.values())
    )
    heads = {layer.index: attention.num_kv_heads for layer, attention in geometry.attentions()}
    report = replay_vllm(folder, geometry, tp, VLLM_0_32, on_gpus=False)

    def judge(one: LoadVerdict, index: int, role: Role) -> LoadVerdict:
        scale = stored.get((index, role))
        if one.status is not Status.USED or scale is None or _fits_ranks(scale, heads[index], tp):
            return one
        fault = {"status": Status.MISREAD, "why": _LARGEST.format(scale), "fix": _LARGEST_FIX}
        return one.model_copy(update=fault)

    layers = (
        LayerVerdict(
            layer=layer.layer,
            k=judge(layer.k, layer.layer, Role.K),
            v=judge(layer.v, layer.layer, Role.V),
        )
        for layer in report.layers
    )
    return report.model_copy(update={"layers": tuple(layers)})


def _fits_ranks(scale: StoredScale, num_heads: int, tp: int) -> bool:
    """Check that the heads of each rank have one scale."""
    if scale.numel == 1:
        return True
    ranks = (rank_range(num_heads, tp, rank) for rank in range(tp))
    return all(len(set(scale.values[heads.start : heads.stop])) == 1 for heads in ranks)


def replay_tpu(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay loading with `MODEL_IMPL_TYPE=vllm`.

    Raises:
        Refusal: vLLM does not start.
    """
    quantization = _require_method(folder, _TPU_METHODS)
    ignored = quantization.get("ignore")
    targets = ignored if isinstance(ignored, list) else []

    def judge(layer: LayerVerdict, attention: Attention) -> LayerVerdict:
        path = f"{attention.checkpoint_module}.attn"
        if any(matches_target(target, path) for target in targets):
            return _drop(layer, why=_IGNORED.format(path), fix=_IGNORED_FIX)
        return layer

    report = _replay(folder, geometry, tp, quantization, judge)
    named = folder.config.get("architectures")
    for name in named if isinstance(named, list) else []:
        if name in _JAX_CLASSES:
            report = report.add_problems(_JAX.format(name))
    return report


def replay_gaudi(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay loading with `--kv-cache-dtype fp8_inc`, without INC's measurements.

    Raises:
        Refusal: vLLM does not start.
    """
    quantization = _require_method(folder, _GAUDI_METHODS)
    scheme = quantization.get("kv_cache_scheme")
    per_head = isinstance(scheme, Mapping) and scheme.get("strategy") == "attn_head"
    scales = {name: each for held in folder.scales.values() for name, each in held.items()}

    def judge(layer: LayerVerdict, attention: Attention) -> LayerVerdict:
        if per_head:
            return _drop(layer, why=_NO_HEADS, fix=_OTHER_FIX, value=None)
        if attention.kind == "latent" and geometry.model_type in _LATENT_TYPES:
            return _judge_latent(layer, attention, scales)
        return layer

    return _replay(folder, geometry, tp, quantization, judge).add_problems(_RESCALED)


def _judge_latent(
    layer: LayerVerdict, attention: Attention, scales: Mapping[str, StoredScale]
) -> LayerVerdict:
    """Judge the scales of latents, for which the larger of the two is used."""
    stored = [scales.get(f"{attention.checkpoint_module}.{role}_scale") for role in KV_ROLES]
    numbers = [require_scalar(each, "vLLM") for each in stored if each is not None]
    if len(numbers) < len(stored):
        return layer
    one = judge_number(max(numbers), "the larger of k_scale and v_scale is for the latents")
    return LayerVerdict(layer=layer.layer, k=one, v=one)


def _require_method(folder: ScaleFolder, methods: tuple[str, ...]) -> Mapping[str, object]:
    """Find the quantization config.

    Raises:
        Refusal: the plugin does not support its method.
    """
    keys = ("quantization_config", "modelopt", "text_config.quantization_config")
    quantization = find_quantization(folder, keys=keys) or {}
    is_own_file = "quantization" in quantization
    method = quantization.get("quant_method") or ("modelopt" if is_own_file else "")
    if method and method not in methods:
        why = f"quant_method {method!a:.40} is not supported here (NotImplementedError)"
        raise Refusal(why, fix=_OTHER_FIX)
    return quantization


def _replay(
    folder: ScaleFolder,
    geometry: ModelGeometry,
    tp: int,
    quantization: Mapping[str, object],
    judge: _Judge,
) -> EngineReport:
    """Replay vLLM's loading, and judge its verdicts on compressed-tensors' scales again."""
    report = replay_vllm(folder, geometry, tp, VLLM_0_32, on_gpus=False)
    attentions = {layer.index: attention for layer, attention in geometry.attentions()}
    is_compressed = quantization.get("quant_method") == _COMPRESSED
    layers = (
        judge(layer, attentions[layer.layer])
        if is_compressed
        else _drop(layer, why=_OTHER_METHOD, fix=_OTHER_FIX)
        for layer in report.layers
    )
    return report.model_copy(update={"layers": tuple(layers)})


def _drop(layer: LayerVerdict, *, why: str, fix: str, value: float | None = 1.0) -> LayerVerdict:
    """Judge the scales as dropped that vLLM loads on a GPU."""
    dropped = LoadVerdict(status=Status.DROPPED, value=value, why=why, fix=fix)
    k, v = (
        dropped if one.status in (Status.USED, Status.MISREAD) else one
        for one in (layer.k, layer.v)
    )
    return LayerVerdict(layer=layer.layer, k=k, v=v)
