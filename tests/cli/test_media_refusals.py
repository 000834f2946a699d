"""What `calibrate` refuses of images and sounds: one message, a hint, nothing written."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.kit.multimodal import draw_image, save_multimodal

SEES, HEARS = "gemma3", "qwen2_audio"
QUICK = ("--samples", 4, "--seq-len", 256, "--dtype", "float32")
ASKED = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a model that sees and one that hears."""
    folder = tmp_path_factory.mktemp("media-models")
    for name in (SEES, HEARS):
        save_multimodal(name, folder / name)
    return {name: folder / name for name in (SEES, HEARS)}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write a folder of media that are damaged, and some that are not."""
    folder = tmp_path / "data"
    folder.mkdir()
    draw_image(0).save(folder / "good.png")
    png = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(png[: len(png) // 2])
    (folder / "good.wav").write_bytes(b"RIFF")
    os.mkfifo(folder / "pipe.png")
    return folder


def ask(*parts: Any, **columns: Any) -> dict[str, Any]:
    """Write a row of one question, with these parts before it."""
    return {"messages": [{"role": "user", "content": [*parts, ASKED]}], **columns}


def image(value: Any) -> dict[str, Any]:
    return ask({"type": "image", "image": value})


def audio(value: Any) -> dict[str, Any]:
    """Write a row with one sound."""
    return ask({"type": "audio", "audio": value})


def hear(*samples: float) -> dict[str, Any]:
    return audio({"array": list(samples), "sampling_rate": 16000})


ROWS: list[tuple[str, dict[str, Any], str]] = [
    (SEES, image("none.png"), "none.png cannot be read (No such file or directory)"),
    (SEES, image("pipe.png"), "pipe.png cannot be read (not a file)"),
    (SEES, image("cut.png"), "the image cannot be decoded (OSError"),
    (SEES, image("https://example.com/a.png"), "is a URL, and nothing is fetched"),
    (SEES, image("data:image/png;base64,a!b"), "not base64"),
    (SEES, ask(image="good.png", images=["good.png"]), "both images and image hold media"),
    (SEES, {"text": "<image> and?", "images": ["good.png"] * 2}, "2 images beside 1 places"),
    (SEES, {"input_ids": [5, 6, 7], "image": "good.png"}, "input_ids stand beside images"),
    (SEES, audio("good.wav"), "gemma3 takes no audio, only image"),
    (HEARS, image("good.png"), "qwen2_audio takes no image, only audio"),
    (HEARS, hear(), "the sound has no samples"),
    (HEARS, hear(*[0.5] * 100), "the processor and chat template of qwen2_audio leave"),
    (HEARS, hear(0.0, math.nan), "the sound holds NaN or inf"),
    (SEES, ask(*[{"type": "image", "path": "good.png"}] * 40), "beyond --seq-len 256"),
]


@pytest.mark.parametrize(("name", "row", "says"), ROWS)
def test_rows(
    models: dict[str, Path], files: Path, name: str, row: dict[str, Any], says: str
) -> None:
    write_rows(files / "rows.jsonl", [row])
    text = refuse(5, models[name], files)
    assert says in text
    assert text.startswith("rows.jsonl:1: ")


def refuse(code: int, model: Path, files: Path, *options: object) -> str:
    """Calibrate on `rows.jsonl`, and require that it is refused and nothing is written."""
    out = files.parent / "out"
    before = list_files(files.parent)
    asked = ("--data", files / "rows.jsonl", *QUICK, *options)
    text = fail(code, "calibrate", model, *asked, "--out", out)
    assert list_files(files.parent) == before
    return text


def list_files(folder: Path) -> list[str]:
    """List the files of a folder with their times; a pipe among them cannot be read."""
    return sorted(f"{path} {path.lstat().st_mtime_ns}" for path in folder.rglob("*"))


def test_a_medium_for_a_model_of_text(model: Path, files: Path) -> None:
    """A part or a column is refused; --text-column leaves the column out, but no part."""
    says = "the row holds image, and the model takes text"
    write_rows(files / "rows.jsonl", [image("good.png")])
    assert says in refuse(5, model, files, "--seq-len", 64)
    assert says in refuse(5, model, files, "--seq-len", 64, "--text-column", "messages")
    write_rows(files / "rows.jsonl", [{"text": "w1 w2 w3", "images": ["none.png"]}])
    assert says in refuse(5, model, files, "--seq-len", 64)
    asked = ("--data", files / "rows.jsonl", *QUICK, "--seq-len", 64, "--text-column", "text")
    plan = succeed("calibrate", model, *asked, "--dry-run", "--json").json["plan"]
    assert (plan["rows"]["used"], plan["tokens"]) == (1, 4)


def test_places_for_media_without_media_are_pointed_out(
    models: dict[str, Path], files: Path
) -> None:
    """A column of another name is not read; the mark in the text is then a token of no image."""
    write_rows(
        files / "rows.jsonl", [{"text": "<image_soft_token> and?", "image_path": "good.png"}]
    )
    asked = ("--data", files / "rows.jsonl", *QUICK, "--dry-run")
    warned = succeed("calibrate", models[SEES], *asked).err
    assert "1 sequences of text hold tokens that stand for media, and no media" in warned


@pytest.mark.parametrize(
    ("name", "package", "row"),
    [
        (SEES, "PIL", image("good.png")),
        (HEARS, "soundfile", audio("good.wav")),
        (HEARS, "soxr", audio({"array": [0.5] * 900, "sampling_rate": 8000})),
    ],
)
def test_a_package_that_is_not_installed(
    models: dict[str, Path],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    package: str,
    row: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write_rows(files / "rows.jsonl", [row])
    text = refuse(2, models[name], files)
    assert "is not installed" in text
    assert 'pip install "fp8calib[' in text


# --- columns of datasets --------------------------------------------------------------------------


# --- processors ----------------------------------------------------------------------------------


def remove_processor(folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)


def write_template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def add_code(folder: Path) -> None:
    path = folder / "processor_config.json"
    own = {"auto_map": {"AutoProcessor": "own.OwnProcessor"}, "processor_class": "OwnProcessor"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (folder / "own.py").write_text("raise SystemExit('ran')")


def add_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<more_{index}>" for index in range(200)], special_tokens=True)
    tokenizer.save_pretrained(folder)


PROCESSORS: list[tuple[int, Callable[[Path], object], str]] = [
    (4, remove_processor, "holds no processor of media (looked for processor_config.json"),
    (
        4,
        lambda folder: (folder / "processor_config.json").write_text("[]"),
        "the processor of its media cannot be loaded",
    ),
    (4, add_code, "--trust-remote-code"),
    (5, add_tokens, "the text gives token "),
    (
        5,
        write_template("{% for m in messages %}{{ m.role }}: {{ m.content[1].text }}{% endfor %}"),
        "refuses the row (ValueError: ",
    ),
    (5, write_template("{{ raise_exception('no images here') }}"), "no images here"),
]


@pytest.mark.parametrize(("code", "damage", "says"), PROCESSORS)
def test_processors(
    models: dict[str, Path],
    files: Path,
    tmp_path: Path,
    code: int,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder = shutil.copytree(models[SEES], tmp_path / "damaged")
    damage(folder)
    rows = [image("good.png")]
    if damage is add_tokens:
        rows[0]["messages"][0]["content"].append({"type": "text", "text": "<more_199>"})
    write_rows(files / "rows.jsonl", rows)
    assert says in refuse(code, folder, files)
