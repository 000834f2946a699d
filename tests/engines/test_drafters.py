"""Drafters stay in 16 bits unless they are asked for, and are judged like the rest."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.model.drafters import name_in_vllm, number_layer
from tests import zoo
from tests.cli.program import run as program
from tests.cli.program import succeed
from tests.engines.test_check_weights import ask
from tests.kit.checkpoints import Tensors, change_config, change_tensors

PLACES = {
    "deepseek_v3": "model.layers.2.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "glm4_moe": "model.layers.2.",
    "glm4_moe_lite": "model.layers.2.",
    "qwen3_next": "mtp.layers.0.",
    "qwen3_5_text": "mtp.layers.0.",
}
KEYS = {"mtp": "mtp_num_hidden_layers", "model": "num_nextn_predict_layers"}
OUTER = {"mtp": "mtp.fc", "model": "model.layers.2.eh_proj"}
LAST = "model.layers.1."
LATENT = ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
ASKED = {
    # where the drafter is stored: what it copies, and what vLLM 0.32.0 and SGLang 0.5.23 ask for
    # (`ernie_mtp.py`, `qwen4_exp/`, `mimo_mtp.py`, `longcat_flash_mtp.py`, `deepseek_mtp.py`,
    # `step3p5_mtp.py`; `ernie4_eagle.py`, `mimo_mtp.py`, `longcat_flash_nextn.py`,
    # `deepseek_nextn.py`), without `self_attn`
    "model.mtp_block.0.": ("ernie4_5_moe", "model.layers.2.", "model.mtp_block."),
    "mtp.layers.0.": ("qwen3", "mtp.layers.2.", ""),
    "model.mtp_layers.0.": ("qwen2", "model.layers.2.", ""),
    "model.mtp.layers.0.transformer_layer.": ("qwen3", "model.layers.2.", ""),
    "model.layers.2.": ("deepseek_v3", "model.layers.2.", "model.decoder."),
    "model.layers.3.": ("qwen2", "model.layers.3.mtp_block.", "model.mtp_block."),
}
both = pytest.mark.parametrize("engine", ["vllm", "sglang"])
by_family = pytest.mark.parametrize("family", PLACES)


def copy_last_layer(folder: Path, place: str, **more: torch.Tensor) -> Path:
    """Store the last layer again under other names, and more tensors; give the file."""
    (file,) = folder.glob("*.safetensors")

    def add(tensors: Tensors) -> Tensors:
        last = {name: each for name, each in tensors.items() if name.startswith(LAST)}
        copies = {name.replace(LAST, place): each.clone() for name, each in last.items()}
        return {**tensors, **copies, **more}

    change_tensors(folder, add, file.name)
    return file


def save(folder: Path, family: str, *, promised: bool = True, stored: bool = True) -> Path:
    """Save a model whose drafter is a copy of its last layer, and a linear before it."""
    model = zoo.save(family, folder)
    root = PLACES[family].partition(".")[0]
    change_config(folder, **dict.fromkeys(KEYS.values()))
    if promised:
        change_config(folder, **{KEYS[root]: 1})
    if stored:
        hidden = model.get_input_embeddings().weight.shape[1]
        outer = torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)
        copy_last_layer(folder, PLACES[family], **{f"{OUTER[root]}.weight": outer})
    return folder


def quantize(model: Path, out: Path, *options: str, scheme: str = "fp8-dynamic") -> dict[str, Any]:
    """Quantize a model, and give its quantization_config."""
    succeed("quantize", model, "--scheme", scheme, *options, "--out", out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    return cast("dict[str, Any]", config)


def list_drafted(folder: Path, family: str) -> dict[str, torch.dtype]:
    """List the dtypes of the drafter's matrices."""
    (file,) = folder.glob("*.safetensors")
    start = PLACES[family]
    held = {name: each for name, each in load_file(file).items() if name.startswith(start)}
    return {name: each.dtype for name, each in held.items() if each.ndim == 2}


def ignores(entries: list[str], module: str, *, ends: bool, packed: bool = True) -> bool:
    """Match as should_ignore_layer does: in SGLang (`ends`) an entry may be the end of a path."""
    parent, _, own = module.rpartition(".")
    for entry in entries:
        is_named = entry == module or (ends and module.endswith(f".{entry}"))
        if re.match(entry[3:], module) if entry.startswith("re:") else is_named:
            return True
    if not packed or own not in PARTS:
        return False
    parts = (f"{parent}.{each}" for each in PARTS[own])
    found = {ignores(entries, each, ends=ends) for each in parts}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("place", ASKED)
def test_drafters_stay_in_16_bits_under_the_names_that_engines_ask_for(
    tmp_path: Path, place: str
) -> None:
    family, *asked = ASKED[place]
    zoo.save(family, tmp_path / "model")
    copy_last_layer(tmp_path / "model", place)
    projections = LATENT if family == "deepseek_v3" else ("qkv_proj", "o_proj")
    config = quantize(tmp_path / "model", tmp_path / "out", "--no-check")
    for start, ends in zip(asked, (False, True), strict=True):
        for each in projections:
            # the classes of SGLang do not say what is joined (`packed_modules_mapping`)
            name = f"{start}self_attn.{each}"
            assert ignores(config["ignore"], name, ends=ends, packed=not ends), name
            decoded = f"model.layers.1.self_attn.{each}"
            assert not ignores(config["ignore"], decoded, ends=ends), decoded


@pytest.mark.parametrize("dialect", ["autofp8", "modelopt"])
def test_lists_without_expressions_name_the_modules_of_drafters(
    tmp_path: Path, dialect: str
) -> None:
    """SGLang 0.5.23 `is_layer_skipped` takes whole parts, `is_layer_excluded` a glob."""
    model = save(tmp_path / "model", "ernie4_5_moe")
    scheme = {"autofp8": "fp8-block", "modelopt": "fp8-dynamic"}[dialect]
    options = ("--format", dialect, "--no-check", "--allow-unservable")
    config = quantize(model, tmp_path / "out", *options, scheme=scheme)
    listed = config["ignored_layers" if dialect == "autofp8" else "ignore"]
    assert {"model.decoder", "model.mtp_block"} <= set(listed)
    assert ("model.decoder.*" in listed) is (dialect == "modelopt")
    assert "model.layers.2.self_attn.o_proj" in listed


def test_longcat_numbers_drafters_after_two_attentions_a_layer() -> None:
    path = "model.mtp.layers.0.transformer_layer.self_attn.o_proj"
    layer = number_layer(path, {"num_layers": 28})
    assert layer == 56
    assert name_in_vllm(path, layer) == "model.layers.56.self_attn.o_proj"


def is_fine(report: EngineReport) -> bool:
    """Tell whether weights load as the checkpoint means."""
    return report.weights is None and not report.unknown


@by_family
def test_drafters_in_16_bits_load(tmp_path: Path, family: str) -> None:
    out = tmp_path / "out"
    quantize(save(tmp_path / "model", family), out)
    assert torch.float8_e4m3fn not in list_drafted(out, family).values()
    assert is_fine(ask(out, "vllm"))
    assert is_fine(ask(out, "sglang"))


@by_family
def test_drafters_are_quantized_where_that_is_asked(tmp_path: Path, family: str) -> None:
    out = tmp_path / "out"
    quantize(save(tmp_path / "model", family), out, "--drafters")
    drafted = list_drafted(out, family)
    assert torch.float8_e4m3fn in drafted.values()
    assert is_fine(ask(out, "vllm"))
    report = ask(out, "sglang")
    # what its classes of drafters create beside their layers is not read
    assert is_fine(report) or all("mtp.fc is a linear, and" in w for w in report.unknown)
    assert report.weights is None
    (file,) = out.glob("*.safetensors")
    name = next(name for name, dtype in drafted.items() if dtype == torch.float8_e4m3fn)
    change_tensors(out, {f"{name}_scale": None}, file.name)
    assert not is_fine(ask(out, "vllm"))


@both
@by_family
def test_a_promised_drafter_that_is_absent_is_named(
    tmp_path: Path, family: str, engine: str
) -> None:
    for promised, stored in ((True, False), (True, True), (False, False)):
        folder = save(tmp_path / f"{promised}-{stored}", family, promised=promised, stored=stored)
        report = ask(folder, engine)
        is_said = any("promises a drafter" in problem for problem in report.problems)
        assert is_said is (promised and not stored)
        assert is_fine(report)


@pytest.mark.parametrize("root", ["eagle_module.layers.0.", "medusa_heads.0."])
def test_heads_that_no_class_of_the_decoder_has_stay_in_16_bits(tmp_path: Path, root: str) -> None:
    zoo.save("llama", tmp_path / "model")
    file = copy_last_layer(tmp_path / "model", root)
    heads = {name: each for name, each in load_file(file).items() if name.startswith(root)}

    config = quantize(tmp_path / "model", tmp_path / "out")

    written = load_file(tmp_path / "out" / file.name)
    assert all(torch.equal(written[name], each) for name, each in heads.items())
    assert written["model.layers.1.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    linears = {name.removesuffix(".weight") for name, each in heads.items() if each.ndim == 2}
    assert linears <= set(config["ignore"])


@pytest.mark.parametrize(
    "drafter", ["LlamaForCausalLMEagle3", "Eagle2_5_VLForConditionalGeneration"]
)
def test_a_drafter_of_its_own_is_named_and_written_without_a_check(
    tmp_path: Path, drafter: str
) -> None:
    """As vLLM 0.32 registers it (`models/registry.py`); the second one is a model with images."""
    zoo.save("llama", tmp_path / "model")
    change_tensors(tmp_path / "model", {"model.norm.weight": None})
    change_config(tmp_path / "model", architectures=[drafter])

    done = program(
        "quantize", tmp_path / "model", "--scheme", "fp8-dynamic", "--out", tmp_path / "out"
    )
    checked = program("check", tmp_path / "model", "--engine", "vllm")

    is_drafter = "Eagle3" in drafter
    assert (done.code == 0) == is_drafter
    assert (f"it is a drafter (class {drafter})" in done.out + done.err) == is_drafter
    assert ("beside the model that it drafts for" in checked.out) == is_drafter
    assert checked.code == 9
