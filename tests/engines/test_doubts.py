"""What `check` cannot tell without the engine: it is unknown, and neither a fault nor ok."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8calib
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.formats.kv.overlay import make_quantization_config
from tests import zoo
from tests.kit.checkpoints import change_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ("model-1.safetensors", "model-2.safetensors")
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doubts") / "llama"
    zoo.save("llama", folder)
    return folder


def configure(**changes: object) -> Edit:
    return lambda folder: change_config(folder, **changes)


def quantize(**weights: object) -> Edit:
    """Write a config of compressed-tensors, with more fields for weights."""
    section = {**make_quantization_config("tensor"), "kv_cache_scheme": None}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, **weights}
    group = {"targets": ["re:nothing"], "weights": scheme}
    return configure(quantization_config={**section, "config_groups": {"group_0": group}})


def write(name: str, document: object) -> Edit:
    return lambda folder: (folder / name).write_text(json.dumps(document))


def pickle(folder: Path) -> None:
    """Store the weights in a pickle alone."""
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def link(folder: Path) -> None:
    """Let a link out of the folder stand for the weights."""
    shutil.move(folder / SINGLE, folder.parent / "weights")
    (folder / SINGLE).symlink_to(folder.parent / "weights")


def shard(prefix: str) -> Edit:
    """Write two files and an index that names them with a prefix."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        weight_map = {name: PARTS["layers.1" in name] for name in tensors}
        for part in PARTS:
            held = {name: each for name, each in tensors.items() if weight_map[name] == part}
            save_file(held, folder / part, metadata={"format": "pt"})
        named = {name: f"{prefix}{part}" for name, part in weight_map.items()}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))

    return edit


def ask(folder: Path) -> dict[str, EngineReport]:
    report = fp8calib.check(folder, engine=["vllm", "sglang"])
    cannot_judge = not report.ok and all(each.status for each in _faults(report))
    assert (report.verdict == "unknown") is cannot_judge
    return dict(report.engines)


def _faults(report: fp8calib.CheckResult) -> list[EngineReport]:
    return [each for each in report.engines.values() if not each.ok]


DOUBTS: dict[str, tuple[Edit, str]] = {
    "a pickle": (pickle, "pickled"),
    "a link": (link, "link out of the folder"),
    "paths in the index": (shard("./"), "a path"),
    "another class": (configure(architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM"),
    "another model type": (configure(model_type="mistral"), "LlamaForCausalLM"),
    "another class first": (configure(architectures=["MyModel", "LlamaForCausalLM"]), "MyModel"),
    "a class of no library": (configure(architectures=["MineForCausalLM"]), "MineForCausalLM"),
    "a text for a class": (configure(architectures="Other"), "Other"),
    "no positions": (configure(max_position_embeddings=0), "max_position_embeddings: 0"),
    "a negative size": (configure(rms_norm_eps=-1.0), "rms_norm_eps: -1.0"),
    "layers of two kinds": (
        configure(layer_types=["sliding_attention", "full_attention"]),
        "layer_types, for which LlamaConfig has no use",
    ),
    "generation": (write("generation_config.json", {"max_new_tokens": -1}), "max_new_tokens"),
    "an order": (quantize(actorder="foo"), "actorder"),
}


@pytest.mark.parametrize("what", DOUBTS)
def test_what_is_unknown_is_no_fault(saved: Path, tmp_path: Path, what: str) -> None:
    edit, words = DOUBTS[what]
    folder = tmp_path / "x"
    shutil.copytree(saved, folder)
    edit(folder)

    for engine, report in ask(folder).items():
        assert report.status == "unknown"
        assert words in " ".join(report.unknown)
        assert all("vllm check" in why for why in report.unknown) is (engine == "vllm")


@pytest.mark.parametrize(
    "edit",
    [
        configure(dtype="float8_e4m3fn"),
        configure(head_dim=None),
        configure(eos_token_id=-1),
        configure(architectures=["Foo", "LlamaForCausalLM"]),
        shard(""),
        write("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}),
    ],
    ids=[
        "a dtype of FP8",
        "no head_dim",
        "no token that ends",
        "two classes",
        "an index",
        "a config of ModelOpt that is not read",
    ],
)
def test_what_engines_load_as_it_is_meant(saved: Path, tmp_path: Path, edit: Edit) -> None:
    """As vLLM 0.32 did."""
    folder = tmp_path / "x"
    shutil.copytree(saved, folder)
    quantize()(folder)
    edit(folder)

    assert all(report.ok for report in ask(folder).values())


@pytest.mark.parametrize(
    ("family", "key", "said"),
    [
        ("nanochat", "head_dim", "transformers refuses config.json: TypeError"),
        ("gpt_bigcode", "num_key_value_heads", "config.json says num_key_value_heads: null"),
        ("deepseek_v3", "topk_method", "config.json says topk_method: null"),
        # as Mistral 7B, Bloom and Gemma 4 have them, or a config with the fields of all models
        ("mistral", "sliding_window", ""),
        ("llama", "head_dim", ""),
        ("llama", "pad_token_id", ""),
        ("gpt2", "n_inner", ""),
        ("gemma4_text", "num_experts", ""),
    ],
)
def test_a_null_that_is_not_replaced_nor_switches_off_is_unknown(
    tmp_path: Path, family: str, key: str, said: str
) -> None:
    """In vLLM 0.32, TypeError; the class of ministral has head_dim: null itself.

    Before the first without a message, four are keys that the class does not know, or has null
    without them too.
    """
    zoo.save(family, tmp_path)
    configure(**{key: None})(tmp_path)

    unknown = ask(tmp_path)["vllm"].unknown

    assert bool(unknown) is bool(said)
    assert not said or unknown[0].startswith(said)


def test_a_negative_size_that_the_class_does_not_have_is_unknown(tmp_path: Path) -> None:
    """As vLLM 0.32 stopped at it (ValidationError)."""
    zoo.save("bloom", tmp_path)
    configure(max_position_embeddings=-8)(tmp_path)

    assert "config.json says max_position_embeddings: -8" in ask(tmp_path)["vllm"].unknown[0]


def test_vllm_stops_at_an_output_layer_of_its_own_in_gemma_as_quantize_writes_it(
    tmp_path: Path,
) -> None:
    zoo.save("gemma2", tmp_path / "m", tie_word_embeddings=False)
    fp8calib.quantize(tmp_path / "m", scheme="w8a16", out=tmp_path / "q")

    reports = ask(tmp_path / "q")
    assert reports["vllm"].weights is not None
    assert reports["vllm"].weights.status == "refused"
    assert reports["sglang"].status == "unknown"
