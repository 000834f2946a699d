"""What vLLM 0.32.0 does with KV scales on a CPU (`v1/attention/backends/cpu_attn.py`, run)."""

from __future__ import annotations

from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.load_context import match_to_layers
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.vllm.replay import replay_vllm
from fp8calib.model.shapes import ModelGeometry, Role
from fp8calib.model.tensor_parallel import rank_range

_LARGEST = "{}: on a CPU the largest of a layer's scales serves all heads of a rank"
_LARGEST_FIX = "write a kv-overlay, with one scale per layer"


def replay_cpu(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay loading on CPUs: the largest per-head scale of a layer's heads on a rank serves all.

    Raises:
        Refusal: vLLM does not start.
    """
    stored = match_to_layers(
        geometry, (each for held in folder.scales.values() for each in held.values())
    )
    heads = {layer.index: attention.num_kv_heads for layer, attention in geometry.attentions()}
    report = replay_vllm(folder, geometry, tp, VLLM_RUN, on_gpus=False)

    def judge(one: LoadVerdict, index: int, role: Role) -> LoadVerdict:
        scale = stored.get((index, role))
        if scale is None or scale.numel == 1:
            return one
        ranks = (rank_range(heads[index], tp, rank) for rank in range(tp))
        if all(len(set(scale.values[rank.start : rank.stop])) == 1 for rank in ranks):
            return one
        return one.misread(_LARGEST.format(scale), _LARGEST_FIX)

    layers = (
        LayerVerdict(
            layer=layer.layer,
            k=judge(layer.k, layer.layer, Role.K),
            v=judge(layer.v, layer.layer, Role.V),
        )
        for layer in report.layers
    )
    return report.model_copy(update={"layers": tuple(layers)})
