"""What `check` says of FP8 weights is what vLLM's loader does: right, wrong, or not at all."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.linears import GroupKind
from fp8calib.model.shapes import Layer, Linear, ModelGeometry, Part
from tests.engines.test_check_weights import (
    PAIRS,
    WHOLE,
    ask,
    describe,
    explain_refusal,
    forget,
    make,
)
from tests.kit.checkpoints import change_quantization, change_tensors
from tests.real_engines.test_vllm_fp8_weights import Tensors, spread_blocks
from tests.real_engines.vllm_job import PYTHON, load_or_refuse

K_PROJ = "model.layers.1.self_attn.k_proj"
SMALL = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
BLOCK_FORMS = ("compressed-tensors", "autofp8")
Sizes = tuple[tuple[str, int], ...]
Case = tuple[str, str, str, str, Sizes]
"""Family, form, scheme, what is ignored, and other sizes than whole blocks."""
CASES: list[Case] = [
    *(("llama", form, scheme, "", ()) for form, scheme in PAIRS),
    *(("llama", form, scheme, K_PROJ, ()) for form, scheme in PAIRS),
    *(("mixtral", form, scheme, "", (("intermediate_size", 128),)) for form, scheme in PAIRS),
    *(("mixtral", form, "fp8-block", "", (("intermediate_size", 144),)) for form in BLOCK_FORMS),
    *(
        ("qwen3_moe", form, "fp8-block", "", (("moe_intermediate_size", 144),))
        for form in BLOCK_FORMS
    ),
    *(
        ("llama", form, "fp8-block", "", ((name, size),))
        for form in BLOCK_FORMS
        for name, size in (
            ("intermediate_size", 130),
            ("intermediate_size", 192),
            ("intermediate_size", 250),
            ("intermediate_size", 300),
            ("head_dim", 16),
            ("head_dim", 32),
            ("head_dim", 48),
            ("head_dim", 56),
            ("hidden_size", 192),
        )
    ),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    outs = {}
    for number, case in enumerate(CASES):
        family, form, scheme, ignore, sizes = case
        plain = WHOLE if family == "llama" else SMALL
        folder = tmp_path_factory.mktemp(f"case{number}")
        outs[case] = make(folder, form, scheme, family, ignore, **{**plain, **dict(sizes)})
    return outs


@pytest.fixture(scope="module")
def loaded(written: dict[Case, Path]) -> dict[Case, Tensors | str]:
    """Let vLLM load them."""
    return load_or_refuse(written)


@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_what_check_says_it_does(
    written: dict[Case, Path], loaded: dict[Case, Tensors | str], case: Case
) -> None:
    report, answer = ask(written[case], "vllm==0.32"), loaded[case]
    # What is unknown, or stops or misreads, may be either.
    may_stop = report.unknown or (report.weights and "it stops, or" in report.weights.why)
    assert isinstance(answer, str) == bool(explain_refusal(report)) or may_stop, answer
    if isinstance(answer, str) or case[0] != "llama" or case[2] != "fp8-block":
        return
    is_right = all(
        torch.equal(spread(answer, f"{path}.{fused}"), join(written[case], path, parts))
        for path, fused, parts in FUSED
    )
    assert is_right is (report.weights is None)


FUSED = [
    (f"model.layers.{layer}.{block}", fused, parts)
    for layer in (0, 1)
    for block, fused, parts in (
        ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
    )
]


def spread(tensors: Tensors, name: str) -> torch.Tensor:
    """Give every element of a joined weight its scale, as vLLM's kernels find it."""
    scale = next(
        tensors[f"loaded.{name}.{suffix}"]
        for suffix in ("weight_scale_inv", "weight_scale")
        if f"loaded.{name}.{suffix}" in tensors
    )
    return spread_blocks(scale, tensors[f"loaded.{name}.weight"].shape)


def join(folder: Path, path: str, parts: tuple[str, ...]) -> torch.Tensor:
    """Give every element of the stored weights its scale, and join them."""
    stored = load_file(folder / "model.safetensors")
    found = []
    for part in parts:
        weight = stored[f"{path}.{part}.weight"]
        scale = stored.get(f"{path}.{part}.weight_scale_inv")
        scale = stored[f"{path}.{part}.weight_scale"] if scale is None else scale
        found.append(spread_blocks(scale, weight.shape))
    return torch.cat(found)


DOWN = "model.layers.1.mlp.down_proj"
EDITS: dict[str, tuple[dict[str, object], dict[str, torch.Tensor]]] = {
    "whole": ({}, {}),
    "ignored": ({"ignore": ["lm_head", DOWN]}, {}),
    "no groups": ({"config_groups": {}}, {}),
    "one number": ({}, {f"{DOWN}.weight_scale": torch.ones(())}),
}
"""What is changed in the quantization config, and in the tensors."""


@pytest.mark.parametrize("edit", EDITS)
def test_vllm_stops_at_configs_that_the_scales_do_not_fit(tmp_path: Path, edit: str) -> None:
    changes, tensors = EDITS[edit]
    folder = make(tmp_path / "case", "compressed-tensors", "fp8-dynamic", **WHOLE)
    change_quantization(folder, **changes)
    change_tensors(folder, lambda held: held.update(tensors))
    answer = load_or_refuse({edit: folder})[edit]
    assert isinstance(answer, str) is (edit != "whole")
    assert ask(folder, "vllm==0.32").ok is (edit == "whole")


QUESTION = """
import json, sys
from types import SimpleNamespace
import vllm.distributed
from vllm.model_executor.layers.quantization.utils import fp8_utils
answers = []
for tp, inputs, outputs, rank_inputs, rank_outputs in json.load(sys.stdin):
    vllm.distributed.get_tensor_model_parallel_world_size = lambda: tp
    try:
        fp8_utils.validate_fp8_block_shape(
            SimpleNamespace(tp_size=tp), inputs, outputs, rank_inputs, rank_outputs, [128, 128]
        )
        answers.append(True)
    except ValueError:
        answers.append(False)
json.dump(answers, sys.stdout)
"""
SIZES = [64, 128, 192, 256, 384, 512, 640, 768, 1024]


def test_blocks_are_cut_where_vllms_own_function_says_so() -> None:
    """Random linears: of one part or several, by columns and by rows, on 1, 2 and 4 ranks."""
    draw = random.Random(0)  # noqa: S311
    cases = []
    for _ in range(400):
        shard = draw.choice(["column", "row"])
        rows = draw.choices(SIZES, k=draw.choice([1, 2]) if shard == "column" else 1)
        cases.append((shard, rows, draw.choice(SIZES), draw.choice([1, 2, 4])))
    questions = []
    for shard, rows, columns, tp in cases:
        cut = [size // tp if shard == "column" else size for size in rows]
        rank_inputs = columns // tp if shard == "row" else columns
        questions.append((tp, columns, sum(rows), rank_inputs, cut))
    done = subprocess.run(
        [PYTHON, "-c", QUESTION],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(done.stdout)
    assert {True, False} == set(expected)
    for case, is_fine in zip(cases, expected, strict=True):
        assert (not list_refusals(*case)) is is_fine, case


def list_refusals(shard: str, rows: list[int], columns: int, tp: int) -> list[str]:
    """Ask the rules of one linear, which the checkpoint holds in one weight."""
    starts = [sum(rows[:place]) for place in range(len(rows))]
    linear = Linear(
        module="model.layers.0.mlp.fused",
        section="mlp",
        root="model.layers.0.mlp",
        in_features=columns,
        out_features=sum(rows),
        shard=shard,
        parts=tuple(
            Part(name=f"part{place}", count=size, unit=1, first=starts[place], per_group=size)
            for place, size in enumerate(rows)
        ),
        weight_name="model.layers.0.mlp.fused.weight",
    )
    layer = Layer(index=0, module="model.layers.0", mixer="", attention=None, linears=(linear,))
    geometry = ModelGeometry(
        architecture="A", model_type="a", checkpoint_dtype="bfloat16", layers=(layer,)
    )
    weights = describe({linear.module: (sum(rows), columns)}, "fp8-block")
    return [each.why for each in list_block_findings("vllm", weights, geometry, tp)]


FINER = """
import json, sys
from types import SimpleNamespace
from vllm.model_executor.layers.fused_moe.oracle.fp8 import refine_fp8_moe_block_shape
answers = []
for tp, rank, hidden in json.load(sys.stdin):
    sizes = SimpleNamespace(tp_size=tp, intermediate_size_per_partition=rank, hidden_dim=hidden)
    answers.append(refine_fp8_moe_block_shape(sizes, [128, 128]))
json.dump(answers, sys.stdout)
"""


def test_experts_get_finer_blocks_where_vllms_own_function_gives_them() -> None:
    """All sizes, on 1, 2 and 4 ranks."""
    cases = [
        (tp, rank, hidden)
        for tp in (1, 2, 4)
        for rank in (48, 64, 80, 96, 128, 160, 192, 256)
        for hidden in (64, 128, 208)
    ]
    done = subprocess.run(
        [PYTHON, "-c", FINER], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for case, expected in zip(cases, json.loads(done.stdout), strict=True):
        tp, rank, hidden = case
        linears = {"model.layers.0.mlp.experts.0.gate_proj": (rank * tp, hidden)}
        weights = describe(linears, "fp8-block", dialect="autofp8", kind=GroupKind.EXPERTS)
        geometry = ModelGeometry(
            architecture="A", model_type="a", checkpoint_dtype="bfloat16", layers=()
        )
        faults = [*list_block_findings("vllm", weights, geometry, tp, repeats_scales=True)]
        assert all(each.status in (Status.USED, Status.REFUSED) for each in faults)
        finer = [f"for blocks of {expected[0]}," in each.why for each in faults if expected]
        assert finer == ([True] if expected else []), case
        assert bool(faults) is (rank % 128 != 0), case


@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8"])
def test_vllm_casts_a_linear_that_the_config_takes_for_fp8(tmp_path: Path, form: str) -> None:
    folder = make(
        tmp_path / "case", form, "fp8-dynamic" if form[0] == "c" else "fp8-static", **WHOLE
    )
    forget(folder)
    assert ask(folder, "vllm==0.32").weights is not None
    answer = load_or_refuse({form: folder})[form]
    assert not isinstance(answer, str), answer
    weight = answer["loaded.model.layers.1.mlp.down_proj.weight"]
    assert weight.dtype is torch.float8_e4m3fn
    assert bool((weight.float() == 1).all())
