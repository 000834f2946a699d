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


def _indices(owners: dict[ScaleName, Attention], geometry: ModelGeometry) -> dict[str, int]:
    layers = {attention.module: layer.index for layer, attention in geometry.attentions()}
    return {name.full: layers[attention.module] for name, attention in owners.items()}


@pytest.mark.parametrize(
    ("module", "checkpoint_module", "spelling"),
    [
        ("model.layers.{}.self_attn", None, "model.layers.{}.self_attn"),
        ("model.layers.{}.self_attn", None, "model.layers.{}.self_attn.attn"),
        ("model.layers.{}.self_attn", None, "layers.{}.self_attn"),
        ("model.layers.{}.self_attn", None, "language_model.model.layers.{}.self_attn"),
        ("model.layers.{}.self_attn", None, "thinker.model.layers.{}.self_attn"),
        (
            "model.language_model.layers.{}.self_attn",
            None,
            "language_model.model.layers.{}.self_attn",
        ),
        (
            "model.layers.{}.self_attn",
            "language_model.layers.{}.self_attn",
            "language_model.layers.{}.self_attn",
        ),
        (
            "model.layers.{}.self_attn",
            "language_model.layers.{}.self_attn",
            "model.layers.{}.self_attn",
        ),
        ("transformer.h.{}.attn", "h.{}.attn", "h.{}.attn"),
        ("transformer.h.{}.attn", "h.{}.attn", "transformer.h.{}.attn.attn"),
        ("gpt_neox.layers.{}.attention", None, "gpt_neox.layers.{}.attention.attn"),
        ("backbone.layers.{}.mixer", None, "backbone.layers.{}.mixer"),
        ("blocks.{}.norm.attn", None, "blocks.{}.norm.attn"),
        ("blocks.{}.norm.attn", None, "blocks.{}.norm.attn.attn"),
        ("thinker.model.layers.{}.self_attn", None, "model.layers.{}.self_attn"),
    ],
)
def test_a_layer_is_found_whatever_the_model_is_wrapped_in(
    module: str, checkpoint_module: str | None, spelling: str
) -> None:
    geometry = _geometry(module, checkpoint_module)
    names = [spelling.format(index) + ".k_scale" for index in (1, 0)]
    owners = _find(geometry, *names)

    assert _indices(owners, geometry) == {names[0]: 1, names[1]: 0}


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.2.self_attn.k_scale",
        "model.layers.00.self_attn.k_scale",
        "model.layers.0.cross_attn.k_scale",
        "model.layers.0.self_attn.k_proj.v_scale",
        "model.layers.0.self_attn.attn.attn.k_scale",
    ],
)
def test_what_lies_beside_the_layers_must_be_one_of_them(extra: str) -> None:
    with pytest.raises(ModelError, match="the model has no such attention") as caught:
        _find(_geometry("model.layers.{}.self_attn"), "model.layers.0.self_attn.k_scale", extra)
    assert extra in caught.value.message
    assert "model.layers.0.self_attn.k_scale" not in caught.value.message.replace(extra, "")
    assert caught.value.hint == "it has 2 layers; the scales may be of another model"


def test_draft_layers_behind_the_model_are_left_aside() -> None:
    """The config gives the number of draft layers; names after them are of another model."""
    geometry = make_geometry([make_attention(0), make_attention(1)], num_draft_layers=2)
    known = "model.layers.0.self_attn.k_scale"
    drafts = ("model.layers.2.self_attn.k_scale", "model.layers.3.self_attn.k_proj.k_scale")

    owners = _find(geometry, known, *drafts)

    assert _indices(owners, geometry) == {known: 0}
    for index in ("4", "9" * 5000):
        with pytest.raises(ModelError, match="the model has no such attention"):
            _find(geometry, known, f"model.layers.{index}.self_attn.k_scale")


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


def test_the_models_and_the_checkpoints_spelling_may_stand_together() -> None:
    geometry = _geometry("model.layers.{}.self_attn", "language_model.layers.{}.self_attn")
    names = ("model.layers.0.self_attn.k_scale", "language_model.layers.0.self_attn.v_scale")
    assert list(_indices(_find(geometry, *names), geometry).values()) == [0, 0]
