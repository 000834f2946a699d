"""A tiny model with a tokenizer, its data, and one calibration of it: built once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests import zoo
from tests.cli.program import Outcome, fail, snapshot, succeed

if TYPE_CHECKING:
    from tests.cli.places import Places

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
WORDS = ["<s>", "</s>", "<unk>", "user", "assistant", ":", *(f"w{i}" for i in range(90))]
QUICK = ("--samples", 4, "--seq-len", 16, "--dtype", "float32")
ALL_FORMATS = ("kv-overlay", "kv-overlay-head", "tgi", "kv-scales", "vllm-json", "rfc")


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    """Make requests to the hub fail at once, even if the machine has a network; hide its bars."""
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # for libraries that are imported later
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def save_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[2])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=words[0], eos_token=words[1], unk_token=words[2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_changed(model: Path, folder: Path, change: Callable[[Any], object], **sizes: Any) -> Path:
    """Copy the folder of the tiny llama, with a model that `change` edits."""
    shutil.copytree(model, folder)
    llama = zoo.build("llama", **sizes)
    with torch.no_grad():
        change(llama)
    llama.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama with two layers, 4 heads, 2 KV heads and 48 MLP channels, and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    zoo.save("llama", folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 60 rows of 40 tokens each, including BOS."""
    rows = [{"text": " ".join(f"w{i * j % 90}" for j in range(1, 40))} for i in range(60)]
    return write_rows(tmp_path_factory.mktemp("data") / "calib.jsonl", rows)


@pytest.fixture(scope="session")
def calibrated(
    model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """Calibrate once: the output folder with every format for 1 and 2 ranks, and the outcome."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    formats = [part for name in ALL_FORMATS for part in ("--format", name)]
    command = ("calibrate", model, "--data", data, *QUICK, *formats, "--tp", 1, "--tp", 2)
    return out, succeed(*command, "--out", out, "--json")


@pytest.fixture
def refused(tmp_path: Path, data: Path) -> Callable[..., str]:
    """Calibrate, require an exit code, and that the parent of the output folder is unchanged."""

    def calibrate(code: int, model: object, *options: object, rows: Path | None = None) -> str:
        before = snapshot(tmp_path)
        asked = options if "--data" in options else ("--data", rows or data, *options)
        out = () if "--out" in options else ("--out", tmp_path / "out")
        text = fail(code, "calibrate", model, *QUICK, *asked, *out)
        assert snapshot(tmp_path) == before
        return text

    return calibrate


@pytest.fixture(scope="session")
def made(
    model: Path,
    data: Path,
    calibrated: tuple[Path, Outcome],
    tmp_path_factory: pytest.TempPathFactory,
) -> Places:
    from tests.cli.places import Places  # noqa: PLC0415 -- it imports this file

    out, _ = calibrated
    given = {"model": model, "data": data, "calibrated": out, "overlay": out / "kv-overlay"}
    folder = tmp_path_factory.mktemp("made")
    return Places(folder, {**given, "made": folder, "stats": out / "stats.safetensors"})


@pytest.fixture
def places(made: Places, tmp_path: Path) -> Places:
    """Give the places of all tests, and those of this one."""
    (tmp_path / "folder").mkdir()
    return made.beside({name: tmp_path / name for name in ("out", "new", "folder")})
