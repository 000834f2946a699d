"""Names of vLLM's attention layers in vision towers: the keys of its file of scales.

Source: vLLM `model_executor/layers/attention/mm_encoder_attention.py` (`layer_name`), whose module
is `attn` in that of the projections, and `hf_to_vllm_mapper` of the classes in
`model_executor/models/qwen2_5_vl.py` and `qwen3_vl.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8calib.engines.facts.release import Release
from fp8calib.errors import ExportError

_TOWER = "visual"
_CLASSES = "vision tower in FP8 on CUDA"
_GPUS = "attention of a vision tower in FP8 on"


def name_vision_layers(
    modules: Iterable[str], architecture: str, release: Release
) -> dict[str, str]:
    """Name vLLM's layer of each attention module of a tower, by the module in the checkpoint.

    A module holds the projections of q, k and v: `model.visual.blocks.0.attn`.

    Raises:
        ExportError: the release does not run the tower in FP8, or a module is not in the tower.
    """
    if architecture not in release.list_values(_CLASSES):
        raise ExportError(
            f"{release.title} does not run the vision tower of {architecture} in FP8 on CUDA",
            hint="its classes: " + ", ".join(release.list_values(_CLASSES)),
        )
    return {module: _name_layer(module) for module in modules}


def list_vision_gpus(release: Release) -> tuple[str, ...]:
    """List the GPUs on which a release runs the attention of a vision tower in FP8."""
    return release.list_values(_GPUS)


def _name_layer(module: str) -> str:
    parts = module.split(".")
    if _TOWER not in parts:
        hint = "pass the modules that hold the projections, such as model.visual.blocks.0.attn"
        raise ExportError(f"{module} is not in {_TOWER}, the vision tower in vLLM", hint=hint)
    return ".".join([*parts[parts.index(_TOWER) :], "attn"])
