"""What transformers 5.23 with compressed-tensors 0.20 does with the KV scales of a folder.

Tried on tiny models: only `quant_method: compressed-tensors` gives attention modules scales. They
have the names of the modules, shape [1] or [heads, 1, 1], and the dtype of the model. Any other
scale is reported as unexpected; a missing one is uninitialised memory (`initialize_qparams`:
torch.empty).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.replay.folder import ScaleFolder, StoredScale
from fp8calib.engines.replay.load_context import LoadContext, Slot, find_indexed, require_readable
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.query_scales import note_unread
from fp8calib.engines.replay.recorded_dtype import amend_for_dtype
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Status,
    is_scale,
    judge_number,
)
from fp8calib.engines.transformers.quantization_config import (
    CONFIG_FIX,
    CacheScheme,
    choose_experts_group,
    read_cache_scheme,
)
from fp8calib.errors import shorten
from fp8calib.geometry.expert_layouts import find_layout
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.module_paths import split_expert
from fp8calib.geometry.sites import Role

_UNEXPECTED_TYPES = (
    *("bloom", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "persimmon"),
)
"""Model types whose attention compressed-tensors does not recognise (tried on 5.23): it requires a
k_proj, v_proj, qkv_proj or kv_b_proj, and past_key_values among the arguments."""
_UNCOUNTED_TYPES = ("biogpt", "blt", "hrm_text", "modernbert-decoder", "opt", "xglm")
"""Model types whose config class has no num_key_value_heads, which compressed-tensors reads
(`utils/helpers.py`, get_num_kv_heads; tried on 5.23, some only as far as the config class)."""
_STRATEGIES = ("tensor", "attn_head")
_REBUILT_TYPES = ("llama4_text",)
"""Model types whose experts transformers 5.23 replaces under compressed-tensors, without loading
their weights (`quantizers/base.py`, MODULES_TO_PATCH_FOR_QUANTIZATION; run)."""
_REBUILT = (
    "the experts are replaced under compressed-tensors and their weights reported MISSING: they "
    "are random numbers"
)
_CONFIG_VALUES = {"activation_scheme": ("dynamic", "static"), "scale_fmt": ("float", "ue8m0")}
"""Keys of the `fp8` method that are checked (`utils/quantization_config.py`, FineGrainedFP8Config
of 5.23; run)."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_UNSET = "the scale is MISSING, and the parameter holds uninitialised memory"


def replay_transformers(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay `from_pretrained` with `dtype="auto"`.

    Raises:
        Refusal: loading fails.
    """
    del tp  # it runs in one process
    context = LoadContext(folder, geometry, _find_files(folder))
    quantization = find_quantization(folder, keys=("quantization_config",)) or {}
    if quantization.get("quant_method") == "quark":
        raise Refusal("a Quark checkpoint needs AMD's Quark package (ImportError)", fix=CONFIG_FIX)
    _check_config(quantization)
    scheme = _find_scheme(quantization, folder, geometry)
    if SINGLE_FILE_NAME in folder.files and folder.has_index:
        context.problems.append(f"transformers reads {SINGLE_FILE_NAME} and ignores {INDEX_NAME}")
    layers = [
        _judge(context, layer.index, attention, scheme)
        for layer, attention in geometry.attentions()
    ]
    note_unread(context, "reported as unexpected")
    experts = _judge_experts(quantization, folder, geometry)
    report = context.report(layers).model_copy(update={"weights": experts})
    return amend_for_dtype(report, folder, fnuz=_FNUZ, e5m2=_E5M2)


def _check_config(quantization: Mapping[str, object]) -> None:
    """Check what any method requires (transformers 5.23 quantizers/auto.py, run), and `fp8`.

    Raises:
        Refusal: loading fails.
    """
    is_loading = quantization.get("load_in_8bit") or quantization.get("load_in_4bit")
    if quantization and quantization.get("quant_method") is None and not is_loading:
        why = "the quantization_config has no quant_method (ValueError)"
        raise Refusal(why, fix="add the quant_method, or remove the quantization_config")
    for key, known in _CONFIG_VALUES.items():
        value = quantization.get(key, known[0])
        if quantization.get("quant_method") == "fp8" and str(value).lower() not in known:
            why = f"{key} is {value!a:.40} (ValueError or AttributeError)"
            raise Refusal(why, fix=f"set it to one of {', '.join(known)}")


def _judge_experts(
    quantization: Mapping[str, object], folder: ScaleFolder, geometry: ModelGeometry
) -> LoadVerdict | None:
    is_rebuilt = geometry.model_type in _REBUILT_TYPES
    is_compressed = quantization.get("quant_method") == "compressed-tensors"
    if is_compressed and is_rebuilt and _has_stacked_experts(folder):
        return LoadVerdict(status=Status.MISREAD, why=_REBUILT, fix="serve it with vLLM or SGLang")
    return None


def _has_stacked_experts(folder: ScaleFolder) -> bool:
    """Check whether the experts of a layer are stored as one tensor, which is not loaded."""
    names = (name for stored in folder.tensors.values() for name in stored)
    return any(name.endswith(".experts.gate_up_proj") for name in names)


_FNUZ = "compressed-tensors quantizes to e4m3fn, for which the scale is twice too large"
_E5M2 = "compressed-tensors quantizes to e4m3fn with a scale that was made for e5m2"


def _find_files(folder: ScaleFolder) -> list[str]:
    """Find the files as `modeling_utils.py` does: model.safetensors before an index."""
    if SINGLE_FILE_NAME in folder.files:
        files = [SINGLE_FILE_NAME]
    elif folder.has_index:
        files = find_indexed(folder, error="OSError")
    else:
        why = f"no file named {SINGLE_FILE_NAME} and no {INDEX_NAME} (OSError)"
        raise Refusal(why, fix="rename the weights file, or write an index")
    require_readable(folder, files)
    return files


def _find_scheme(
    quantization: Mapping[str, object], folder: ScaleFolder, geometry: ModelGeometry
) -> CacheScheme | None:
    """Find the scheme that gives attention modules scales; None where they have none.

    Raises:
        Refusal: loading fails.
    """
    if quantization.get("quant_method") != "compressed-tensors":
        return None
    scheme = read_cache_scheme(quantization)
    has_experts = any(linear.num_experts for _, linear in geometry.linears())
    if not quantization.get("config_groups") and has_experts:
        why = "empty config_groups on a model with experts: IndexError in get_experts_scheme"
        raise Refusal(why, fix='add a group that matches nothing: "targets": ["re:^no-module$"]')
    _check_experts_group(quantization, folder)
    if scheme is None or geometry.model_type in _UNEXPECTED_TYPES:
        return None
    if geometry.model_type in _UNCOUNTED_TYPES and "num_key_value_heads" not in folder.config:
        why = f"the config of {geometry.model_type} has no num_key_value_heads (ValueError)"
        raise Refusal(why, fix="serve it with vLLM")
    if scheme.dynamic is True:
        return None
    if scheme.granularity not in _STRATEGIES:
        why = f"static scales per {scheme.granularity} of keys and values (TypeError)"
        raise Refusal(f"kv_cache_scheme: {why}", fix=CONFIG_FIX)
    return scheme


def _check_experts_group(quantization: Mapping[str, object], folder: ScaleFolder) -> None:
    """Check the group by which experts, of 16 bits too, are dequantized before they are joined.

    transformers 5.23 integrations/compressed_tensors.py (CompressedTensorsDequantize), run.

    Raises:
        Refusal: it has no weights.
    """
    group = choose_experts_group(quantization.get("config_groups"))
    _, layout, _ = find_layout(folder.config)
    is_joined = layout is None or (layout.is_split_in_transformers and not layout.is_rebuilt)
    names = (name for stored in folder.tensors.values() for name in stored)
    expert = next((name for name in names if split_expert(name) is not None), None)
    if group and not isinstance(group.get("weights"), dict) and is_joined and expert:
        why = f"{shorten(expert)} belongs to a config group without weights (AttributeError)"
        raise Refusal(why, fix="write config_groups as kv-overlay does")


def _judge(
    context: LoadContext, index: int, attention: Attention, scheme: CacheScheme | None
) -> LayerVerdict:
    if attention.producer is not None and scheme is not None:
        context.problems.append(
            "scales of layers that read another layer's cache are reported as unexpected: the "
            "layer that writes the cache quantizes it"
        )
        index_of_cache, owner = attention.producer, context.geometry.layers[attention.producer]
        theirs = owner.attention or attention
        k, v = (_judge_role(context, (index_of_cache, r), theirs, scheme) for r in (Role.K, Role.V))
    else:
        k, v = (_judge_role(context, (index, r), attention, scheme) for r in (Role.K, Role.V))
    return LayerVerdict(layer=index, k=k, v=v)


def _judge_role(
    context: LoadContext, slot: Slot, attention: Attention, scheme: CacheScheme | None
) -> LoadVerdict:
    if scheme is None:
        why = "reported as unexpected, and the cache is not quantized"
        verdict = context.judge_absent(slot, why=why, fix=CONFIG_FIX)
        return verdict.model_copy(update={"value": None})
    stored = _find_stored(context, attention, f"{slot[1]}_scale")
    if stored is None:
        verdict = context.judge_absent(slot, value=None, why=_UNSET, fix=CONFIG_FIX)
        why = verdict.why if _UNSET in verdict.why else f"{verdict.why}; {_UNSET}"
        return verdict.model_copy(update={"why": why})
    if not scheme.symmetric and not _has_zero_point(context, attention, slot[1]):
        why = f"{stored}: the scheme is asymmetric, and the zero point is MISSING"
        return LoadVerdict(status=Status.MISREAD, why=f"{why} (uninitialised)", fix=CONFIG_FIX)
    _check_dtype(context, stored)
    _check_shape(stored, attention, per_head=scheme.granularity == "attn_head")
    if not scheme.is_fp8:
        why = f"{stored}: kv_cache_scheme is not FP8"
        misread = {"status": Status.MISREAD, "why": why, "fix": CONFIG_FIX}
        return _judge_rounded(context, stored).model_copy(update=misread)
    return _judge_rounded(context, stored)


def _has_zero_point(context: LoadContext, attention: Attention, role: Role) -> bool:
    return _find_stored(context, attention, f"{role}_zero_point") is not None


def _find_stored(context: LoadContext, attention: Attention, leaf: str) -> StoredScale | None:
    """Find a tensor by its name, or by that without the model's root, which transformers adds.

    transformers 5.23 core_model_loading.py (rename_source_key), run.
    """
    rootless = attention.module.partition(".")[2]
    paths = (attention.checkpoint_module, rootless)
    found = (context.scales.get(f"{path}.{leaf}") for path in paths)
    return next((stored for stored in found if stored is not None), None)


def _check_dtype(context: LoadContext, stored: StoredScale) -> None:
    dtype = context.folder.tensors[stored.file][stored.name].dtype
    if not dtype.startswith(("F", "BF")):
        why = f"{stored} is stored as {dtype}, which is kept: the first forward pass fails"
        raise Refusal(f"{why} (RuntimeError)", fix="store it as a float")


def _check_shape(stored: StoredScale, attention: Attention, *, per_head: bool) -> None:
    heads = attention.num_kv_heads
    if attention.kind == "latent" and per_head:
        raise Refusal("attn_head scales of latent attention: RuntimeError", fix=CONFIG_FIX)
    wanted = (heads, 1, 1) if per_head else (1,)
    if stored.shape != wanted:
        why = f"{stored} has shape {list(stored.shape)}, the parameter {list(wanted)}: RuntimeError"
        raise Refusal(why, fix=f"store it in shape {list(wanted)}")


def _judge_rounded(context: LoadContext, stored: StoredScale) -> LoadVerdict:
    dtype = _DTYPES.get(context.geometry.checkpoint_dtype, torch.float32)
    values = torch.tensor(stored.values).to(dtype).float().tolist()
    if dtype is not torch.float32:
        context.problems.append(
            f"scales are rounded to the model's {context.geometry.checkpoint_dtype}"
        )
    bad = [value for value in values if not is_scale(value)]
    source = str(stored) if len(values) == 1 else f"the largest of {len(values)} heads, {stored}"
    return judge_number(bad[0] if bad else max(values), source)
