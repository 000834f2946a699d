"""Verification on rows with media: the text is scored, whole or streamed."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForMultimodalLM

import fp8calib
from fp8calib.verification import verify
from tests.kit.minutes import HAS_MINUTES
from tests.kit.multimodal import build_multimodal, encode, messages, parametrize, save_multimodal
from tests.truth import by_modality

_KINDS = ["gemma3", "qwen2_audio", *(["idefics3", "qwen2_vl"] if HAS_MINUTES else [])]


@pytest.fixture(autouse=True)
def _without_notes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
        yield


def rows(name: str, count: int = 4) -> list[dict[str, Any]]:
    """Give the rows of a kind with several seeds."""
    return [{"messages": row} for seed in range(count) for row in messages(name, seed=seed)]


@parametrize(_KINDS)
def test_only_text_is_scored(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    _, processor = build_multimodal(name)
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    report = fp8calib.verify(tmp_path, data=rows(name, 1), pack=False, dtype="float32")
    losses: list[float] = []
    for row in messages(name):
        inputs = encode(processor, row)
        with torch.no_grad():
            logprobs = model(**inputs).logits[0].log_softmax(-1)
        kinds = by_modality.run(tmp_path, row).modality
        for place, token in enumerate(inputs["input_ids"][0].tolist()[1:], start=1):
            if kinds[place] == "text":
                losses.append(-float(logprobs[place - 1, token]))
    assert report.tokens == len(losses)
    assert report.reference.ppl == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


@parametrize(_KINDS)
def test_a_streamed_verification_gives_the_same_figures(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    options = {"pack": False, "dtype": "float32", "seq_len": 512}
    stats = fp8calib.calibrate(tmp_path, rows(name, 1), recipe="w8a8-static", **options).stats
    found = []
    for streams in (False, True):
        with streamed(streams):
            for scheme in (None, "fp8-static"):
                report = fp8calib.verify(tmp_path, stats, rows(name, 1), scheme=scheme, **options)
                found.append(report.candidates)
    assert found[:2] == found[2:]


def streamed(streams: bool) -> Any:
    """Let a verification stream the model, as if it did not fit."""
    choose = verify.plan_memory

    def chosen(work: Any, *args: Any, **kwargs: Any) -> Any:
        why = "asked for by a test" if streams else work.always_streams
        mode = choose(replace(work, always_streams=why), *args, **kwargs)
        assert mode.is_streamed == streams
        return mode

    return patch.object(verify, "plan_memory", chosen)


def test_a_model_that_sees_is_not_calibrated_on_text_without_a_word(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    with pytest.warns(fp8calib.Fp8CalibWarning, match="takes image, and all rows are text"):
        fp8calib.calibrate(
            tmp_path, [{"messages": messages("llava")[0]}] * 4, pack=False, dtype="float32"
        )
