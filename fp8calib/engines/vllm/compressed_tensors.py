"""What `CompressedTensorsKVCacheMethod` of vLLM makes of the loaded scales of a layer.

A scale that was not loaded is 1.0, and none is rounded: the parameters are fp32
(`quantization/compressed_tensors/compressed_tensors.py`; 0.32.0 run, 0.33.0 read).
"""

from __future__ import annotations

from fp8calib.engines.replay.folder import StoredScale
from fp8calib.engines.replay.kv_cache_method import require_scalar
from fp8calib.engines.replay.load_context import LoadContext, Slot
from fp8calib.engines.replay.verdicts import (
    LayerVerdict,
    LoadVerdict,
    Refusal,
    is_scale,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.weight_faults import NAMES_FIX
from fp8calib.model.shapes import Attention, Role

NO_PARAMETER = (
    "vLLM's model has no parameter of that name and ignores it without a warning, so it uses 1.0"
)


def judge_compressed_layer(
    context: LoadContext,
    index: int,
    loaded: dict[Slot, StoredScale],
    heads: Attention | None,
    tp: int,
) -> LayerVerdict:
    """Judge the k and v of a layer.

    Args:
        context: the checkpoint.
        index: the layer's.
        loaded: the scales that have found a parameter.
        heads: its attention where scales are per head, else None.
        tp: the number of ranks.

    Raises:
        Refusal: a scale's shape fits no parameter.
    """

    def judge(role: Role) -> LoadVerdict:
        stored = loaded.get((index, role))
        if stored is None:
            return _judge_unloaded(context, (index, role), loaded)
        if heads is not None:
            return _judge_heads(context, stored, heads.num_kv_heads, tp)
        return judge_number(require_scalar(stored, "vLLM"), str(stored))

    return LayerVerdict(layer=index, k=judge(Role.K), v=judge(Role.V))


def _judge_unloaded(
    context: LoadContext, slot: Slot, loaded: dict[Slot, StoredScale]
) -> LoadVerdict:
    k = loaded.get((slot[0], Role.K))
    if k is not None and k.name.endswith(".kv_scale"):
        why = (
            f"{k} becomes k_scale, and compressed-tensors' method does not copy it to v_scale, "
            "so it uses 1.0"
        )
        fix = "store it as k_scale and as v_scale"
        return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=fix)
    return context.judge_absent(slot, why=NO_PARAMETER, fix=NAMES_FIX)


def _judge_heads(context: LoadContext, stored: StoredScale, num_heads: int, tp: int) -> LoadVerdict:
    """Judge per-head scales: each rank takes its slice; one number is repeated on a single rank."""
    if stored.numel < num_heads and not (stored.numel == 1 and tp == 1):
        why = f"{stored} has shape {list(stored.shape)} for {num_heads} KV heads: RuntimeError"
        raise Refusal(why, fix=f"store [{num_heads}, 1, 1], or strategy tensor with one number")
    used = stored.values[:num_heads]
    bad = [value for value in used if not is_scale(value)]
    if bad:
        return judge_number(bad[0], str(stored))
    largest = max(used)
    if stored.numel > num_heads:
        why = f"{stored} has {stored.numel} numbers, of which vLLM uses the first {num_heads}"
        return LoadVerdict(
            status=Status.MISREAD, value=largest, why=why, fix="write one number per KV head"
        )
    if stored.numel < num_heads:
        context.problems.append("attn_head with one number per layer: it is used for all heads")
    return judge_number(largest, f"the largest of {stored.numel} heads, {stored}")
