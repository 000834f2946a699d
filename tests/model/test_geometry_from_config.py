"""The rows of common models beside what the libraries say of drawn configs."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.model.config_faults import find_config_faults
from fp8calib.model.geometry_from_class import build_geometry
from fp8calib.model.geometry_from_config import (
    FAMILIES,
    is_plain,
    read_plain_geometry,
    read_whole_geometry,
)
from fp8calib.model.load import build_skeleton, open_source
from fp8calib.model.prepared import prepare
from tests import zoo

_DRAWS = 40
_ODD: tuple[Any, ...] = (None, 0, -1, 1, 2.5, "silu", True, [], [3], {}, 1 << 40, "bfloat16")
"""Values that any key may have by mistake."""
_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 10000.0},
    {"rope_theta": 500000, "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "dynamic"}},
)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}
_ARGUMENTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def draw_config(drawn: random.Random, family: str) -> dict[str, Any]:
    """Draw a small config, mostly a plain one."""
    kv_heads = drawn.choice([1, 2, 4])
    layers = drawn.randint(1, 12)
    window = drawn.choice([{}, {"sliding_window": drawn.choice([16, None])}])
    types = [drawn.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    own = {
        "attention_bias": drawn.random() < 0.5,
        "mlp_bias": drawn.random() < 0.5,
        "use_sliding_window": drawn.random() < 0.2,
        "layer_types": drawn.choice([types, ["full_attention"] * layers]),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "pretraining_tp": 1,
    }
    config: dict[str, Any] = {
        "architectures": [f"{FAMILIES[family].name}ForCausalLM"],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": drawn.choice([48, 96]),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * drawn.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "dtype": "bfloat16",
        **drawn.choice(_ROPES),
        **(window if "sliding_window" in FAMILIES[family].keys else {}),
    }
    if drawn.random() < 0.5:
        config["head_dim"] = drawn.choice([8, 32])
    if drawn.random() < 0.7:
        config["tie_word_embeddings"] = drawn.random() < 0.5
    if drawn.random() < 0.7:
        config |= {"pad_token_id": drawn.choice([None, 0, 60]), "eos_token_id": [1, 2]}
    config |= {k: v for k, v in own.items() if k in FAMILIES[family].keys and drawn.random() < 0.4}
    if drawn.random() < 0.3:
        config[drawn.choice(list(config))] = drawn.choice(_ODD)
    if drawn.random() < 0.1:
        config[drawn.choice(["layer_types", "sliding_window", "auto_map", "n_inner"])] = None
    return config


def save_drawn(
    folder: Path, config: dict[str, Any], names: list[str], drawn: random.Random
) -> None:
    """Write tensors of these names, some missing, with scales and strays beside them."""
    kept = [name for name in names if drawn.random() > 0.02]
    linears = [name for name in kept if name.endswith("proj.weight")]
    if drawn.random() < 0.5:
        kept += [f"{name}_scale" for name in linears]
        paths = {name.rpartition(".self_attn.")[0] for name in linears if "self_attn" in name}
        kept += [f"{path}.self_attn.{role}_scale" for path in paths for role in "kv"]
    if drawn.random() < 0.2:
        kept.append(drawn.choice(["extra", "model.layers.99.mlp.up_proj.weight_scale", "lm_head"]))
    save_file({name: torch.zeros(1) for name in kept}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_gives_the_geometry_and_the_doubts_of_transformers(
    tmp_path: Path, family: str
) -> None:
    drawn, settled = random.Random(family), 0  # noqa: S311
    for _ in range(_DRAWS):
        config = draw_config(drawn, family)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        try:
            names = [*build_geometry(tmp_path, config).parameters]
        except ModelError:
            names = []
        save_drawn(tmp_path, config, names, drawn)
        if is_plain(tmp_path, config):
            assert find_config_faults(tmp_path, config) == ("", []), config
        found = read_plain_geometry(tmp_path, config)
        if found is not None:
            settled += 1
            assert found == build_geometry(tmp_path, config), config
            assert list(found.parameters) == list(build_geometry(tmp_path, config).parameters)
    assert settled >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_has_the_layers_that_a_run_finds(tmp_path: Path, family: str) -> None:
    zoo.save(family, tmp_path)
    with Checkpoint.open(tmp_path) as stored:
        whole = read_whole_geometry(stored, stored.load_config())
        run = prepare(build_skeleton(open_source(str(tmp_path))), stored).geometry
    assert whole is not None
    assert (whole.layers, whole.checkpoint_dtype) == (run.layers, run.checkpoint_dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    name, value = tensors.popitem()
    for change in ({}, {name: value[:1]}, {name: value, "more": -value}, {name: value.char()}):
        save_file(tensors | change, tmp_path / "model.safetensors", {"format": "pt"})
        with Checkpoint.open(tmp_path) as stored:
            assert read_whole_geometry(stored, stored.load_config()) is None, change


@pytest.mark.parametrize("seed", range(4))
def test_plain_sections_are_accepted_by_the_libraries(tmp_path: Path, seed: int) -> None:
    drawn, settled = random.Random(seed), 0  # noqa: S311
    for _ in range(80):
        config = draw_section(drawn)
        generation = {
            "temperature": drawn.choice([0.6, 1.0, 3.0]),
            "top_p": drawn.choice([0.9, 1.0, 1.5]),
            "top_k": drawn.choice([0, 1, 20]),
            "do_sample": drawn.random() < 0.5,
            "eos_token_id": drawn.choice([1, [1, 2], None]),
        }
        keys = drawn.sample(sorted(generation), drawn.choice([0, 1, 5]))
        chosen = {key: generation[key] for key in keys}
        (tmp_path / "generation_config.json").write_text(json.dumps(chosen))
        if is_plain(tmp_path, config):
            settled += 1
            assert find_config_faults(tmp_path, config) == ("", []), (chosen, config)
    assert settled > 4


def draw_section(drawn: random.Random) -> dict[str, Any]:
    """Draw a plain Llama with a section of compressed-tensors, mostly a usual one."""

    def draw_scheme(strategies: list[str]) -> dict[str, Any] | None:
        scheme = {**_ARGUMENTS, "strategy": drawn.choice(strategies)}
        scheme["dynamic"] = scheme["strategy"] == "token"
        if scheme["strategy"] in ("block", "group"):
            scheme |= {"block": {"block_structure": [128, 128]}, "group": {"group_size": 128}}[
                scheme["strategy"]
            ]
            scheme["dynamic"] = scheme["strategy"] == "group"
        names = ["minmax", None, "mse", "static_minmax", "memoryless_minmax", "memoryless_mse"]
        more = {"observer": drawn.choice(names), "scale_dtype": None, "zp_dtype": None}
        more |= {"actorder": None, "observer_kwargs": {}}
        scheme |= {k: v for k, v in more.items() if drawn.random() < 0.3}
        if drawn.random() < 0.1:
            scheme[drawn.choice(list(scheme))] = drawn.choice([None, 4, "int", "group", [8], False])
        return drawn.choice([scheme, scheme, scheme, None])

    group = {
        "targets": drawn.choice([["Linear"], ["re:.*"]]),
        "weights": draw_scheme(["tensor", "channel", "block"]),
        "input_activations": draw_scheme(["tensor", "token", "group"]),
        "output_activations": None,
    }
    section = {
        "quant_method": "compressed-tensors",
        "format": drawn.choice(["float-quantized", "naive-quantized", "dense"]),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": draw_scheme(["tensor", "attn_head"]),
        "ignore": drawn.choice([["lm_head"], [], [1]]),
    }
    more = {"sparsity_config": {}, "transform_config": {}, "version": "0.19.0"}
    section |= {k: v for k, v in more.items() if drawn.random() < 0.3}
    return {**_LLAMA, **({"quantization_config": section} if drawn.random() < 0.7 else {})}
