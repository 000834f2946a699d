"""What `calibrate` refuses: one message, the right exit code, and nothing is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.program import fail
from tests.kit.checkpoints import WEIGHTS, change_config, change_tensors

Refused = Callable[..., str]
Damage = Callable[[Path], object]


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Give a copy of the model that a test may damage."""
    return shutil.copytree(model, tmp_path / "damaged")


# --- options -----------------------------------------------------------------------------------

OPTIONS = [
    ("--format vllm-json --tp 0", "--tp: must be greater than or equal to 1, not 0"),
    ("--rule percentile:nan", "--rule: rule 'percentile:nan': needs a number, 0 < P"),
    ("--device-map balanced", "--device-map balanced: must be auto"),
    ("--recipe w8a16 --format rfc", "does not observe K and V"),
    ("--recipe w8a8-dynamic --format rfc", "does not observe inputs and weights"),
    ("--recipe w8a16 --query-scale yes", "does not observe q"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS)
def test_options(refused: Refused, model: Path, options: str, says: str) -> None:
    text = refused(2, model, *options.split())
    assert says in text
    assert "Input should be" not in text


# --- recipes -----------------------------------------------------------------------------------

IGNORE = "name: mine\nobserve: {{ignore: ['{}']}}\n"
RECIPES = [
    (
        "name: mine\nobserv: {}\ndata: {samples: many, pack: [1]}\nscales: {rule: guess}\n",
        [
            "mine.yaml",
            "observ: unknown key",
            "data.samples: must be a valid integer, not 'many'",
            "data.pack: must be a valid boolean, not [1]",
            "scales.rule: unknown rule 'guess'",
        ],
    ),
    ("name: \xff\xfe", ["cannot be read as UTF-8"]),
    (IGNORE.format("*.no_such_module"), ["'*.no_such_module' matches no", "model.layers.0."]),
]


@pytest.mark.parametrize(("content", "says"), RECIPES)
def test_recipes(
    refused: Refused, model: Path, tmp_path: Path, content: str, says: list[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(content, encoding="latin-1")
    text = refused(3, model, "--recipe", tmp_path / "mine.yaml")
    assert not [words for words in says if words not in text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("formats: [kv-overlai]", "formats.0: unknown format kv-overlai"),
        ("tp: [2, 0]", "tp.1: must be greater than or equal to 1, not 0"),
    ],
)
def test_formats_and_degrees_of_a_recipe_are_its_own_faults(
    refused: Refused, model: Path, tmp_path: Path, line: str, message: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\n{line}\n")
    text = refused(3, model, "--recipe", recipe)
    assert f"{recipe}: {message}" in text
    assert ("did you mean kv-overlay?" in text) == line.startswith("formats")


def test_what_is_no_file_of_a_recipe(refused: Refused, model: Path, tmp_path: Path) -> None:
    text = refused(3, model, "--recipe", "no-such")
    assert "no-such is neither a shipped recipe nor a file" in text
    assert "w8a8-static" in text
    refused(3, model, "--recipe", tmp_path)


# --- data --------------------------------------------------------------------------------------

DATA = [
    (5, "rows.txt", b"", "rows.txt: no rows"),
    (5, "rows.jsonl", b'{"text": "w1"\n\n{"text": "w3"}\n{"x', "rows.jsonl:1: not JSON"),
    (5, "rows.jsonl", b'{"input_ids": [5]}', "no sequence of two tokens in 1 row\n"),
    (5, "rows.parquet", b"not parquet", "rows.parquet: not a readable parquet file"),
]


@pytest.mark.parametrize(("code", "name", "content", "says"), DATA)
def test_data(
    refused: Refused, model: Path, tmp_path: Path, code: int, name: str, content: Any, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in refused(code, model, "--data", tmp_path / name)


def test_data_that_is_no_regular_file(refused: Refused, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "a pipe or device" in refused(5, model, "--data", tmp_path / "pipe.jsonl")
    (tmp_path / "folder").mkdir()
    assert "holds no .jsonl" in refused(5, model, "--data", tmp_path / "folder")


@pytest.mark.parametrize(
    ("code", "spec", "says"),
    [
        *((2, spec, f"--data {spec}") for spec in ("", "hub:a:b:c:d")),
        (5, "hub:no/such", "hub:no/such, config default, split train: the hub cannot be reached"),
    ],
)
def test_specs_of_data(refused: Refused, model: Path, code: int, spec: str, says: str) -> None:
    assert says in refused(code, model, "--data", spec)


# --- models ------------------------------------------------------------------------------------


def write(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content, encoding="latin-1")


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def rename(name: str, other: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / other)


def configure(**entries: Any) -> Damage:
    return lambda folder: change_config(folder, **entries)


def replace(name: str, value: torch.Tensor | None) -> Damage:
    return lambda folder: change_tensors(folder, {name: value})


def spoil(name: str, place: Any, value: str) -> Damage:
    """Change one number of a weight, or one row."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[name][place] = float(value)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    rename(WEIGHTS, "b.safetensors")(folder)
    write("model.safetensors.index.json", '{"weight_map": {"lm_head.weight": "a.safetensors"}}')(
        folder
    )


UP, DOWN = (f"model.layers.{layer}.weight" for layer in ("1.mlp.up_proj", "0.mlp.down_proj"))
EMBEDDING = "model.embed_tokens.weight"
MODELS: dict[str, tuple[Damage, list[str]]] = {
    "a list for a config": (write("config.json", "[]"), ["config.json: not a JSON object"]),
    "a size in words": (
        configure(hidden_size="wide"),
        ["{}/config.json", "'hidden_size'", "'wide'"],
    ),
    "a missing shard": (lose_a_shard, ["1 of 1 shards are missing: a.safetensors"]),
    "pickled weights": (
        rename(WEIGHTS, "pytorch_model.bin"),
        ["pickled (pytorch_model.bin)", "convert them"],
    ),
    "an embedding of nan": (spoil(EMBEDDING, 77, "nan"), [f"{EMBEDDING} holds nan at [77, 0]"]),
    "a quantized text model": (
        configure(text_config={"quantization_config": {"quant_method": "awq"}}),
        ["already quantized (quant_method awq)", "unquantized model"],
    ),
    "no tokenizer": (remove("tokenizer.json"), ["holds no tokenizer", "input_ids"]),
    "Mistral's tokenizer alone": (
        rename("tokenizer.json", "tekken.json"),
        ["the tokenizer cannot be loaded", "pip install mistral-common"],
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_models(refused: Refused, folder: Path, what: str) -> None:
    damage, says = MODELS[what]
    damage(folder)
    text = refused(4, folder)
    assert not [words for words in says if words.replace("{}", str(folder)) not in text]
    assert "ignore_mismatched_sizes" not in text


PLACES = [
    *((name, f"no model folder at {name}") for name in ("./nowhere", "~nobody/model", "a/b/c")),
    *(
        (name, f"{name} is not a local folder; fetching it from the hub failed")
        for name in ("no/such", "no-such-model")
    ),
    ("x" * 300, ""),
    ("./" + "x" * 300, ""),
]


@pytest.mark.parametrize(("name", "says"), PLACES)
def test_places_of_models(refused: Refused, name: str, says: str) -> None:
    text = refused(4, name)
    assert says in text
    assert "did you mean" not in text


def test_a_name_that_is_nearly_that_of_a_folder(
    refused: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = f"{folder.name[:-1]}_"
    monkeypatch.chdir(folder.parent)
    for name in (near, f"./{near}", str(folder.parent / near)):
        suggested = Path(name).parent / folder.name
        assert f"did you mean {suggested}? " in refused(4, name)
    assert f"did you mean {folder}?" in fail(2, "check", folder.parent / near)


def test_what_is_no_folder_of_a_model(refused: Refused, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there are no *.safetensors weights" in refused(4, tmp_path / "empty")
    assert "is no model folder: Not a directory" in refused(4, folder / WEIGHTS)
    (folder / "model.gguf").write_bytes(b"GGUF")
    hint = "use the safetensors model that the GGUF was made from"
    assert hint in refused(4, folder / "model.gguf")
    assert hint in fail(4, "check", folder / "model.gguf")
    assert hint in fail(4, "show", folder / "model.gguf")


# --- the output --------------------------------------------------------------------------------


def test_outputs(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for out, says in (
        ("file", "a file, not a folder"),
        ("file/out", str(tmp_path / "file")),
        ("full", "thesis.tex"),
    ):
        assert says in refused(2, model, "--out", tmp_path / out)
