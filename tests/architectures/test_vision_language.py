"""Models that see: the text decoder is calibrated, the rest is listed, names are those on disk."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.architectures.families import FAMILIES, SIZES, build
from tests.cli.conftest import write_rows
from tests.cli.program import fail
from tests.doors import Role, find_text_decoder, list_parameters, make_plan, run_calibration
from tests.truth import brute_force
from tests.zoo import NEEDS_5_23, draw

SEEING = yaml.safe_load(Path(__file__).with_name("seeing.yaml").read_text())
PARTS: dict[str, dict[str, Any]] = SEEING["parts"]
MODELS: dict[str, dict[str, Any]] = SEEING["models"]


def make_config(family: str) -> Any:
    known = MODELS[family]
    text = {**known["text"], **FAMILIES.get(known.get("family", ""), {})}
    return AutoConfig.for_model(family, text_config=text, vision_config=known["vision"])


@pytest.mark.parametrize("family", sorted(MODELS))
def test_the_text_decoder_is_calibrated_and_the_rest_is_listed(family: str, tmp_path: Path) -> None:
    """K and V equal those of the whole model given text; scales are named by the keys on disk."""
    layers, beside = MODELS[family]["layers"], MODELS[family]["beside"]
    torch.manual_seed(0)
    config = make_config(family)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    sequences = draw([20, 20])
    prepared, stats = run_calibration(tmp_path / "model", make_plan(sequences))
    truth = brute_force.run(model, sequences)
    assert truth.kv
    for layer, attention in prepared.geometry.attentions():
        keys, values = zip(*truth.kv[layer.index], strict=True)
        for role, tensors in ((Role.K, keys), (Role.V, values)):
            expected = brute_force.head_amax(list(tensors), attention.num_kv_heads)
            found = stats.sites[attention.site(role)].amax.numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert attention.checkpoint_module == f"{layers}.{layer.index}.self_attn"
    with safe_open(tmp_path / "model" / "model.safetensors", framework="np") as file:
        names = set(file.keys())
    for _, attention in prepared.geometry.attentions():
        assert f"{attention.checkpoint_module}.k_proj.weight" in names
    assert {*beside} <= {item.site for item in stats.header.skipped}
    assert not any("vis" in site.module for site in stats.sites)


def test_a_text_only_class_never_runs_its_lm_head() -> None:
    """Llama4ForCausalLM names itself as its decoder; the model below it is what is run."""
    path, decoder = find_text_decoder(build("llama4_text", FAMILIES["llama4_text"]))
    assert (path, type(decoder).__name__) == ("model", "Llama4TextModel")


@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_model_without_weights_is_the_one_that_is_loaded(family: str, tmp_path: Path) -> None:
    """Qwen3.5 and Llama 4 are built from the text decoder's config alone, also before loading."""
    AutoModelForImageTextToText.from_config(make_config(family)).save_pretrained(tmp_path)
    assert list_parameters(tmp_path, loaded=False) == list_parameters(tmp_path, loaded=True)


@pytest.mark.parametrize(
    ("family", "text", "vision", "message"),
    [
        (
            "mllama",
            {**SIZES, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            PARTS["mllama"],
            r"MllamaForConditionalGeneration \(mllama_text_model\): its cross-attention",
        ),
        pytest.param(
            "hunyuan_vl",
            {**SIZES, "head_dim": 8},
            PARTS["hunyuan"],
            r"HunYuanVLForConditionalGeneration \(hunyuan_vl_text\): its text decoder does not run",
            marks=NEEDS_5_23,
        ),
    ],
)
def test_a_decoder_that_does_not_run_on_text_is_refused_before_loading(
    family: str, text: dict[str, Any], vision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": draw([20])[0].tolist()}])
    with patch("fp8calib.calibration.job.load_model") as load:
        said = fail(4, "calibrate", tmp_path, "--data", data, "--out", tmp_path / "out")
    assert not load.called
    assert re.search(message, said)
