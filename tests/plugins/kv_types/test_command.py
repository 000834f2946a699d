"""`fp8calib kv-types`: which types are compared, their figures, and what is recommended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import fp8calib
from fp8calib.errors import ModelError, UsageError
from fp8calib.plugins.kv_types import kv_types
from fp8calib.plugins.kv_types.command import CacheResult, describe, recommend
from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.text import Table
from fp8calib.verification.report import SCALE_ONE, Verdict
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.kit.reports import make_candidate

TEXT = [torch.arange(3, 67) + shift for shift in (0, 30)]
ASKED = {"data": TEXT, "seq_len": 32}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Build a tiny model whose heads fit every type, and a backend of each."""
    return zoo.build("llama", head_dim=64)


def test_types_have_their_figures_and_who_serves_them(model: PreTrainedModel) -> None:
    """By what vLLM's own functions answer for heads of 64."""
    names = ["int8_per_token_head", "nvfp4", "fp8_e5m2"]
    result = kv_types(model, kv_cache_dtype=names, kv_memory=1.0, engine="vllm==0.32", **ASKED)
    rows = {row.name: row for row in result.types}
    assert set(rows) == {SCALE_ONE, *names}
    assert rows["int8_per_token_head"].backends == ("triton_attn",)
    assert rows["nvfp4"].backends == ("flashinfer",)
    assert rows["nvfp4"].gpus == ("sm_100", "sm_103")
    assert rows[SCALE_ONE].dtype == "fp8"
    for row in rows.values():
        assert row.tokens == int(2**30 / row.bytes_per_token)
    table = next(iter(describe(result, KvTypesRequest(model))))
    assert isinstance(table, Table)
    shown = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert shown["nvfp4"]["GPUs"] == "sm_100, sm_103"
    assert shown[SCALE_ONE]["GPUs"] == "sm_80 to sm_121, gfx942 to gfx1201"
    for row in rows.values():
        assert shown[row.name]["same token"] == f"{row.top1_agreement:.2%}"
        assert shown[row.name]["ratio ± se"].startswith(f"{row.ppl_ratio:.4f} ± ")
    sizes = [row.bytes_per_token for row in result.types]
    assert sizes == sorted(sizes)


def test_program_prints_the_figures_of_the_json(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ids.tolist()} for ids in TEXT])
    asked = ("kv-types", tmp_path / "model", "--data", rows, "--seq-len", 32, "--kv-memory", 1)
    asked = (*asked, "--kv-cache-dtype", "int8_per_token_head")
    found = succeed(*asked, "--json").json
    shown = succeed(*asked).out
    assert found["recommended"] == "int8_per_token_head"
    flag = "--kv-cache-dtype int8_per_token_head"
    assert found["next"] == f"vllm serve {tmp_path / 'model'} {flag}"
    assert f"next: {found['next']}" in shown.replace("\n", " ")
    for row in found["types"]:
        assert f"{row['tokens']:,}" in shown
    plan = succeed(*asked, "--dry-run", "--json").json["plan"]
    assert plan["candidates"] == ["int8_per_token_head", SCALE_ONE]


def test_what_does_not_fit_is_left_out_with_a_reason(model: PreTrainedModel) -> None:
    result = kv_types(model, engine="vllm==0.33", **ASKED)
    left = [text for text in result.warnings if "is left out" in text]
    assert any(text.startswith("the cache type octave_k3v4 is left out: ") for text in left)
    assert any("fp8_ds_mla" in text for text in left)
    names = {row.name for row in result.types}
    assert names >= {"int8_per_token_head", "int4_per_token_head", "fp8_e5m2"}


def test_scales_that_the_table_cannot_show_are_refused(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the name of a type, of which there would be two rows, and a folder of weights."""
    fp8calib.calibrate(model, TEXT, seq_len=32, out=tmp_path / "nvfp4")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nvfp4: this name is reserved"):
        kv_types(model, "nvfp4", kv_cache_dtype=["nvfp4"], **ASKED)
    result = kv_types(model, "./nvfp4", kv_cache_dtype=["nvfp4"], **ASKED)
    names = {"./nvfp4", SCALE_ONE, "nvfp4", "nvfp4 with ./nvfp4"}
    assert {row.name for row in result.types} == names
    model.save_pretrained(tmp_path / "model")
    fp8calib.quantize(tmp_path / "model", scheme="fp8-dynamic", out=tmp_path / "fp8")
    with pytest.raises(ModelError, match="holds weights, or no KV scales"):
        kv_types(tmp_path / "model", tmp_path / "fp8", **ASKED)


def make_row(name: str, size: float, **more: Any) -> CacheResult:
    made = dict(make_candidate(name, **more))
    return CacheResult(**made, dtype="fp8", bytes_per_token=size, tokens=None, backends=(), gpus=())


def test_text_that_passes_no_type_says_how_much_would_tell() -> None:
    """The KLD of 0.01 implies an error of 0.014 in 100 tokens; the gate needs log(1.01)."""
    small = make_row("small", 36, kld_mean=0.5, verdict=Verdict.FAIL)
    failing = make_row(SCALE_ONE, 64, kld_mean=0.01, verdict=Verdict.FAIL)
    assert recommend([failing, small], []) == (None, "No type of the KV cache passes.")
    unknown = {"verdict": Verdict.CANNOT_TELL, "verdict_why": "an error of 0.014"}
    open_rows = [make_row(SCALE_ONE, 64, kld_mean=0.01, **unknown), small]
    assert recommend(open_rows, [], tokens=100) == (
        None,
        "Whether a type of the KV cache passes cannot be told. Of the smallest KLD is scale-1.0 "
        "(64 bytes a token, KLD 0.0100 ± 0.0034): an error of 0.014; about 200 tokens would tell.",
    )
