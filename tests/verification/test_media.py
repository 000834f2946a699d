"""Verification on rows with media: the text is scored, whole or streamed, and scales compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

import fp8calib
from fp8calib.errors import UsageError
from fp8calib.jobs.verification import memory
from fp8calib.stats.modalities import keep_text
from fp8calib.verification import verify as verification
from fp8calib.verification.compare.streamed import StreamedComparison
from fp8calib.verification.judge import decide
from tests.kit.multimodal import build_multimodal, encode, messages, parametrize, save_multimodal
from tests.truth import by_modality

_KINDS = ["gemma3", "idefics3", "qwen2_audio", "qwen2_vl"]


@pytest.fixture(autouse=True)
def _without_notes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
        yield


def rows(name: str, count: int = 4) -> list[dict[str, Any]]:
    """Give the rows of a kind with several seeds."""
    return [{"messages": row} for seed in range(count) for row in messages(name, seed=seed)]


@parametrize(_KINDS)
def test_only_text_is_scored_and_apart_after_media(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    _, processor = build_multimodal(name)
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    report = fp8calib.verify(tmp_path, data=rows(name, 1), pack=False, dtype="float32")
    losses: list[float] = []
    after: list[bool] = []
    for row in messages(name):
        inputs = encode(processor, row)
        with torch.no_grad():
            logprobs = model(**inputs).logits[0].log_softmax(-1)
        kinds = by_modality.run(tmp_path, row).modality
        for place, token in enumerate(inputs["input_ids"][0].tolist()[1:], start=1):
            if kinds[place] == "text":
                losses.append(-float(logprobs[place - 1, token]))
                after.append(any(kind != "text" for kind in kinds[:place]))
    assert report.tokens == len(losses)
    assert report.reference.ppl == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    counts = {each.after_media: each.tokens for each in report.contexts}
    assert counts == {True: sum(after), False: len(after) - sum(after)}
    for candidate in report.candidates:
        parts = [each for each in report.contexts if each.candidate == candidate.name]
        whole = sum(each.kld_mean * each.tokens for each in parts) / report.tokens
        assert whole == pytest.approx(candidate.kld_mean, rel=1e-6)


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
                found.append((report.candidates, report.contexts, report.media))
    assert found[:2] == found[2:]


def streamed(streams: bool) -> Any:
    """Let a verification stream the model, as if it did not fit."""
    choose = memory.choose_memory_mode

    def chosen(*args: Any, **kwargs: Any) -> Any:
        why = "asked for by a test" if streams else kwargs.get("always_streams", "")
        mode = choose(*args, **{**kwargs, "always_streams": why})
        assert (mode.streaming is not None) == streams
        return mode

    assert StreamedComparison
    return patch.object(memory, "choose_memory_mode", chosen)


def test_scales_of_the_text_are_those_of_its_tokens(tmp_path: Path) -> None:
    """The pair is that of two candidates, one with the scales of the text."""
    save_multimodal("llava", tmp_path)
    grow_projector(tmp_path)
    options = {"pack": False, "dtype": "float32"}
    stats = fp8calib.calibrate(tmp_path, rows("llava"), **options).stats
    text = keep_text(stats)
    assert text is not None
    alone = type(stats).of(text)
    scales = stats.kv_scales()
    assert any(float(scale) < float(scales[name]) for name, scale in alone.kv_scales().items())
    held_out = [{"messages": row} for seed in range(9, 15) for row in messages("llava", seed=seed)]
    with (
        patch.object(decide, "_CHANCE", math.inf),  # the model is random
        patch.object(verification, "compare_paired", wraps=verification.compare_paired) as compare,
    ):
        both = fp8calib.verify(tmp_path, [stats, alone], held_out, **options)
    one, other = (each for each in both.candidates if each.name != "scale-1.0")
    pair = next(
        each for each in both.comparisons if (each.candidate, each.base) == (other.name, one.name)
    )
    found = next(each for each in both.media if each.candidate == one.name)
    after = {each.candidate: each for each in both.contexts if each.after_media}
    assert (found.kld_mean, found.kld_se) == (after[other.name].kld_mean, after[other.name].kld_se)
    difference = after[other.name].kld_mean - after[one.name].kld_mean
    assert found.difference.difference == pytest.approx(difference, rel=1e-9)
    assert found.difference.answer == pair.answer
    call = next(call for call in compare.mock_calls if call.args[0].startswith("scales"))
    assert found.difference.se == pytest.approx(cluster(*call.args), rel=1e-6)


def cluster(candidate: str, base: str, klds: dict[str, torch.Tensor], lengths: list[int]) -> float:
    """Give the standard error of a mean difference per token, of sequences drawn at random."""
    differences = (klds[candidate].double() - klds[base].double()).numpy()
    ends = np.cumsum([length - 1 for length in lengths])
    assert ends[-1] == len(differences)
    parts = np.split(differences, ends[:-1])
    off = [part.sum() - differences.mean() * len(part) for part in parts]
    n = len(parts)
    return float(np.sqrt(n / (n - 1) * np.square(off).sum()) / len(differences))


def test_other_text_does_not_hide_what_media_need(tmp_path: Path) -> None:
    """Rows of text beside them, 20 times as many tokens, change nothing of the comparison."""
    save_multimodal("llava", tmp_path)
    grow_projector(tmp_path)
    options = {"pack": False, "dtype": "float32", "samples": 1000}
    stats = fp8calib.calibrate(tmp_path, rows("llava"), **options).stats
    seen = [{"messages": row} for seed in range(9, 15) for row in messages("llava", seed=seed)[1:]]
    text = [{"input_ids": [(i * j) % 200 + 4 for j in range(1, 400)]} for i in range(1, 12)]
    with patch.object(decide, "_CHANCE", math.inf):  # the model is random
        alone, beside = (
            fp8calib.verify(tmp_path, stats, each, **options) for each in (seen, seen + text)
        )
    assert alone.media == beside.media
    assert alone.media[0].difference.answer == "worse"


def grow_projector(folder: Path) -> None:
    """Let images have larger K and V than text."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # A norm takes the size away, so images get a channel that K and V of the first layer multiply.
    for name, tensor in tensors.items():
        if name.endswith("projector.linear_2.weight"):
            tensor[0] *= 200
        if name.endswith(("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")):
            tensor[:, 0] *= 20
    save_file(tensors, path, {"format": "pt"})


def test_statistics_of_text_have_no_comparison(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    text = [{"messages": messages("llava")[0]}] * 4
    options = {"pack": False, "dtype": "float32"}
    stats = fp8calib.calibrate(tmp_path, text, **options).stats
    report = fp8calib.verify(tmp_path, stats, rows("llava"), **options)
    assert report.media == ()
    assert report.contexts
    assert fp8calib.verify(tmp_path, stats, text, **options).contexts == ()


def test_text_without_media_does_not_tell_whether_scales_need_them(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    options = {"pack": False, "dtype": "float32"}
    stats = fp8calib.calibrate(tmp_path, rows("llava"), **options).stats
    text = [{"messages": messages("llava", seed=9)[0]}] * 4
    with patch.object(decide, "_CHANCE", math.inf):  # the model is random
        assert fp8calib.verify(tmp_path, stats, text, **options).media == ()


def test_decoding_takes_text_alone(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    with pytest.raises(UsageError, match="--decode: the data has image"):
        fp8calib.verify(tmp_path, data=rows("llava"), pack=False, dtype="float32", decode=True)


def test_a_model_that_sees_is_not_calibrated_on_text_without_a_word(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    with pytest.warns(fp8calib.Fp8CalibWarning, match="takes image, and all rows are text"):
        fp8calib.calibrate(
            tmp_path, [{"messages": messages("llava")[0]}] * 4, pack=False, dtype="float32"
        )


def test_a_model_that_knows_nothing_does_not_tell_whether_media_are_needed(tmp_path: Path) -> None:
    save_multimodal("gemma3", tmp_path)
    options = {"pack": False, "dtype": "float32"}
    stats = fp8calib.calibrate(tmp_path, rows("gemma3"), **options).stats
    asked = partial(fp8calib.verify, tmp_path, stats, rows("gemma3", 1), **options)
    assert asked().media == ()
    with patch.object(decide, "_CHANCE", math.inf):
        assert asked().media
