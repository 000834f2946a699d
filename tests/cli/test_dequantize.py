"""`dequantize`: bytes against a brute force, files, messages, interruptions, KV scales."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

from fp8calib.formats import write
from fp8calib.quantization.shard_writer import ShardWriter
from tests import zoo
from tests.cli.program import run, snapshot, succeed
from tests.cli.quantized_children import save_fp4, save_gpt_oss, save_int
from tests.formats.foreign import FOLDER, KV_SCALES
from tests.kit.checkpoints import Tensors, load_folder
from tests.kit.minutes import in_minutes
from tests.quantization.decoded_by_hand import decode_folder

NAME = "model.layers.1.mlp.down_proj.weight"


def dequantize(source: Path, out: Path, *options: object) -> dict[str, Any]:
    report: dict[str, Any] = succeed("dequantize", source, "--out", out, *options, "--json").json
    return report


def require_equal(found: Tensors, expected: Tensors) -> None:
    """Require the same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (other, tensor))), name


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*fp8*")))
def test_what_other_tools_wrote_is_decoded(tmp_path: Path, name: str) -> None:
    report = dequantize(FOLDER / name, tmp_path / "out")
    require_equal(load_folder(tmp_path / "out"), decode_folder(FOLDER / name))
    codes = {n for n, x in load_folder(FOLDER / name).items() if "float8" in str(x.dtype)}
    assert set(report["dequantized"]) == codes


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = {**SIZES, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "phi3": SIZES,
    "mixtral": SIZES,
    "deepseek_v3": {**EXPERTS, "kv_lora_rank": 32, "q_lora_rank": 32},
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "llama4_text": {**SIZES, "intermediate_size_mlp": 96},
}
WRITTEN = {
    "compressed-tensors, channels": ("fp8-dynamic", "compressed-tensors"),
    "AutoFP8, blocks": ("fp8-block", "autofp8"),
    "ModelOpt, channels": ("fp8-dynamic", "modelopt"),
    "compressed-tensors, MX": ("mxfp8", "compressed-tensors"),
    "MiniMax, MX": ("mxfp8", "mxfp8"),
}


def test_every_family_in_every_form(tmp_path: Path) -> None:
    """Experts too: names and shapes are those that the source has without its scales."""
    for family, sizes in FAMILIES.items():
        base = tmp_path / family
        zoo.build(family, **sizes).bfloat16().save_pretrained(base)
        forms = WRITTEN if family in {"llama", "mixtral"} else ["AutoFP8, blocks"]
        children = [base / form for form in forms]
        for child in children:
            scheme, name = WRITTEN[child.name]
            options = ("--scheme", scheme, "--format", name, "--allow-unservable", "--no-check")
            succeed("quantize", base, *options, "--out", child)
        children.append(save_fp4(base / "nvfp4", "nvfp4", base=_bare(base)))
        children.append(save_int(base / "int4", 4, group=32, base=_bare(base)))
        for child in children:
            notes = dequantize(child, child / "out")["notes"]
            require_equal(load_folder(child / "out"), decode_folder(child))
            is_split = (family, child.name) == ("llama4_text", "AutoFP8, blocks")
            assert any("transformers does not load" in each for each in notes) is is_split


def _bare(base: Path) -> Path:
    """Copy the files of a model, without what was made from it."""
    bare = base / "bare"
    if not bare.exists():
        bare.mkdir()
        for path in base.iterdir():
            if path.is_file():
                shutil.copy(path, bare)
    return bare


@pytest.mark.parametrize("name", ["float16", "float32", "bfloat16"])
def test_another_dtype_is_that_of_dequantized_weights(tmp_path: Path, name: str) -> None:
    child = save_int(tmp_path / "child", 4, group=32)
    report = dequantize(child, tmp_path / "out", "--dtype", name)
    assert report["dtype"] == name
    dtype = getattr(torch, name)
    found = load_folder(tmp_path / "out")
    require_equal(found, decode_folder(child, dtype))
    assert found[NAME].dtype is dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config.get("dtype") or config["torch_dtype"]) == name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype is dtype


# --- against transformers ------------------------------------------------------------------------


def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 60).reshape(3, 19)).logits


@pytest.mark.parametrize("form", ["fp8", "w8a16", "int4", "mxfp4", "nvfp4", "gpt_oss"])
def test_logits_are_those_of_transformers_own_dequantization(tmp_path: Path, form: str) -> None:
    child, base = tmp_path / "child", tmp_path / "base"
    config: Any = CompressedTensorsConfig(run_compressed=False)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    if form == "gpt_oss":
        zoo.save("gpt_oss", base, hidden_size=64, intermediate_size=32)
        save_gpt_oss(base, child)
        config = Mxfp4Config(dequantize=True)
    else:
        model = zoo.build("llama", **sizes).bfloat16()
        model.save_pretrained(base)
        if form == "fp8":
            options = ("--scheme", "fp8-block", "--format", "autofp8", "--allow-unservable")
            succeed("quantize", base, *options, "--out", child)
            config = FineGrainedFP8Config(dequantize=True)
        elif form == "w8a16":
            succeed("quantize", base, "--scheme", "w8a16", "--out", child)
        elif form == "int4":
            save_int(child, 4, group=32, base=base)
        else:
            save_fp4(child, form, base=base)
    dequantize(child, tmp_path / "out")
    load = AutoModelForCausalLM.from_pretrained
    theirs = load(child, quantization_config=config, dtype=torch.bfloat16)
    ours = load(tmp_path / "out", dtype=torch.bfloat16)
    expected = compute_logits(theirs)
    assert torch.equal(compute_logits(ours), expected)
    assert not torch.equal(compute_logits(load(base, dtype=torch.bfloat16)), expected)


# --- KV scales -----------------------------------------------------------------------------------


KEPT = ["llmcompressor-fp8-static-kv", "modelopt-fp8-kv", "quark-mixtral-fp8-kv"]
OTHERS = [name for name in KV_SCALES if ("-fp8-" in name or "auto" in name) and name not in KEPT]


@pytest.mark.parametrize("name", [*KEPT, *in_minutes(*OTHERS)])
def test_kv_scales_are_kept_as_those_of_an_overlay(tmp_path: Path, name: str) -> None:
    """The scales are those that extract-kv-scales writes beside the model without them."""
    source, out, plain = FOLDER / name, tmp_path / "out", tmp_path / "plain"
    report = dequantize(source, out, "--keep-kv-scales")
    assert report["has_kv_scales"]
    assert dequantize(source, out, "--keep-kv-scales", "--resume")["files"] == report["files"]
    assert report["files"] == sorted(path.name for path in out.iterdir())
    dequantize(source, plain)
    extract = ("extract-kv-scales", "--quantized-model", source, "--model", plain)
    succeed(*extract, "--out", tmp_path / "overlay")
    require_equal(load_folder(out), load_folder(tmp_path / "overlay"))
    configs = [out / "config.json", tmp_path / "overlay" / "config.json"]
    assert json.loads(configs[0].read_text()) == json.loads(configs[1].read_text())
    indices = [each.with_name("model.safetensors.index.json") for each in configs]
    assert json.loads(indices[0].read_text()) == json.loads(indices[1].read_text())
    first, second = (run("check", each.parent, "--json").json["engines"] for each in configs)
    assert first == second
    assert first["vllm"]["ok"] or "mixtral" in name  # the experts of a fixture have odd names


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["shard", "overlay"])
def test_an_interrupted_run_with_kv_scales_is_resumed_and_deletes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The user has a checkpoint with the name of what earlier versions deleted."""
    source = FOLDER / "modelopt-fp8-kv"
    dequantize(source, tmp_path / "whole", "--keep-kv-scales")
    dequantize(source, tmp_path / "out.without-scales")
    own = snapshot(tmp_path / "out.without-scales")
    writer, name = {"shard": (ShardWriter, "write"), "overlay": (write, "write_found")}[place]
    whole = getattr(writer, name)

    def interrupted(*arguments: Any, **named: Any) -> None:
        whole(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, name, interrupted)
        done = run("dequantize", source, "--out", tmp_path / "out", "--keep-kv-scales")
    assert done.code == 130
    kept = tmp_path / "out.partial"
    assert kept.is_dir() is (place == "overlay")
    for _ in range(2):  # the second time it is finished already
        dequantize(source, tmp_path / "out", "--keep-kv-scales", "--resume")
        assert snapshot(tmp_path / "out.without-scales") == own
        names = {"whole", "out", "out.without-scales"}
        assert {path.name for path in tmp_path.iterdir()} == names
        require_equal(load_folder(tmp_path / "out"), load_folder(tmp_path / "whole"))
        files = [{each.name for each in (tmp_path / n).iterdir()} for n in ("out", "whole")]
        assert files[0] == files[1]
