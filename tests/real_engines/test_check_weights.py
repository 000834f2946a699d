"""What `check` says of FP8 weights is what vLLM's loader does: right, wrong, or not at all."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.formats.kv.overlay import IGNORED
from fp8calib.model.geometry import Layer, Linear, ModelGeometry, Part
from tests.engines.test_check_weights import WHOLE, ask, describe, explain_refusal, make
from tests.real_engines.test_vllm_weights import Tensors, list_modules
from tests.real_engines.vllm_job import PYTHON, load_or_refuse

SMALL = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
BLOCK_FORMS = ("compressed-tensors", "autofp8")
Sizes = tuple[tuple[str, int], ...]
Case = tuple[str, str, Sizes]
"""Family, form, and other sizes than whole blocks; random checkpoints (`fuzz/`) have those."""
CASES = [
    *(("mixtral", form, (("intermediate_size", 144),)) for form in BLOCK_FORMS),
    *(("qwen3_moe", form, (("moe_intermediate_size", 144),)) for form in BLOCK_FORMS),
    *(
        ("llama", form, ((name, size),))
        for form in BLOCK_FORMS
        for name, size in (
            *(("intermediate_size", size) for size in (130, 192, 250, 300)),
            *(("head_dim", size) for size in (16, 32, 48, 56)),
            ("hidden_size", 192),
        )
    ),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Path, Tensors | str]]:
    """Quantize models, and let vLLM load them."""
    outs = {}
    for case in CASES:
        family, form, sizes = case
        plain = WHOLE if family == "llama" else SMALL
        folder = tmp_path_factory.mktemp(family)
        outs[case] = make(folder, form, "fp8-block", family, **{**plain, **dict(sizes)})
    return {case: (outs[case], answer) for case, answer in load_or_refuse(outs).items()}


@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_what_check_says_it_does(
    loaded: dict[Case, tuple[Path, Tensors | str]], case: Case
) -> None:
    folder, answer = loaded[case]
    report = ask(folder, "vllm==0.32")
    # What is unknown, or stops or misreads, may be either.
    may_stop = report.unknown or (report.weights and "it stops, or" in report.weights.why)
    assert isinstance(answer, str) == bool(explain_refusal(report)) or may_stop, answer
    if isinstance(answer, str) or case[0] != "llama":
        return
    stored = load_file(folder / "model.safetensors")
    joined = [
        torch.equal(
            spread(answer, f"loaded.{begin}"),
            torch.cat([spread(stored, f"{member}.") for member in members]),
        )
        for begin, members in list_modules(f"{i}.{name}" for i in (0, 1) for name in JOINED)
    ]
    assert all(joined) is (report.weights is None)


JOINED = ("self_attn.qkv_proj", "mlp.gate_up_proj")


def spread(tensors: Tensors, begin: str) -> torch.Tensor:
    """Give every element of a weight its scale, as vLLM's kernels find it."""
    suffix = "weight_scale_inv" if f"{begin}weight_scale_inv" in tensors else "weight_scale"
    rows, columns = (torch.arange(size) // 128 for size in tensors[f"{begin}weight"].shape)
    return tensors[f"{begin}{suffix}"][rows][:, columns]


QUESTION = """
from types import SimpleNamespace
import vllm.distributed
from vllm.model_executor.layers.quantization.utils import fp8_utils
for tp, inputs, outputs, rank_inputs, rank_outputs in questions:
    vllm.distributed.get_tensor_model_parallel_world_size = lambda: tp
    try:
        fp8_utils.validate_fp8_block_shape(
            SimpleNamespace(tp_size=tp), inputs, outputs, rank_inputs, rank_outputs, [128, 128]
        )
        answers.append(True)
    except ValueError:
        answers.append(False)
"""
ASK = """
import json, sys
questions, answers = json.load(sys.stdin), []
{}
json.dump(answers, sys.stdout)
"""


def ask_vllm(code: str, questions: object) -> list[Any]:
    """Run lines in vLLM's environment that append an answer to each question."""
    done = subprocess.run(
        [PYTHON, "-c", ASK.format(code)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


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
    expected = ask_vllm(QUESTION, questions)
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
    stored, group = describe({linear.module: (sum(rows), columns)}, "fp8-block")
    stored.geometry = geometry
    return [each.why for each in list_block_findings(VLLM_RUN, stored, [group], tp)]


FINER = """
from types import SimpleNamespace
from vllm.model_executor.layers.fused_moe.oracle.fp8 import refine_fp8_moe_block_shape
for tp, rank, hidden in questions:
    sizes = SimpleNamespace(tp_size=tp, intermediate_size_per_partition=rank, hidden_dim=hidden)
    answers.append(refine_fp8_moe_block_shape(sizes, [128, 128]))
"""


def test_experts_get_finer_blocks_where_vllms_own_function_gives_them() -> None:
    """All sizes, on 1, 2 and 4 ranks."""
    cases = [
        (tp, rank, hidden)
        for tp in (1, 2, 4)
        for rank in (48, 64, 80, 96, 128, 160, 192, 256)
        for hidden in (64, 128, 208)
    ]
    for case, expected in zip(cases, ask_vllm(FINER, cases), strict=True):
        tp, rank, hidden = case
        linears = {"model.layers.0.mlp.experts.0.gate_proj": (rank * tp, hidden)}
        stored, group = describe(linears, "fp8-block", dialect="autofp8", kind="experts")
        faults = [*list_block_findings(VLLM_RUN, stored, [group], tp)]
        assert all(each.status in (Status.USED, Status.REFUSED) for each in faults)
        finer = [f"for blocks of {expected[0]}," in each.why for each in faults if expected]
        assert finer == ([True] if expected else []), case
        assert bool(faults) is (rank % 128 != 0), case


MATCHED = """
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
fused = dict(qkv_proj=["q_proj", "k_proj", "v_proj"], gate_up_proj=["gate_proj", "up_proj"])
ignore, names = questions
answers = [name for name in names if should_ignore_layer(name, ignore, fused)]
"""
LINEARS = (
    *("lm_head", "model.embed_tokens", "model.layers.0.self_attn.qkv_proj"),
    *("model.layers.0.self_attn.o_proj", "model.layers.11.mlp.gate_up_proj"),
    *("model.layers.3.mlp.experts", "model.layers.3.mlp.gate", "transformer.h.0.attn.c_attn"),
    *("model.layers.1.linear_attn.in_proj_qkvz", "visual.blocks.0.attn.qkv"),
)
ATTENTION = (
    *("model.layers.0.self_attn.attn", "transformer.h.0.attn.attn"),
    *("backbone.layers.3.mixer.attn", "language_model.model.layers.7.self_attn.attn"),
)


def test_vllm_ignores_every_linear_of_an_overlay_and_no_attention_layer() -> None:
    """VLLM on TPUs asks it for attention layers too, on GPUs and CPUs only for linears."""
    assert ask_vllm(MATCHED, [[IGNORED], [*LINEARS, *ATTENTION]]) == [*LINEARS]
