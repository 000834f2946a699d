"""Families that are not understood are refused in a message that names the reason."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8calib.errors import ModelError
from tests import zoo
from tests.architectures import families
from tests.architectures.test_vision_language import PARTS
from tests.cli.conftest import write_rows
from tests.cli.program import fail, run
from tests.doors import find_geometry, make_plan, run_calibration
from tests.truth import brute_force
from tests.zoo import draw


@pytest.mark.parametrize("family", sorted(families.REFUSED))
def test_a_family_that_is_not_understood_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """The message names the class or family, and what was looked for."""
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        run_calibration(tmp_path / "model", make_plan(draw([20])))


@pytest.mark.parametrize("family", ["longcat_flash", "minimax"])
def test_what_is_not_understood_is_refused_before_loading(family: str, tmp_path: Path) -> None:
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": draw([20])[0].tolist()}])
    with patch("fp8calib.calibration.job.load_model") as load:
        said = fail(4, "calibrate", tmp_path / "model", "--data", data, "--out", tmp_path / "out")
    assert not load.called
    assert re.search(message, said)


TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    # its output layer is called `decoder`
    "modernbert-decoder": {**TEXT, "intermediate_size": 48, "cls_token_id": 3, "sep_token_id": 4},
    # transformers does not let the head size of the whole be read where layers differ
    "gemma4_unified": {
        "text_config": {
            **TEXT,
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 2}},
            "model_type": "gemma4_unified_text",
        }
    },
    # its forward takes no text without images, and a parameter of it has three axes
    "blip-2": {
        "text_config": {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "model_type": "opt"},
        "vision_config": PARTS["vision"],
        "qformer_config": {**PARTS["vision"], "encoder_hidden_size": 32, "vocab_size": 128},
    },
}


def build(name: str, folder: Path) -> PreTrainedModel:
    config = transformers.CONFIG_MAPPING[name](**KINDS[name])
    kind = AutoModelForImageTextToText if name == "blip-2" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    found: PreTrainedModel = model
    return found


@pytest.mark.parametrize("name", KINDS)
def test_odd_types_are_calibrated_verified_and_quantized(name: str, tmp_path: Path) -> None:
    """The amax of K and V are those of the cache that the model fills."""
    model = build(name, tmp_path / "model")
    text = torch.randint(5, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in text))
    options = (tmp_path / "model", "--data", rows, "--seq-len", 16, "--device", "cpu")
    options = (*options, "--dtype", "bfloat16")  # as the model, whatever this processor has

    for command in (
        ("calibrate", *options, "--out", tmp_path / "out"),
        ("verify", *options),
        ("quantize", tmp_path / "model", "--scheme", "w8a16", "--out", tmp_path / "fp8"),
    ):
        done = run(*command)
        assert done.code == 0, done.err

    inner: Any = model.language_model if name == "blip-2" else model
    with torch.inference_mode():
        layers = inner(input_ids=text, use_cache=True).past_key_values.layers
    stats = load_file(tmp_path / "out" / "stats.safetensors")
    for index, layer in enumerate(layers):
        for role, states in (("k", layer.keys), ("v", layer.values)):
            (key,) = (
                key for key in stats if f"layers.{index}." in key and key.endswith(f".{role}/amax")
            )
            assert torch.equal(stats[key], states.float().abs().amax((0, 2, 3)))


_GPT2 = families.FAMILIES["gpt_bigcode"]
_OLD_FALCON = {"new_decoder_architecture": False, "alibi": False}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", families.FAMILIES["bloom"]),
    "dbrx": ("dbrx", families.FAMILIES["dbrx"]),
    "falcon": ("falcon", zoo.ZOO["falcon"]),
    "falcon, one KV head": ("falcon", {**_OLD_FALCON, "multi_query": True}),
    "falcon, ALiBi": ("falcon", {**_OLD_FALCON, "multi_query": False, "alibi": True}),
    "gpt2": ("gpt2", zoo.ZOO["gpt2"]),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt_bigcode, one KV head": ("gpt_bigcode", _GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "mpt": ("mpt", families.FAMILIES["mpt"]),
    "persimmon": ("persimmon", {"qk_layernorm": False}),
    "phi3": ("phi3", {}),
}


def silent_heads(x: np.ndarray) -> list[int]:
    """List the heads of a [1, H, S, D] tensor that are all zeros."""
    return [head for head in range(x.shape[1]) if not x[0, head].any()]


def silence(module: Any, rows: list[int]) -> None:
    """Zero output rows of a linear, and all of its bias."""
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    with torch.no_grad():
        weight[rows] = 0
        if module.bias is not None:
            module.bias.zero_()


def fused_linear(model: nn.Module) -> tuple[Any, int]:
    geometry = find_geometry(model)
    attention = geometry.layers[0].attention
    assert attention is not None
    return next(x for x in geometry.layers[0].linears if len(x.parts) == 3), attention.num_kv_heads


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_rows_of_a_head_feed_that_head_and_no_other(layout: str) -> None:
    """With the rows of one head zeroed, that head of q, k or v is zero and nothing else."""
    model = families.build(*LAYOUTS[layout])
    linear, num_kv_heads = fused_linear(model)
    module = model.get_submodule(linear.module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert [part.name for part in linear.parts] == ["q_proj", "k_proj", "v_proj"]
    for part in linear.parts:
        for unit in range(part.count):
            silence(module, part.rows(range(unit, unit + 1)))
            truth = brute_force.run(model, draw([12]))
            module.load_state_dict(before)
            key, value = truth.kv[0][0]
            copies = key.shape[1] // num_kv_heads
            silenced = list(range(unit * copies, (unit + 1) * copies))
            assert silent_heads(key) == (silenced if part.name == "k_proj" else [])
            assert silent_heads(value) == (silenced if part.name == "v_proj" else [])
            if truth.queries[0]:
                query = truth.queries[0][0]
                assert silent_heads(query) == ([unit] if part.name == "q_proj" else [])
