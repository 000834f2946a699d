"""Which numbers the ranks of a running vLLM get from a table of scales, and what then is held."""

from __future__ import annotations

from collections.abc import Sequence

from fp8calib.engines.replay.verdicts import EngineReport, HeldScale, LayerVerdict, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.errors import ModelError, format_ranges, shorten
from fp8calib.formats.convert import convert_table
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import KV_ROLES, Attention, Role
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ
from fp8calib.plugins.vllm.live_scales import FP8_CACHES
from fp8calib.plugins.vllm.rank_answer import RankAnswer, Slot


def plan_refit(answers: Sequence[RankAnswer], table: ScaleTable) -> dict[Slot, float]:
    """Choose one number for each layer and role, the same on all ranks.

    A q without a scale gets 1.0, as when vLLM loads a checkpoint.

    Raises:
        ModelError: the scales are of another model, or the engine cannot use them.
    """
    attentions = {layer.index: attention for layer, attention in table.geometry.attentions()}
    _refuse_misfit(answers, attentions)
    fmt = E4M3FNUZ if answers[0].is_fnuz else E4M3FN
    scales = convert_table(table, fmt=fmt, per_head=False).scales
    return {
        (index, role): float(scales[site].values[0]) if site in scales else 1.0
        for index, attention in attentions.items()
        for role in (*KV_ROLES, Role.Q)
        for site in (attention.site(role),)
    }


def expect_refit(numbers: dict[Slot, float]) -> EngineReport:
    """Report what a refitted engine holds, for `compare_ranks`."""
    why = "written to all ranks"
    verdicts = {
        slot: LoadVerdict(status=Status.USED, value=number, why=why)
        for slot, number in numbers.items()
    }
    layers = (
        LayerVerdict(layer=layer, k=verdicts[layer, Role.K], v=verdicts[layer, Role.V])
        for layer in dict.fromkeys(layer for layer, _ in numbers)
    )
    held = {slot: HeldScale(numbers=(number,)) for slot, number in numbers.items()}
    return EngineReport(layers=tuple(layers), held=held)


def _refuse_misfit(answers: Sequence[RankAnswer], attentions: dict[int, Attention]) -> None:
    layers = [layer for answer in answers for layer in answer.layers]
    live = {layer.index for layer in layers}
    if live != attentions.keys():
        own, other = (format_ranges(sorted(each)) or "none" for each in (attentions, live))
        raise ModelError(
            f"these are scales of another model: they are for the layers {own}, and the engine "
            f"has the layers {other}",
            hint="pass the statistics or the checkpoint of the model that it serves",
        )
    latent = sorted(index for index, each in attentions.items() if each.kind == "latent")
    if latent:
        raise ModelError(
            f"layers {format_ranges(latent)}: vLLM caches latents, which have no scale per layer"
        )
    if plain := [layer for layer in layers if layer.cache_dtype not in FP8_CACHES]:
        indices = format_ranges(sorted({layer.index for layer in plain}))
        raise ModelError(
            f"layers {indices}: the KV cache is not FP8 with a scale per layer (kv_cache_dtype is "
            f"{shorten(plain[0].cache_dtype)})",
            hint="start the engine with kv_cache_dtype='fp8'",
        )
    captured = [layer for layer in layers if "float" in layer.list_read(Role.K)]
    if answers[0].has_graphs and captured:
        raise ModelError(
            f"{shorten(captured[0].backend)} reads the host float, and CUDA graphs keep the one of "
            "their capture",
            hint="start the engine with enforce_eager=True",
        )
