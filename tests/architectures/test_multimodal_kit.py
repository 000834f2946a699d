"""The tiny models that see or hear: each runs on what its own processor makes of a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from tests.kit.multimodal import (
    build_multimodal,
    draw_image,
    encode,
    make_tone,
    messages,
    parametrize,
    save_multimodal,
)


@parametrize()
def test_the_saved_model_runs_on_rows_of_its_own_processor(name: str, tmp_path: Path) -> None:
    """The folder alone is enough, and its files make the inputs that the built processor makes."""
    save_multimodal(name, tmp_path)
    built, processor = build_multimodal(name)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path).eval()
    assert model.config.architectures == [type(built).__name__]
    for row in messages(name):
        inputs = encode(loaded, row)
        same = encode(processor, row)
        assert inputs.keys() == same.keys()
        for key, value in inputs.items():
            torch.testing.assert_close(value, same[key], rtol=0, atol=0)
        with torch.no_grad():
            logits = model(**inputs).logits
            torch.testing.assert_close(logits, built(**same).logits)
        assert logits.shape[:2] == inputs["input_ids"].shape
        assert torch.isfinite(logits).all()


@parametrize()
def test_a_row_has_tokens_for_each_medium(name: str) -> None:
    """More media are more tokens, and the text of a row is among its tokens, letter by letter."""
    processor = build_multimodal(name)[1]
    for row in messages(name):
        ids = encode(processor, row)["input_ids"][0].tolist()
        said = "".join(part["text"] for part in row[0]["content"] if part["type"] == "text")
        for word in said.split():
            assert word in processor.tokenizer.decode(ids)
        media = [part for part in row[0]["content"] if part["type"] != "text"]
        special = [x for x in ids if x >= processor.tokenizer.convert_tokens_to_ids("<|user|>")]
        assert len(special) >= 2 + 2 * len(media)
        assert len(ids) < 1200


def test_media_are_the_same_each_time() -> None:
    """Another seed or size is another image, another tone."""
    first, again, other = (draw_image(seed, (32, 24)) for seed in (1, 1, 2))
    assert first.size == (32, 24)
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert len(first.getcolors()) > 8
    tone = make_tone(1, 0.25, 8000)
    assert tone.shape == (2000,)
    assert tone.dtype == np.float32
    np.testing.assert_array_equal(tone, make_tone(1, 0.25, 8000))
    assert not np.array_equal(tone, make_tone(2, 0.25, 8000))
    assert np.abs(tone).max() < 1
