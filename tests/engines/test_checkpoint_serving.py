"""Which engines serve a checkpoint that was just quantized, by which command; why others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.serving import Limitation, Serving, ServingCommand, find_checkpoint_serving
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.quantization.plan import CalibratedScales
from tests.quantization.by_hand import LAYER, Run, Tensors, random, run, save

SERVED_BY = {
    ("compressed-tensors", "fp8-static"): {"vLLM", "SGLang", "TGI"},
    ("compressed-tensors", "fp8-dynamic"): {"vLLM", "SGLang", "TGI"},
    ("compressed-tensors", "w8a16"): {"vLLM", "SGLang", "TGI"},
    ("compressed-tensors", "fp8-block"): {"vLLM", "SGLang"},
    ("autofp8", "fp8-static"): {"vLLM", "SGLang", "TGI"},
    ("autofp8", "fp8-block"): {"vLLM", "SGLang", "TGI"},
    ("modelopt", "fp8-static"): {"vLLM", "SGLang", "TGI"},
    ("modelopt", "fp8-dynamic"): {"vLLM", "TGI"},
}


def make(folder: Path, form: str, scheme: str, tensors: Tensors | None = None, *ignore: str) -> Run:
    tensors = tensors or whole_blocks()
    linears = [name.removesuffix(".weight") for name in tensors if "_proj" in name]
    scales = CalibratedScales(inputs=dict.fromkeys(linears, torch.tensor(1.0)), kv={})
    source = save(folder / "source", tensors)
    return run(source, folder / "out", scheme, form, scales=scales, ignore=ignore)


def find_serving(run: Run) -> Serving:
    """Find who serves a few linears, of a model that is not known."""
    nothing = ModelGeometry(architecture="", model_type="", checkpoint_dtype="", layers=())
    return find_checkpoint_serving(
        open_folder(run.out), run.out, nothing, has_kv=False, is_foreign=False
    )


def list_commands(run: Run) -> tuple[ServingCommand, ...]:
    return find_serving(run).commands


def list_limitations(run: Run) -> tuple[Limitation, ...]:
    return find_serving(run).limitations


def whole_blocks() -> Tensors:
    return {
        f"{LAYER}.{name}.weight": random(128, 128, seed=0)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    }


@pytest.mark.parametrize(("form", "scheme"), SERVED_BY)
def test_commands_are_those_of_the_engines_that_can(tmp_path: Path, form: str, scheme: str) -> None:
    found = make(tmp_path, form, scheme)
    commands = {item.engine: item.command for item in list_commands(found)}
    assert commands.keys() == SERVED_BY[form, scheme]
    assert commands["vLLM"] == f"vllm serve {found.out}"
    blocked = {item.engine for item in list_limitations(found) if item.is_blocking} - {
        "transformers"
    }
    assert blocked == {"vLLM", "SGLang", "TGI"} - SERVED_BY[form, scheme]


def test_a_fused_group_quantized_in_part_is_refused_by_engines(tmp_path: Path) -> None:
    found = make(tmp_path, "compressed-tensors", "w8a16", None, "*.k_proj")
    blocked = {item.engine for item in list_limitations(found) if item.is_blocking}
    assert blocked - {"transformers"} == {"vLLM", "SGLang", "TGI"}


@pytest.mark.parametrize(
    ("name", "rows", "is_torn"),
    [
        ("self_attn.q_proj", 130, True),
        ("self_attn.k_proj", 130, True),
        ("self_attn.v_proj", 130, False),
        ("mlp.up_proj", 130, False),
        ("mlp.experts.0.up_proj", 130, True),
        ("mlp.experts.0.down_proj", 130, False),
        ("mlp.down_proj", 130, False),
        ("mlp.gate_proj", 256, False),
    ],
)
def test_blocks_that_would_begin_inside_a_part_are_told(
    tmp_path: Path, name: str, rows: int, is_torn: bool
) -> None:
    """The last part of a fused weight may end anywhere; of experts, none may."""
    tensors = whole_blocks() | {f"{LAYER}.{name}.weight": random(rows, 128, seed=1)}
    found = make(tmp_path, "compressed-tensors", "fp8-block", tensors)
    told = [item.engine for item in list_limitations(found) if "multiple" in item.why]
    assert told == (["vLLM", "SGLang"] if is_torn else [])


@pytest.mark.parametrize(("form", "scheme"), SERVED_BY)
def test_experts_are_refused_in_more_forms_than_other_linears(
    tmp_path: Path, form: str, scheme: str
) -> None:
    tensors = whole_blocks() | {
        f"{LAYER}.mlp.experts.{number}.{name}_proj.weight": random(128, 128, seed=number)
        for number in (0, 1)
        for name in ("gate", "up", "down")
    }
    refused = {
        ("compressed-tensors", "w8a16"): {"vLLM", "SGLang"},
        ("modelopt", "fp8-static"): {"TGI"},
        ("modelopt", "fp8-dynamic"): {"vLLM", "TGI"},
    }
    with_experts = make(tmp_path / "a", form, scheme, tensors)
    without = make(tmp_path / "b", form, scheme, tensors, "*.experts")
    commands = [{item.engine for item in list_commands(plan)} for plan in (with_experts, without)]
    assert commands[1] == SERVED_BY[form, scheme]
    assert commands[1] - commands[0] == refused.get((form, scheme), set())
    whys = [item.why for item in list_limitations(with_experts) if "experts" in item.why]
    assert len(whys) == len(refused.get((form, scheme), ()))
    assert all(f"({LAYER}.mlp.experts.0." in why for why in whys)


@pytest.mark.parametrize(
    ("pattern", "misled"),
    [
        ("*.experts.1", {"vLLM", "SGLang"}),
        ("*.experts.0", {"vLLM", "SGLang"}),
        ("*.experts.*.down_proj", {"vLLM", "SGLang"}),
        (f"{LAYER}.mlp.experts", set()),
    ],
)
def test_experts_of_a_layer_quantized_in_part_are_told(
    tmp_path: Path, pattern: str, misled: set[str]
) -> None:
    """Servers join all projections of all experts."""
    tensors = whole_blocks() | {
        f"model.layers.{layer}.mlp.experts.{number}.{name}_proj.weight": random(
            128, 128, seed=number
        )
        for layer in (0, 1)
        for number in (0, 1)
        for name in ("gate", "up", "down")
    }
    plan = make(tmp_path, "compressed-tensors", "fp8-dynamic", tensors, pattern)
    found = [item for item in list_limitations(plan) if item.is_blocking]
    found = [item for item in found if item.engine != "transformers"]  # the rest is missing
    assert {item.engine for item in found} == misled
    assert all(".mlp.experts" in item.why for item in found)
    assert {item.engine for item in list_commands(plan)} == {
        "vLLM",
        "SGLang",
        "TGI",
    } - misled


def test_linears_that_sglang_knows_no_fp8_for_are_told(tmp_path: Path) -> None:
    source = save(
        tmp_path / "source",
        {
            f"{LAYER}.{name}.weight": random(128, 128, seed=0)
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
        },
        model_type="olmo",
    )
    told = run(source, tmp_path / "a", "fp8-dynamic")
    blocking = [item for item in list_limitations(told) if item.is_blocking]
    (fault,) = (item for item in blocking if item.engine != "transformers")
    assert fault.engine == "SGLang"
    assert f"olmo: it has no place for their scales, and stops ({LAYER}.self_attn." in fault.why
    options = tuple(f"*.self_attn.{name}_proj" for name in "qo")
    assert all(f"--ignore '{option}'" in fault.why for option in options)
    left = run(source, tmp_path / "b", "fp8-dynamic", ignore=options)
    blocked = {item.engine for item in list_limitations(left) if item.is_blocking}
    assert blocked <= {"transformers"}  # which misses the rest of the model


def list_blocked(run: Run) -> dict[str, str]:
    return {i.engine: i.why for i in list_limitations(run) if i.is_blocking}


def test_vllm_takes_no_blocks_of_llama_4s_queries_and_keys(tmp_path: Path) -> None:
    source = save(tmp_path / "m", whole_blocks(), model_type="llama4_text")
    for scheme, ignored, is_blocked in (
        ("fp8-block", (), True),
        ("fp8-block", ("*.self_attn.[qkv]_proj",), False),
        ("fp8-dynamic", (), False),
    ):
        found = run(source, tmp_path / f"{scheme}{len(ignored)}", scheme, ignore=ignored)
        assert ("reorders the rows of q and k" in list_blocked(found).get("vLLM", "")) is is_blocked


BRIEFLY_SERVED_BY = {
    ("compressed-tensors", "fp8-static"): {"vllm-tpu", "vllm-gaudi", "atom"},
    ("compressed-tensors", "fp8-dynamic"): {"tensorrt-llm", "vllm-tpu", "vllm-gaudi", "atom"},
    ("compressed-tensors", "w8a16"): {"vllm-gaudi", "atom"},
    ("compressed-tensors", "fp8-block"): {"tensorrt-llm", "vllm-tpu", "vllm-gaudi", "atom"},
    ("autofp8", "fp8-static"): {"tensorrt-llm", "vllm-tpu", "vllm-gaudi", "lmdeploy", "atom"},
    ("autofp8", "fp8-block"): {"tensorrt-llm", "vllm-tpu", "vllm-gaudi", "lmdeploy", "atom"},
    ("modelopt", "fp8-static"): {"tensorrt-llm", "vllm-gaudi", "atom"},
    ("modelopt", "fp8-dynamic"): {"tensorrt-llm", "atom"},
}


@pytest.mark.parametrize(("form", "scheme"), BRIEFLY_SERVED_BY)
def test_further_engines_are_only_listed_by_name(tmp_path: Path, form: str, scheme: str) -> None:
    found = make(tmp_path, form, scheme)
    serving = find_serving(found)
    assert {each.name for each in serving.others if each.command} == BRIEFLY_SERVED_BY[form, scheme]
    assert len(serving.others) == 5
    titles = {each.engine for each in serving.others}
    assert not titles & {item.engine for item in (*serving.commands, *serving.limitations)}


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt", "mxfp8"])
def test_engines_of_which_mxfp8_is_unknown_are_not_recommended(tmp_path: Path, form: str) -> None:
    serving = find_serving(make(tmp_path, form, "mxfp8"))
    assert "TGI" not in {item.engine for item in serving.commands}
    assert "tensorrt-llm" not in {each.name for each in serving.others}
    (why,) = (i.why for i in serving.limitations if i.engine == "TGI" and "MXFP8" in i.why)
    assert why.startswith("unknown: ") or "mxfp8-quantized" in why
