"""Find the linears of vision and audio towers, and of the projectors behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel

from fp8calib.geometry.model_geometry import Linear, Part
from fp8calib.model.topology.find import find_text_decoder
from fp8calib.model.topology.search import is_linear, linear_features


def list_tower_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """List the modules outside the text decoder and the lm_head, by their paths."""
    inside = set(find_text_decoder(model)[1].modules())
    if (head := model.get_output_embeddings()) is not None:
        inside |= set(head.modules())
    return ((name, module) for name, module in model.named_modules() if module not in inside)


def find_towers(model: PreTrainedModel, checkpoint_names: Mapping[str, str]) -> tuple[Linear, ...]:
    """Describe the linears outside the text decoder and the lm_head.

    `checkpoint_names`: parameter -> name of its tensor, if it is one whole tensor.
    """
    return tuple(
        _describe(name, module, checkpoint_names)
        for name, module in list_tower_modules(model)
        if is_linear(module)
    )


def _describe(path: str, module: nn.Module, checkpoint_names: Mapping[str, str]) -> Linear:
    in_features, out_features = linear_features(module)
    root, _, name = path.rpartition(".")
    return Linear(
        module=path,
        section="other",
        root=root,
        in_features=in_features,
        out_features=out_features,
        shard="replicated",
        parts=(Part(name=name, count=out_features, unit=1, per_group=1),),
        weight_name=f"{path}.weight",
        checkpoint_name=checkpoint_names.get(f"{path}.weight"),
    )
