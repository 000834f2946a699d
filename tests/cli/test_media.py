"""Commands on rows with media, as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8calib.model.load import open_source
from fp8calib.plugins.plan.opened import plan_texts
from fp8calib.plugins.plan.request import PlanRequest
from tests.cli.conftest import write_rows
from tests.kit.multimodal import draw_image, save_multimodal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "llava"
    save_multimodal("llava", folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = []
    for number in range(4):
        draw_image(number).save(tmp_path / f"{number}.png")
        image = {"type": "image", "image": f"{number}.png"}
        rows += [ask(image, {"type": "text", "text": "What is this?"}), ask("What else is there?")]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path / "rows.jsonl"


def ask(*content: Any) -> dict[str, Any]:
    """Write a row of one question: a text, or parts."""
    asked = content[0] if isinstance(content[0], str) else list(content)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "!"}]}


@pytest.mark.parametrize("place", [0, 4])
def test_text_that_is_held_out_without_media_is_pointed_out(
    model: Path, data: Path, place: int
) -> None:
    """The last of five rows is held out."""
    image, text = data.read_text().splitlines()[:2]
    data.write_text("\n".join(image if i in (1, place) else text for i in range(5)))
    task = PlanRequest(model=model, data=data, samples=5, seq_len=256, pack=False)
    calibration, held_out = plan_texts(task, open_source(str(model)))
    assert calibration.media
    assert len(held_out.sequences) == 1
    found = [each for each in held_out.warnings if "no row with media is held out" in each]
    assert len(found) == (1 if place == 0 else 0)
