"""Which position belongs to which medium: three rules that share nothing must agree."""

from pathlib import Path

import numpy as np
import torch

from tests.kit.multimodal import (
    MULTIMODAL,
    build_multimodal,
    draw_image,
    encode,
    messages,
    parametrize,
    save_multimodal,
    user,
)
from tests.truth import brute_force, by_modality

_EMBEDDED_ELSEWHERE = {
    "ovis2": {"<IMG_START>", "<IMG_GRID>", "<IMG_ROW>", "<IMG_END>"},
}
"""Tokens around media whose embedding is in a table of the tower, whatever the medium shows."""

_SOME_ARE_FIXED = {"chameleon", "llava_next", "llava_onevision"}
"""Some positions of a medium have an embedding of its own: an end of a line, padding, a code."""

_ADDED_IN_LAYERS = {"granite4_vision"}
"""The decoder receives zeros for an image, and its layers add what the image shows."""


@parametrize()
def test_positions_that_media_fill_are_those_of_placeholders(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    _, processor = build_multimodal(name)
    for row in messages(name):
        seen = by_modality.run(tmp_path, row)
        tokens = processor.tokenizer.convert_ids_to_tokens(encode(processor, row)["input_ids"][0])
        wrong = seen.filled != (seen.placeholder != "text")
        strange = {token for token, bad in zip(tokens, wrong, strict=True) if bad}
        assert strange <= _EMBEDDED_ELSEWHERE.get(name, set())
        media = {part["type"] for part in row[0]["content"]} | {"text"}
        assert seen.tokens.keys() == media
        assert sum(seen.tokens.values()) == len(tokens)


@parametrize()
def test_positions_that_follow_the_media_are_those_of_placeholders(name: str) -> None:
    """Pixels and sound of the opposite sign change what the decoder receives there, only there."""
    model, processor = build_multimodal(name)
    inputs = dict(encode(processor, messages(name)[-1]))
    other = {
        key: -value if value.is_floating_point() and "mask" not in key else value
        for key, value in inputs.items()
    }
    first, second = by_modality.watch(model, inputs), by_modality.watch(model, other)
    assert (first.modality == second.modality).all()
    changed = (first.received != second.received).any(-1).numpy()
    media = first.modality != "text"
    assert not (changed & ~media).any()
    if name in _ADDED_IN_LAYERS:
        assert not changed.any()
    elif name in _SOME_ARE_FIXED:
        assert changed.sum() >= media.sum() / 4
    else:
        assert (changed == media).all()


@parametrize(["gemma3", "llava", "lighton_ocr", "qwen2_vl"])
def test_all_of_a_row_without_media_is_text(name: str) -> None:
    """The statistics are those of the plain run of the whole model."""
    model, processor = build_multimodal(name)
    inputs = encode(processor, user("Nothing to see here."))
    seen = by_modality.watch(model, dict(inputs))
    assert seen.tokens == {"text": inputs["input_ids"].shape[1]}
    truth = brute_force.run(model, [inputs["input_ids"][0]])
    for layer, pairs in truth.kv.items():
        keys, values = zip(*pairs, strict=True)
        found = seen.head_amax(layer)
        for amax, tensors in zip(found, (keys, values), strict=True):
            np.testing.assert_allclose(amax, brute_force.head_amax(list(tensors), 2), rtol=1e-6)
    for linear in seen.inputs:
        expected = brute_force.channel_amax(truth.inputs[linear])
        np.testing.assert_allclose(seen.channel_amax(linear), expected, rtol=1e-6)


def test_numbers_by_hand() -> None:
    """Two heads and three positions: text, image, image; the second call of `update` counts too."""
    keys = torch.tensor([[[[1.0, -9.0], [2.0, 3.0], [-4.0, 0.0]]] * 2])
    keys[0, 1] *= 10
    seen = by_modality.Seen(
        layers="layers",
        arguments={},
        received=torch.zeros(3, 1),
        filled=np.array([False, True, True]),
        placeholder=np.array(["text", "image", "image"]),
        kv={0: [(keys, keys * 2), (keys / 2, keys * -5)]},
        inputs={"layers.0.q": [torch.tensor([[[7.0, -8.0], [1.0, 2.0], [-3.0, 1.0]]])]},
    )
    assert seen.tokens == {"image": 2, "text": 1}
    k, v = seen.head_amax(0)
    assert (k.tolist(), v.tolist()) == ([9, 90], [45, 450])
    assert seen.channel_amax("layers.0.q").tolist() == [7, 8]


def test_a_placeholder_that_nothing_fills_is_text() -> None:
    """A user who writes the placeholder's characters has written text, as the embeddings show."""
    model, processor = build_multimodal("llava")
    inputs = encode(processor, user(draw_image(0), "a"))
    del inputs["pixel_values"]
    seen = by_modality.watch(model, dict(inputs))
    assert (seen.placeholder == "image").any()
    assert seen.tokens == {"text": len(seen.filled)}
    assert "image" in MULTIMODAL["llava"].placeholders
