"""Commands on rows with media; what is refused of rows is in `refusals.tsv`."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fp8calib.model.load import open_source
from fp8calib.plugins.plan.inputs import plan_texts
from fp8calib.plugins.plan.request import PlanRequest
from tests.cli.conftest import write_rows
from tests.cli.places import Places
from tests.cli.program import fail, succeed

QUESTION = {"type": "text", "text": "What is this?"}
QUICK = ("--samples", 4, "--seq-len", 256, "--dtype", "float32")


@pytest.fixture
def image(places: Places) -> str:
    return str(Path(places["media"]) / "good.png")


def ask(*content: Any) -> dict[str, Any]:
    """Write a row of one question: a text, or parts."""
    asked = content[0] if isinstance(content[0], str) else list(content)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "!"}]}


@pytest.mark.parametrize("place", [0, 4])
def test_text_that_is_held_out_without_media_is_pointed_out(
    places: Places, image: str, tmp_path: Path, place: int
) -> None:
    """The last of five rows is held out."""
    seen, text = ask({"type": "image", "image": image}, QUESTION), ask("What else is there?")
    rows = [seen if i in (1, place) else text for i in range(5)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    task = PlanRequest(model=places["seeing"], data=data, samples=5, seq_len=256, pack=False)
    calibration, held_out = plan_texts(task, open_source(places["seeing"]))
    assert calibration.media
    assert len(held_out.sequences) == 1
    found = [each for each in held_out.warnings if "no row with media is held out" in each]
    assert len(found) == (1 if place == 0 else 0)


def test_a_named_column_of_text_leaves_media_out(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "w1 w2 w3", "images": ["none.png"]}])
    asked = ("--data", rows, *QUICK, "--seq-len", 64, "--text-column", "text")
    plan = succeed("calibrate", model, *asked, "--dry-run", "--json").json["plan"]
    assert (plan["rows"]["used"], plan["tokens"]) == (1, 4)


def test_places_for_media_without_media_are_pointed_out(places: Places, tmp_path: Path) -> None:
    """A column of another name is not read; the mark in the text is then a token of no image."""
    row = {"text": "<image_soft_token> and?", "image_path": "good.png"}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    warned = succeed("calibrate", places["seeing"], "--data", rows, *QUICK, "--dry-run").err
    assert "1 sequences of text hold tokens that stand for media, and no media" in warned


@pytest.mark.parametrize(
    ("kind", "package", "part"),
    [
        ("seeing", "PIL", {"type": "image", "image": "good.png"}),
        ("hearing", "soundfile", {"type": "audio", "audio": "good.wav"}),
        (
            *("hearing", "soxr"),
            {"type": "audio", "audio": {"array": [0.5] * 900, "sampling_rate": 8000}},
        ),
    ],
)
def test_a_package_that_is_not_installed(
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    package: str,
    part: dict[str, Any],
) -> None:
    folder = places[kind]
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("good.png", "good.wav"):
        (tmp_path / name).symlink_to(Path(places["media"]) / name)
    rows = write_rows(tmp_path / "rows.jsonl", [ask(part, QUESTION)])
    text = fail(2, "calibrate", folder, "--data", rows, *QUICK, "--out", places["out"])
    assert "is not installed" in text
    assert 'pip install "fp8calib[' in text


def remove_processor(folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)


def add_code(folder: Path) -> None:
    path = folder / "processor_config.json"
    own = {"auto_map": {"AutoProcessor": "own.OwnProcessor"}, "processor_class": "OwnProcessor"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (folder / "own.py").write_text("raise SystemExit('ran')")


def add_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<more_{index}>" for index in range(200)], special_tokens=True)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("code", "damage", "says"),
    [
        (4, remove_processor, "holds no processor of media (looked for processor_config.json"),
        (4, add_code, "--trust-remote-code"),
        (5, add_tokens, "the text gives token "),
    ],
)
def test_processors(
    places: Places,
    image: str,
    tmp_path: Path,
    code: int,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder = shutil.copytree(places["seeing"], tmp_path / "damaged")
    damage(folder)
    more = [{"type": "text", "text": "<more_199>"}] if damage is add_tokens else []
    row = ask({"type": "image", "image": image}, QUESTION, *more)
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    assert says in fail(code, "calibrate", folder, "--data", rows, *QUICK, "--out", places["out"])
