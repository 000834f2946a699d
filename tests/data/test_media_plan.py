"""Rows with media in a plan: whole, in order, cut after their media, told apart by one pixel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fp8calib.data.plan import build_plan
from fp8calib.data.processor import MediaEncoder
from fp8calib.data.sequences import DataPlan, batches
from fp8calib.data.shares import Share, select_batches
from fp8calib.errors import DataError
from tests.kit.multimodal import build_multimodal, draw_image


@pytest.fixture(scope="module")
def encoders() -> Callable[[str], tuple[MediaEncoder, Any]]:
    made: dict[str, tuple[MediaEncoder, Any]] = {}

    def give(name: str) -> tuple[MediaEncoder, Any]:
        if name not in made:
            model, processor = build_multimodal(name)
            made[name] = MediaEncoder(processor, model.config, name), processor
        return made[name]

    return give


@pytest.fixture
def plan_of(encoders: Any, tmp_path: Path) -> Callable[..., DataPlan]:
    """Plan rows of a file for a model that sees (one token a byte), in a folder with `a.png`."""
    draw_image(0).save(tmp_path / "a.png")
    draw_image(1).save(tmp_path / "b.png")

    def plan(*rows: Any, model: str = "gemma3", **options: Any) -> DataPlan:
        encoder, processor = encoders(model)
        specs = []
        for index, each in enumerate(rows if isinstance(rows[0], list) else [list(rows)]):
            path = tmp_path / f"rows{index}.jsonl"
            path.write_text("\n".join(map(json.dumps, each)))
            specs.append(f"{path}@1" if options.get("seed") is not None else str(path))
        settings = {"samples": 99, "seq_len": 64, **options}
        return build_plan(
            specs,
            tokenizer=lambda: processor.tokenizer,
            encoder=lambda: encoder,
            vocab_size=1000,
            **settings,
        )

    return plan


def see(text: str, *names: str) -> dict[str, Any]:
    return {"text": text, "images": list(names or ["a.png"])}


def ids(*tokens: int) -> dict[str, Any]:
    return {"input_ids": list(tokens)}


def brief(plan: DataPlan) -> list[Any]:
    """Give each sequence: its tokens, or the text of the row with media."""

    def read(index: int) -> Any:
        if index not in plan.media:
            return plan.sequences[index].tolist()
        row = plan.media[index].row
        assert row.messages is not None
        return row.messages[0]["content"][-1]

    return [read(index) for index in range(len(plan.sequences))]


def test_text_is_packed_as_before_and_rows_with_media_stay_whole_between(plan_of: Any) -> None:
    """Text of 40 tokens at a time gives the sequences that it would give alone."""
    texts = [list(range(start, start + 40)) for start in (10, 60, 110, 160)]
    one, two, three, four = (ids(*each) for each in texts)
    alone = plan_of(one, two, three, four)
    mixed = plan_of(see("first"), one, see("second"), two, three, see("third"), four)
    joined = [token for each in texts for token in each]
    pieces = [joined[:64], joined[64:128], joined[128:]]
    assert brief(alone) == pieces
    assert brief(mixed) == ["first", "second", pieces[0], "third", *pieces[1:]]
    assert [len(mixed.sequences[i]) for i in mixed.media] == [
        len(mixed.media[i].ids) for i in (0, 1, 3)
    ]
    assert mixed.rows.read == mixed.rows.used == 7
    assert not alone.media


def test_samples_count_sequences_and_rows_with_media(plan_of: Any) -> None:
    rows = [see("first"), ids(*range(10, 74)), see("second"), see("third")]
    expected = ["first", list(range(10, 74)), "second", "third"]
    for samples in (1, 2, 3, 4, 5):
        for pack in (True, False):
            plan = plan_of(*rows, samples=samples, pack=pack)
            assert brief(plan) == expected[:samples]
    long = list(range(10, 330))
    plan = plan_of(see("first"), ids(*long), see("second"), samples=3)
    assert brief(plan) == ["first", long[:64], long[64:128]]


def test_the_fingerprint_sees_a_pixel_and_no_name(plan_of: Any, tmp_path: Path) -> None:
    first = plan_of(see("What?"))
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    renamed = plan_of(see("What?", "c.png"))
    pixels = np.array(Image.open(tmp_path / "a.png"))
    pixels[3, 4, 1] ^= 128
    Image.fromarray(pixels).save(tmp_path / "c.png")
    changed = plan_of(see("What?", "c.png"))
    assert first.fingerprint == renamed.fingerprint != changed.fingerprint
    assert torch.equal(first.sequences[0], changed.sequences[0])
    assert plan_of(see("What!")).fingerprint != first.fingerprint


def test_media_that_change_after_planning_are_refused(plan_of: Any, tmp_path: Path) -> None:
    """The fingerprint names what was planned, so nothing else is run."""
    plan = plan_of(see("What?"))
    assert "pixel_values" in plan.media[0].load()
    draw_image(5).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"rows0\.jsonl:1: its media changed"):
        plan.media[0].load()


@pytest.mark.parametrize("pack", [True, False])
def test_a_row_is_cut_after_its_last_medium_only(plan_of: Any, pack: bool) -> None:
    row = see("<image>What is it? <image>" + "x" * 50, "a.png", "b.png")
    whole = plan_of(row, seq_len=500)
    ids, kinds = whole.media[0].ids, whole.media[0].kinds
    end = max(i for i in range(len(kinds)) if kinds[i]) + 1
    cut = plan_of(row, seq_len=end + 3, pack=pack)
    assert cut.sequences[0].tolist() == ids[: end + 3].tolist()
    assert cut.media[0].num_cut == len(ids) - end - 3
    assert cut.rows.cut == 1
    full, short = whole.media[0].load(), cut.media[0].load()
    assert full.keys() == short.keys() >= {"pixel_values", "token_type_ids"}
    assert torch.equal(short["pixel_values"], full["pixel_values"])
    assert torch.equal(short["token_type_ids"], full["token_type_ids"][:, : end + 3])
    with pytest.raises(DataError, match=f"media end at token {end}, beyond --seq-len {end - 1}"):
        plan_of(row, seq_len=end - 1, pack=pack)


def test_a_shard_takes_its_rows_and_a_batch_holds_one(plan_of: Any) -> None:
    plan = plan_of(*(see(f"row {index}") for index in range(6)))
    found = [batch.first for batch in batches(plan, 4)]
    assert found == list(range(6))
    parts = [select_batches(plan, 4, Share(index=index, count=2)) for index in (1, 2)]
    assert sorted(batch.first for part in parts for batch in part) == found
    for batch in [batch for part in parts for batch in part]:
        assert batch.media is plan.media[batch.first]
