"""Names of scale tensors in every spelling, and the attention they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.errors import ModelError
from fp8calib.formats.kv.parse_names import (
    ScaleName,
    find_owners,
    parse_name,
)
from fp8calib.model.shapes import Attention, ModelGeometry
from tests.formats.handmade import make_attention, make_geometry


def _geometry(module: str, checkpoint_module: str | None = None) -> ModelGeometry:
    """Describe two layers; `{}` stands for the index."""
    spelling = checkpoint_module or module
    return make_geometry(
        [
            make_attention(i, module=module.format(i), checkpoint_module=spelling.format(i))
            for i in range(2)
        ]
    )


def _find(geometry: ModelGeometry, *names: str) -> dict[ScaleName, Attention]:
    parsed = [scale for name in names if (scale := parse_name(name)) is not None]
    assert len(parsed) == len(names)
    return find_owners(Path("scales"), geometry, parsed)


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.layers.0.self_attn.k_scale",
        "transformer.h.0.attn.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "self_attn.k_scale",
    ],
)
def test_scales_that_all_lie_elsewhere_are_of_another_model(name: str) -> None:
    with pytest.raises(ModelError, match="of another model") as caught:
        _find(_geometry("model.layers.{}.self_attn"), name)
    assert caught.value.message.startswith(f"scales: {name} ")
    assert caught.value.hint == "this model's attention is model.layers.0.self_attn"


def test_two_containers_that_fit_alike_are_refused() -> None:
    names = ("one.model.layers.0.self_attn.k_scale", "two.model.layers.0.self_attn.k_scale")
    with pytest.raises(ModelError, match=r"under one\.model\.layers, two\.model\.layers"):
        _find(_geometry("model.layers.{}.self_attn"), *names)
