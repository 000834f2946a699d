"""Calibration on images and audio, against what the whole model computes."""

import io
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fp8calib.calibration import journal
from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.layer_steps import HiddenStateStore
from fp8calib.commands.model import plan_text
from fp8calib.commands.recipe import Data
from fp8calib.data.modality import MODALITIES
from fp8calib.data.sequences import DataPlan
from fp8calib.data.sources import split_data
from fp8calib.model.geometry import Role, Site
from fp8calib.model.load import open_source
from tests.calibration.test_resume import Stopping, interrupt
from tests.cli.program import succeed
from tests.doors import WorkShare, as_bytes, opened
from tests.kit.minutes import HAS_MINUTES
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

_LEFT_OUT = {
    "paligemma": "a row of text runs without the model around its decoder, from position 0",
}
_ROWS = {
    "chameleon": slice(1, None),  # its processor ends a row of text with a separator
}
"""Which rows of a kind are run."""
KINDS = [name for name in sorted(MULTIMODAL) if name not in _LEFT_OUT]


def rows_of(name: str) -> list[list[dict[str, Any]]]:
    return messages(name)[_ROWS.get(name, slice(None))]


def plan_of(name: str, folder: Path, *, tokenizer: Any = None) -> DataPlan:
    """Plan all rows of a kind, each a sequence of its own."""
    _, rows = split_data([{"messages": row} for row in rows_of(name)])
    return plan_text(
        open_source(str(folder)),
        Data(samples=16, pack=False),
        rows=rows,
        part="calibrate",
        tokenizer=tokenizer,
    )


def calibrate(folder: Path, plan: DataPlan, *, streamed: bool, size: int) -> RunStats:
    with opened(folder, streamed=streamed) as subject:
        return subject.calibrate(plan=plan, batch_size=size)


@parametrize(KINDS)
def test_statistics_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    plan = plan_of(name, tmp_path)
    stats = calibrate(tmp_path, plan, streamed=False, size=1)
    seen = [by_modality.run(tmp_path, row) for row in rows_of(name)]

    counted = {kind: sum(each.tokens.get(kind, 0) for each in seen) for kind in MODALITIES}
    assert plan.tokens_by_modality == {kind: count for kind, count in counted.items() if count}

    for layer, attention in stats.geometry.attentions():
        if attention.producer is not None:
            continue
        for place, role in enumerate((Role.K, Role.V)):
            largest = np.max([each.head_amax(layer.index)[place] for each in seen], axis=0)
            found = stats.sites[attention.site(role)]
            assert found.amax.numpy() == pytest.approx(largest, rel=1e-6)
    for _, linear in stats.geometry.linears():
        observed = stats.sites.get(Site(linear.module, Role.INPUT))
        if observed is not None and linear.module in seen[0].inputs:
            largest = np.max([each.channel_amax(linear.module) for each in seen], axis=0)
            assert observed.amax.numpy() == pytest.approx(largest, rel=1e-6)


@parametrize(KINDS if HAS_MINUTES else KINDS[::3])
def test_streamed_and_in_batches_it_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path / "model")
    plan = plan_of(name, tmp_path / "model")
    one, other = (
        as_bytes(calibrate(tmp_path / "model", plan, streamed=streamed, size=size), tmp_path)
        for streamed, size in ((False, 1), (True, 4))
    )
    assert other == one


def test_what_towers_give_shares_the_memory_of_hidden_states(tmp_path: Path) -> None:
    """Two embeddings and two outputs of a layer wait, of 32 channels each: more than the limit."""
    save_multimodal("llava", tmp_path)
    plan = plan_of("llava", tmp_path)
    limit = 32 * 4 * sum(len(plan.sequences[index]) for index in plan.media)
    stores: list[HiddenStateStore] = []
    put = HiddenStateStore.put

    def count(store: HiddenStateStore, number: Hashable, tree: Any) -> None:
        put(store, number, tree)
        stores.append(store)
        assert sum(each.ram_bytes for each in set(stores)) <= limit

    with opened(tmp_path, streamed=True) as subject, patch.object(HiddenStateStore, "put", count):
        mode = replace(subject.mode, hidden_ram_bytes=limit)
        replace(subject, mode=mode).calibrate(plan=plan, batch_size=1)
    assert stores[0].file_bytes > 0


def test_rows_of_text_have_the_template_of_a_processor_whose_tokenizer_has_none(
    tmp_path: Path,
) -> None:
    """The tokenizer of the caller stays as it is."""
    save_multimodal("llava", tmp_path)
    _, processor = build_multimodal("llava")
    expected = plan_of("llava", tmp_path).fingerprint
    processor.tokenizer.chat_template = None
    assert plan_of("llava", tmp_path, tokenizer=processor).fingerprint == expected
    assert processor.tokenizer.chat_template is None


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_with_media_goes_on(
    steps: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INTERVAL_S", "LAYER_INTERVAL_PER_COST"):
        monkeypatch.setattr(journal, name, 0.0)
    save_multimodal("llava", tmp_path / "model")
    plan = plan_of("llava", tmp_path / "model")
    with opened(tmp_path / "model", streamed=streamed) as subject:

        def go_on() -> WorkShare:
            (tmp_path / "kept").mkdir(exist_ok=True)
            job = subject.job(plan, asked_batch_size=1)
            kept = job.open_journal(tmp_path / "kept")
            kept.load()
            return WorkShare(journal=kept)

        options: dict[str, Any] = {"plan": plan, "batch_size": 1}
        whole = as_bytes(subject.calibrate(**options), tmp_path)
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(go_on(), progress=Stopping(steps, interrupt), **options)
        assert as_bytes(subject.calibrate(go_on(), **options), tmp_path) == whole


def test_a_shard_of_text_merges_with_one_of_images(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path / "model")
    rows = [{"text": "some words that go on and on for a while"}] * 4
    rows += [{"text": "what is <image>", "images": [{"bytes": picture(seed)}]} for seed in range(4)]
    pd = pytest.importorskip("pyarrow")
    table = pd.Table.from_pylist([{"images": None, **row} for row in rows])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    run = ("calibrate", tmp_path / "model", "--data", tmp_path / "rows.parquet", "--no-pack")
    run = (*run, "--samples", "8", "--seq-len", "128", "--dtype", "float32", "--out")
    succeed(*run, tmp_path / "whole")
    for part in ("1/2", "2/2"):
        succeed(*run, tmp_path / part[0], "--shard", part)
    parts = [tmp_path / name / "stats.safetensors" for name in "12"]
    succeed("export", *parts, "--out", tmp_path / "joined")
    whole = (tmp_path / "whole" / "stats.safetensors").read_bytes()
    assert (tmp_path / "joined" / "stats.safetensors").read_bytes() == whole


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    draw_image(seed).save(buffer, "PNG")
    return buffer.getvalue()


_EMBEDDED_ELSEWHERE = {
    "ovis2": {"<IMG_START>", "<IMG_GRID>", "<IMG_ROW>", "<IMG_END>"},
}
"""Tokens around media whose embedding is in a table of the tower, whatever the medium shows."""

_SOME_ARE_FIXED = {"chameleon", "llava_next", "llava_onevision"}
"""Some positions of a medium have an embedding of its own: an end of a line, padding, a code."""

_ADDED_IN_LAYERS = {"granite4_vision"}
"""The decoder receives zeros for an image, and its layers add what the image shows."""


@parametrize(None if HAS_MINUTES else sorted(MULTIMODAL)[::2])
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
