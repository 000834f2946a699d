"""Models that cannot be calibrated: one message, the right exit code, nothing written."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.cli.conftest import QUICK, save_tokenizer, write_rows
from tests.cli.program import fail, succeed

Refused = Callable[..., str]
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Give a copy of the model that a test may damage."""
    return shutil.copytree(model, tmp_path / "damaged")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors, or drop those given as None."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


# --- the folder --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "~nobody/model", "a/b/c", "x y"])
def test_a_missing_folder(refused: Refused, name: str) -> None:
    assert f"no model folder at {name}" in refused(4, name)


@pytest.mark.parametrize("name", ["no/such", "no-such-model"])
def test_a_hub_name_without_a_network(refused: Refused, name: str) -> None:
    text = refused(4, name)
    assert f"{name} is not a local folder; fetching it from the hub failed" in text
    assert "did you mean" not in text
    assert "pass a local folder" in text


def test_a_name_that_is_nearly_that_of_a_folder(
    refused: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = f"{folder.name[:-1]}_"
    monkeypatch.chdir(folder.parent)
    for name in (near, f"./{near}", str(folder.parent / near)):
        suggested = Path(name).parent / folder.name
        assert f"did you mean {suggested}? " in refused(4, name)
    assert f"did you mean {folder}?" in fail(2, "check", folder.parent / near)


def test_a_name_longer_than_a_file_system_allows(refused: Refused) -> None:
    refused(4, "x" * 300)
    refused(4, "./" + "x" * 300)


def test_an_empty_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "the folder is empty" in refused(4, tmp_path / "empty")


def test_a_file_in_place_of_a_folder(refused: Refused, folder: Path) -> None:
    assert "a file, not a model folder" in refused(4, folder / WEIGHTS)
    (folder / "model.gguf").write_bytes(b"GGUF")
    hint = "use the safetensors model that the GGUF was made from"
    assert hint in refused(4, folder / "model.gguf")
    assert hint in fail(4, "check", folder / "model.gguf")
    assert hint in fail(4, "show", folder / "model.gguf")


# --- config.json -------------------------------------------------------------------------------


def test_no_config(refused: Refused, folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "there is no config.json" in refused(4, folder)


@pytest.mark.parametrize("content", ["{ torn", "", "\xff"])
def test_a_config_that_is_no_json(refused: Refused, folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert f"{folder}/config.json: cannot be read as JSON" in refused(4, folder)


def test_a_config_that_is_a_list(refused: Refused, folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    assert "config.json: not a JSON object" in refused(4, folder)


def test_an_empty_config(refused: Refused, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert "config.json has no model_type" in refused(4, folder)


def test_an_unknown_architecture(refused: Refused, folder: Path) -> None:
    change_config(folder, model_type="warp-drive", architectures=["WarpDriveForCausalLM"])
    text = refused(4, folder)
    assert "model_type warp-drive" in text
    assert f"transformers {transformers.__version__}" in text


def test_a_config_with_a_value_that_cannot_be(refused: Refused, folder: Path) -> None:
    change_config(folder, hidden_size="wide")
    text = refused(4, folder)
    assert f"{folder}/config.json" in text
    assert "'hidden_size'" in text
    assert "'wide'" in text


def test_a_config_whose_model_cannot_be_built(refused: Refused, folder: Path) -> None:
    change_config(folder, hidden_act="no-such-function")
    assert "no-such-function" in refused(4, folder)


# --- weights -----------------------------------------------------------------------------------


def test_truncated_weights(refused: Refused, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    text = refused(4, folder)
    assert f"{path}: truncated" in text
    assert "download or copy the file again" in text


@pytest.mark.parametrize("size", [0, 5, 200])
def test_weights_torn_in_their_header(refused: Refused, folder: Path, size: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path}: truncated" in refused(4, folder)


def test_a_header_that_lies(refused: Refused, folder: Path) -> None:
    path = folder / WEIGHTS
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [33]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert "model.norm.weight" in refused(4, folder)
    path.write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])
    assert "not a safetensors file" in refused(4, folder)


def test_an_index_that_names_a_missing_shard(refused: Refused, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "sharded", max_shard_size="40KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    text = refused(4, tmp_path / "sharded")
    assert "shards are missing" in text
    assert shard.name in text


def test_pickled_weights_are_never_read(refused: Refused, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    text = refused(4, folder)
    assert "pickled (pytorch_model.bin)" in text
    assert "convert them" in text


def test_no_weights(refused: Refused, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "there are no *.safetensors weights" in refused(4, folder)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_weight_that_is_no_number(refused: Refused, folder: Path, value: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / WEIGHTS)[name]
    weight[3, 5] = float(value)
    change_weights(folder, **{name: weight})
    assert f"{name} holds {value} at [3, 5]" in refused(4, folder)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"]
)
def test_a_weight_that_is_missing(refused: Refused, folder: Path, name: str) -> None:
    change_weights(folder, **{name: None})
    assert name in refused(4, folder)


def test_a_weight_of_another_shape(refused: Refused, folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(folder, **{name: torch.zeros(32, 47)})
    text = refused(4, folder)
    assert name in text
    assert "[32, 47]" in text
    assert "[32, 48]" in text
    assert "ignore_mismatched_sizes" not in text


def test_an_expert_that_is_missing(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    zoo.save("mixtral", folder)
    save_tokenizer(folder)
    change_weights(folder, **{"model.layers.0.block_sparse_moe.experts.1.w1.weight": None})
    text = refused(4, folder)
    assert "experts" in text
    assert "report" not in text


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_activation_that_is_no_number(
    refused: Refused, folder: Path, tmp_path: Path, value: str
) -> None:
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    embedding[77] = float(value)
    change_weights(folder, **{"model.embed_tokens.weight": embedding})
    tokens = [5] * 64
    tokens[2 * 16 + 3] = 77  # in the third sequence
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": tokens}])
    text = refused(4, folder, "--data", rows)
    assert f"model.embed_tokens.weight holds {value} at [77, 0]" in text
    blind = tmp_path / "blind.yaml"
    blind.write_text("name: blind\nobserve: {weights: false}\n")
    options = ["--data", rows, "--recipe", blind]
    text = refused(6, folder, *options)
    assert "model.layers.0" in text
    assert "at sample 2 (counting from 0)" in text
    text = refused(6, folder, *options, "--batch-size", 2, "--no-pack", "--seq-len", 100)
    assert "at sample 0" in text


# --- architectures -----------------------------------------------------------------------------

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 96}


@pytest.mark.parametrize(
    ("family", "sizes", "architecture"),
    [
        ("bert", {**BERT, "intermediate_size": 48}, "BertModel"),
        ("t5", T5, "T5ForConditionalGeneration"),
    ],
)
def test_encoders_are_refused_by_name(
    refused: Refused, tmp_path: Path, family: str, sizes: dict[str, int], architecture: str
) -> None:
    config = transformers.AutoConfig.for_model(family, **sizes)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path / family)
    save_tokenizer(tmp_path / family)
    text = refused(4, tmp_path / family)
    assert f"{architecture} (model_type {family}) is not a decoder-only language model" in text


@pytest.mark.parametrize("method", ["gptq", "fp8", "compressed-tensors"])
def test_a_quantized_checkpoint_names_its_method(
    refused: Refused, folder: Path, method: str
) -> None:
    change_config(folder, quantization_config={"quant_method": method})
    text = refused(4, folder)
    assert f"already quantized (quant_method {method})" in text
    assert "unquantized model" in text


def test_a_text_config_may_be_quantized_too(refused: Refused, folder: Path) -> None:
    change_config(folder, text_config={"quantization_config": {"quant_method": "awq"}})
    assert "quant_method awq" in refused(4, folder)


# --- tokenizer ---------------------------------------------------------------------------------


def test_no_tokenizer(refused: Refused, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = refused(4, folder)
    assert "holds no tokenizer" in text
    assert "input_ids" in text


@pytest.mark.parametrize("content", ["{ torn", "{}", "[]", '{"version": "1.0"}'])
def test_a_broken_tokenizer(refused: Refused, folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert f"{folder}: the tokenizer cannot be loaded" in refused(4, folder)


def test_a_tokenizer_larger_than_the_embedding(refused: Refused, folder: Path) -> None:
    save_tokenizer(folder, ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(126))])
    assert "the tokenizer has 129 tokens, the embedding 128 rows" in refused(4, folder)


# --- code that comes with a checkpoint ---------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).write_text("ran")
class CarriedConfig(LlamaConfig):
    model_type = "carried"
class CarriedForCausalLM(LlamaForCausalLM):
    config_class = CarriedConfig
"""


@pytest.fixture
def carried(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a checkpoint whose own Python code writes the file `ran` when it is imported."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "carried.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    names = {
        "AutoConfig": "carried.CarriedConfig",
        "AutoModelForCausalLM": "carried.CarriedForCausalLM",
    }
    change_config(
        folder, model_type="carried", architectures=["CarriedForCausalLM"], auto_map=names
    )
    return folder


def test_carried_code_is_not_run_unasked(refused: Refused, carried: Path, tmp_path: Path) -> None:
    text = refused(4, carried)
    assert "model_type carried needs the Python code of the checkpoint" in text
    assert "--trust-remote-code" in text
    assert not (tmp_path / "ran").exists()


def test_carried_code_runs_when_trusted(carried: Path, data: Path, tmp_path: Path) -> None:
    command = ("calibrate", carried, "--data", data, *QUICK, "--trust-remote-code")
    report = succeed(*command, "--out", tmp_path / "out", "--json").json
    assert (tmp_path / "ran").read_text() == "ran"
    assert report["architecture"] == "CarriedForCausalLM"
    assert report["coverage"]["observed"] == 34


def test_code_beside_a_known_architecture_is_not_run(
    carried: Path, data: Path, tmp_path: Path
) -> None:
    change_config(carried, model_type="llama", architectures=["LlamaForCausalLM"])
    succeed("calibrate", carried, "--data", data, *QUICK, "--dry-run")
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer_is_not_run_unasked(
    refused: Refused, carried: Path, tmp_path: Path
) -> None:
    change_config(carried, model_type="llama", architectures=["LlamaForCausalLM"], auto_map={})
    path = carried / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "CarriedTokenizer",
        "auto_map": {"AutoTokenizer": [None, "carried.CarriedTokenizer"]},
    }
    path.write_text(json.dumps(config))
    assert "--trust-remote-code" in refused(4, carried)
    assert not (tmp_path / "ran").exists()
