"""Rows with media in a plan: whole, in order, cut after their media, told apart by one pixel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8calib.data.plan import RowEncoder, TextSettings, build_plan
from fp8calib.data.processor import MediaEncoder
from fp8calib.data.sequences import DataPlan
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
        rows = RowEncoder(lambda: processor.tokenizer, 1000, media=lambda: encoder)
        return build_plan(TextSettings(sources=tuple(specs), **settings), rows)

    return plan


def see(text: str, *names: str) -> dict[str, Any]:
    return {"text": text, "images": list(names or ["a.png"])}


def test_media_that_change_after_planning_are_refused(plan_of: Any, tmp_path: Path) -> None:
    """The fingerprint names what was planned, so nothing else is run."""
    plan = plan_of(see("What?"))
    assert "pixel_values" in plan.media[0].load()
    draw_image(5).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"rows0\.jsonl:1: its media changed"):
        plan.media[0].load()
