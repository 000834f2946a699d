"""What `check` says of FP8 weights is what vLLM does: it loads them, or does not start."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from fp8calib.dialects.block_cuts import list_rank_faults
from fp8calib.dialects.fp8_serving import list_weight_faults
from fp8calib.dialects.served_weights import QuantizedLinear, QuantizedWeights
from fp8calib.geometry import Layer, Linear, ModelGeometry, Part
from tests.dialects.test_check_weights import PAIRS, WHOLE, ask, explain_refusal, make

from .vllm_job import PYTHON, VllmServer

K_PROJ = "model.layers.1.self_attn.k_proj"
SMALL = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
CASES = [
    *(("llama", form, scheme, "", WHOLE) for form, scheme in PAIRS),
    *(("llama", form, scheme, K_PROJ, WHOLE) for form, scheme in PAIRS),
    *(("mixtral", form, scheme, "", {**SMALL, "intermediate_size": 128}) for form, scheme in PAIRS),
    ("mixtral", "autofp8", "fp8-block", "", {**SMALL, "intermediate_size": 160}),
    ("qwen3_moe", "compressed-tensors", "fp8-block", "", {**SMALL, "moe_intermediate_size": 160}),
    *(
        ("llama", form, "fp8-block", "", {**WHOLE, **sizes})
        for form in ("compressed-tensors", "autofp8")
        for sizes in (
            {"intermediate_size": 192},
            {"intermediate_size": 250},
            {"head_dim": 32},
            {"hidden_size": 192},
        )
    ),
]
"""Family, form, scheme, what is ignored, and sizes."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_vllm_starts_where_check_says_it_does(
    tmp_path: Path, vllm: VllmServer, case: tuple[str, str, str, str, dict[str, int]]
) -> None:
    family, form, scheme, ignore, sizes = case
    folder = make(tmp_path / "case", form, scheme, family, ignore, **sizes)
    answer = vllm(folder, kv_cache_dtype="auto", dtype="bfloat16")
    assert bool(answer.error) == bool(explain_refusal(ask(folder, "vllm"))), answer.error


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
    quantized = QuantizedLinear(
        module=linear.module,
        shape=(sum(rows), columns),
        scheme="fp8-block",
        block=(128, 128),
    )
    weights = QuantizedWeights(form="compressed-tensors", config={}, linears=(quantized,), left=())
    faults = [*list_weight_faults(weights), *list_rank_faults(weights, geometry, tp)]
    return [fault.why for fault in faults if fault.engine == "vLLM"]
