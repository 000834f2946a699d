"""Models, files and outputs by name, made when a command of a table first names them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.calibration import journal
from fp8calib.calibration.journal import Journal
from fp8calib.checkpoint import output
from fp8calib.cli.program import INTERRUPTED
from tests import int4_by_hand, zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import Outcome, run, succeed
from tests.cli.quantized_children import calibrate_base, save_child, save_int
from tests.kit.checkpoints import Tensors, change_config, change_quantization, change_tensors
from tests.kit.multimodal import draw_image, save_multimodal

Maker = Callable[["Places", Path], object]
"""Writes a folder or a file at a path, and returns another path if it is there."""
QUICK = "--data {data} --samples 4 --seq-len 16 --dtype float32"
STATS = "stats.safetensors"
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Places(Mapping[str, str]):
    """Paths by the names in braces of the table; most are made when they are first asked for."""

    def __init__(
        self, folder: Path, made: dict[str, Any], own: Mapping[str, Path] = NOTHING
    ) -> None:
        self._folder = folder
        self._made = made
        self._own = own

    def beside(self, own: Mapping[str, Path]) -> Places:
        """Give the same places, and those of one test."""
        return Places(self._folder, self._made, {**self._own, **own})

    def __getitem__(self, name: str) -> str:
        if name in self._own:
            return str(self._own[name])
        if name not in self._made:
            path = self._folder / name
            self._made[name] = MAKERS[name](self, path) or path
        return str(self._made[name])

    def __iter__(self) -> Iterator[str]:
        return iter({**self._made, **self._own})

    def __len__(self) -> int:
        return len({**self._made, **self._own})

    def fill(self, text: str) -> str:
        """Replace the names in a text by paths."""
        return text.replace("{quick}", QUICK).format_map(self)

    def run(self, command: str) -> Outcome:
        """Run a command, which has to succeed."""
        return succeed(*shlex.split(self.fill(command)))


def writes(command: str, inner: str = "") -> Maker:

    def make(places: Places, folder: Path) -> Path:
        places.run(f"{command} {folder}")
        return folder / inner

    return make


def changes(place: str, change: Callable[[Path], object]) -> Maker:

    def make(places: Places, folder: Path) -> None:
        shutil.copytree(places[place], folder)
        change(folder)

    return make


def scales(place: str, factors: Mapping[str, float]) -> Maker:

    def multiply(tensors: Tensors) -> Tensors:
        return {
            name: tensor * next(by for part, by in factors.items() if part in name)
            if any(part in name for part in factors)
            else tensor
            for name, tensor in tensors.items()
        }

    def edit(folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            change_tensors(folder, multiply, file.name)

    return changes(place, edit)


def rows(count: str, row: object) -> Maker:
    return lambda _, path: write_rows(path.with_suffix(".jsonl"), [row] * int(count))


def asks(part: dict[str, Any]) -> Maker:
    """Write conversations with an image or a sound, and a column of text."""

    def make(_: Places, path: Path) -> Path:
        if part["type"] == "image":
            part["image"].save(path.with_suffix(".png"))
            part["image"] = path.with_suffix(".png").name
        row = {"messages": [{"role": "user", "content": [part]}], "text": "w1 w2 w3"}
        return write_rows(path.with_suffix(".jsonl"), [row] * 3)

    return make


def builds(family: str, settings: Mapping[str, Any] = NOTHING) -> Maker:
    """Save a small model of a family, with a tokenizer."""

    def make(_: Places, folder: Path) -> None:
        zoo.save(family, folder, **settings)
        save_tokenizer(folder)

    return make


def configures(place: str, entries: Mapping[str, Any]) -> Maker:
    return changes(place, lambda folder: change_config(folder, **entries))


def save_scales(entries: Mapping[str, float] = NOTHING) -> Maker:
    """Write a file of scales that does not say which FP8 type they are for."""

    def make(_: Places, folder: Path) -> Path:
        path = folder.with_suffix(".safetensors")
        names = {
            f"model.layers.{layer}.self_attn.{role}_scale": torch.tensor(0.25)
            for layer in range(2)
            for role in "kv"
        }
        given = {name: torch.tensor(value) for name, value in entries.items()}
        save_file({**names, **given}, path)
        return path

    return make


def writes_text(text: str) -> Maker:
    def make(_: Places, path: Path) -> Path:
        path.with_suffix(".yaml").write_text(text.replace("\\n", "\n"))
        return path.with_suffix(".yaml")

    return make


def stops(command: str) -> Maker:
    """Interrupt a command before its output is in place, and after its first batch."""
    save_if_due = Journal.save_if_due

    def save_and_stop(self: Journal, *seen: Any) -> None:
        save_if_due(self, *seen)
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def make(places: Places, folder: Path) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "INTERVAL_S", 0.0)
            patch.setattr(Journal, "save_if_due", save_and_stop)
            patch.setattr(output, "_put_in_place", stop)
            words = shlex.split(places.fill(command))
            outcome = run(*words, "--out", folder)
        assert outcome.code == INTERRUPTED, outcome.err
        return folder

    return make


def quantize_to_int4(places: Places, folder: Path) -> None:
    int4_by_hand.quantize(Path(places["model"]), folder)


def builds_int4(family: str, settings: Mapping[str, Any] = NOTHING) -> Maker:
    def make(_: Places, folder: Path) -> None:
        zoo.save(family, folder.with_name(f"{folder.name}-plain"), **settings)
        int4_by_hand.quantize(folder.with_name(f"{folder.name}-plain"), folder)

    return make


def calibrates_base(_: Places, folder: Path) -> Path:
    folder.mkdir()
    return calibrate_base(folder) / STATS


def save_media(_: Places, folder: Path) -> None:
    """Write media that are damaged, and some that are not."""
    folder.mkdir()
    draw_image(0).save(folder / "good.png")
    png = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(png[: len(png) // 2])
    (folder / "good.wav").write_bytes(b"RIFF")
    os.mkfifo(folder / "pipe.png")


def hide_thoughts(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def set_to_one(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        ones = {n: t / t for n, t in load_file(path).items() if n.endswith("_scale")}
        change_tensors(folder, ones, path.name)


def change_scale(folder: Path, name: str, factor: float | None) -> None:
    """Multiply a tensor in the file that holds it; without a factor, drop it."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            new = None if factor is None else tensors[name] * factor
            change_tensors(folder, {name: new}, path.name)


K_SCALE = "model.layers.0.self_attn.k_scale"
CACHE_OF_INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor"}
VERBS: dict[str, Callable[..., Maker]] = {
    verb.__name__: verb
    for verb in (
        *(writes, stops, scales, configures, builds, builds_int4, rows, asks, save_scales),
        writes_text,
    )
}


def read_makers() -> Iterator[tuple[str, Maker]]:
    """Read `places.tsv`: a name, a verb, and what it takes, as text or JSON."""
    for line in Path(__file__).with_name("places.tsv").read_text().splitlines():
        name, verb, *given = line.split("\t")
        yield name, VERBS[verb](*(json.loads(x) if x[0] in "{[" else x for x in given))


MAKERS: dict[str, Maker] = {
    **dict(read_makers()),
    # models
    "int4": quantize_to_int4,
    "ones": changes("overlay", set_to_one),
    "seeing": lambda _, folder: save_multimodal("gemma3", folder),
    "hearing": lambda _, folder: save_multimodal("qwen2_audio", folder),
    "thinking": changes("model", hide_thoughts),
    # quantized
    "int8_cache": changes(
        "fp8", lambda folder: change_quantization(folder, kv_cache_scheme=CACHE_OF_INT8)
    ),
    "no_k_scale": changes("kv8", lambda folder: change_scale(folder, K_SCALE, None)),
    "odd": changes("overlay", lambda folder: change_scale(folder, K_SCALE, 1e6)),
    "child": lambda _, folder: save_child("compressed-tensors", folder),
    "modelopt_child": lambda _, folder: save_child("ModelOpt", folder),
    "int4_child": lambda _, folder: save_int(folder, 4),
    # statistics, text and media
    "base_stats": calibrates_base,
    "page": lambda places, path: writes("verify {model} {quick} --report")(
        places, path.with_suffix(".html")
    ),
    "picture": asks({"type": "image", "image": draw_image(0)}),
    "media": save_media,
    "ids": lambda _, path: write_rows(
        path.with_suffix(".jsonl"),
        [{"input_ids": [3 + i * j % 60 for j in range(20)]} for i in range(4)],
    ),
    "one": rows("1", {"text": " ".join(f"w{i}" for i in range(50))}),
}
