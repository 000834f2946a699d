"""Commands that are refused: the exit code, the kind of the error, and the word that it names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.cli.program import run
from tests.goldens.models import save, write_text

QUICK = "--samples 4 --seq-len 20 --dtype float32"
# {m} the model, {d} the text, {o} an output folder that does not exist, {s} statistics, {q} FP8
OPTIONS: dict[str, str] = {
    "calibrate {m} --data {d} --seq-len 129 --out {o}": "129",
    "calibrate {m} --data {d} --rule headroom --out {o}": "headroom",
    "calibrate {m} --data {d} --dtype int8 --out {o}": "int8",
    "calibrate {m} --data {d} --device tpu --out {o}": "tpu",
    "calibrate {m} --data {d} --memory nan --out {o}": "--memory",
    "calibrate {m} --data {d} --shard 3/2 --out {o}": "3/2",
    "calibrate {m} --data {d} --format nonsense --out {o}": "nonsense",
    "calibrate {m} --data {d} --recipe no-such --out {o}": "no-such",
    "calibrate {m} --data nowhere.jsonl --out {o}": "nowhere.jsonl",
    "calibrate {m} --data {d}@0 --out {o}": "@0",
    "calibrate ./nowhere --data {d} --out {o}": "./nowhere",
    "calibrate {q} --data {d} --shard 1/99 --out {o}": "1/99",
    "calibrate {m} --data {d} --samples 0 --out {o}": "--samples",
    "calibrate {m} --data {d} --tp 3 --format vllm-json --out {o}": "3",
    "calibrate {m} --data {d} --out {m}": "model",
    "calibrate {m} --data {d} --colour": "--colour",
    "verify {m} --data {d} --scales ./nowhere": "nowhere",
    "verify {m} --data {d} --engine nonsense": "nonsense",
    "verify {m} --data {d} --gate nonsense": "nonsense",
    "verify {m} --data {d} --scales {m}": "model",
    "verify {m} --data {d} --kv-cache-dtype-skip-layers 7": "7",
    "check ./nowhere": "nowhere",
    "check {m} --engine nonsense": "nonsense",
    "check {m} --engine vllm==0.1": "vllm==0.1",
    "check {m} --require-kv": "",
    "check {d}": "a file of scales",
    "check {m} --tp 3": "3",
    "quantize {m} --scheme nonsense --out {o}": "nonsense",
    "quantize {m} --scheme fp8-static --out {o}": "--stats",
    "quantize {m} --scheme fp8-block --format modelopt --out {o}": "modelopt",
    "quantize {m} --scheme fp8-dynamic --ignore *.no_such --out {o}": "no_such",
    "quantize {q} --scheme fp8-dynamic --out {o}": "quantized",
    "quantize {m} --scheme fp8-dynamic --layer-scheme *=nonsense --out {o}": "nonsense",
    "export {s} --format kv-overlay --out {o}": "--model",
    "export {s} --format rfc --tp 3 --out {o}": "3",
    "export ./nowhere --format rfc --out {o}": "nowhere",
    "export {m} --format rfc --out {o}": "model",
    "extract-kv-scales --quantized-model {q} --model {m} --save-path {o}": "scale",
    "extract-kv-scales --quantized-model ./nowhere --model {m} --save-path {o}": "nowhere",
    "extract-kv-scales --quantized-model {m} --model {m} --save-path {o}": "scale",
    "show ./nowhere": "nowhere",
    "show {d}": "rows.jsonl",
    "nonsense": "nonsense",
}


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        found = change(tensors.pop(name))
        more = {} if found is None else {name: found}
        save_file(tensors | more, path, metadata={"format": "pt"})

    return damage


def _spoil(x: torch.Tensor) -> torch.Tensor:
    x[3, 5] = float("nan")
    return x


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "torn config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "torn weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "model.safe"),
    "unknown type": (_config(model_type="martian"), "martian"),
    "an encoder": (_config(model_type="bert", architectures=["BertModel"]), "BertModel"),
    "another size": (_config(intermediate_size=50), "mlp"),
    "a missing weight": (_tensor(UP, lambda _: None), UP),
    "a weight of another shape": (_tensor(UP, lambda x: x[:-1].contiguous()), UP),
    "a weight that is NaN": (_tensor(UP, _spoil), UP),
}


def record(place: Path) -> Iterator[tuple[str, str, str]]:
    """Give the entries of all refusals."""
    model, data, out = place / "model", write_text(place / "rows.jsonl"), place / "out"
    save("llama", model)
    assert run("calibrate", model, "--data", data, *QUICK.split(), "--out", place / "c").code == 0
    dynamic = ("quantize", model, "--scheme", "fp8-dynamic", "--out", place / "fp8")
    assert run(*dynamic).code == 0
    paths = {
        "m": model,
        "d": data,
        "o": out,
        "s": place / "c/stats.safetensors",
        "q": place / "fp8",
    }
    for command, word in OPTIONS.items():
        yield "refusals", command, _refuse(command.format(**paths).split(), word, out)
    for name, (damage, word) in DAMAGES.items():
        folder = place / "damaged"
        shutil.copytree(model, folder)
        damage(folder)
        command = f"calibrate {folder} --data {data} {QUICK} --out {out}"
        yield "refusals", f"a model with {name}", _refuse(command.split(), word, out)
        shutil.rmtree(folder)


def _refuse(command: list[str], word: str, out: Path) -> str:
    """Run a command, and sum up its error; one that leaves something behind, says so."""
    outcome = run(*command, "--json")
    left = [path.name for path in out.parent.glob(f"{out.name}*") if path.name != out.name]
    report = json.loads(outcome.out)
    said = report.get("error", {})
    text = f"{said.get('message', '')} {said.get('hint', '')}"
    names = "names it" if word and word in text else "-"
    return f"{outcome.code} {said.get('kind', '-')} {names}{' leaves ' if left else ''}{left or ''}"
