"""Rows with media in a plan: the fingerprint names what was planned, so nothing else is run."""

import json
from pathlib import Path

import pytest

from fp8calib.data.plan import RowEncoder, TextSettings, build_plan
from fp8calib.data.processor import MediaEncoder
from fp8calib.errors import DataError
from tests.kit.multimodal import build_multimodal, draw_image


def test_media_that_change_after_planning_are_refused(tmp_path: Path) -> None:
    draw_image(0).save(tmp_path / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "What?", "images": ["a.png"]}))
    model, processor = build_multimodal("gemma3")
    encoder = MediaEncoder(processor, model.config, "gemma3")
    plan = build_plan(
        TextSettings(sources=(str(rows),), samples=99, seq_len=64),
        RowEncoder(lambda: processor.tokenizer, 1000, media=lambda: encoder),
    )
    assert "pixel_values" in plan.media[0].load()
    draw_image(5).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: its media changed"):
        plan.media[0].load()
