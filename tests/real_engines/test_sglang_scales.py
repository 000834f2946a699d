"""SGLang's own loader takes our `vllm-json`, number by number, and nothing of `rfc`.

Its attention does not compute with these numbers.
"""

import ast
import logging

import pytest
import torch
from transformers import AutoConfig

from tests.real_engines.exports import Exports, read_json_scales
from tests.real_engines.sglang_sources import Loader, extract_loader, open_sglang, read_models
from tests.real_engines.vllm_sources import take

TPS = (1, 2, 4)
RANKS = [(tp, rank) for tp in TPS for rank in range(tp)]


@pytest.fixture(scope="module")
def loader() -> Loader:
    """Give SGLang's function."""
    return extract_loader()


@pytest.mark.parametrize("name", ["llama-4-kv-heads", "qwen2", "opt"])
@pytest.mark.parametrize(("tp", "rank"), RANKS)
def test_every_rank_gets_its_scale_of_every_layer(
    exports: Exports, loader: Loader, name: str, tp: int, rank: int
) -> None:
    out = exports(name, "vllm-json", "rfc", tps=TPS)
    config = AutoConfig.from_pretrained(out.parent / "model")
    file = out / f"kv_cache_scales.tp{tp}.json"
    layers = config.num_hidden_layers

    found = dict(loader(str(file), rank, tp, layers, type(config).model_type))

    assert found == read_json_scales(file, str(rank))
    assert sorted(found) == list(range(layers))
    assert found == read_json_scales(out / f"rfc.tp{tp}.json", f"rank{rank}")


@pytest.mark.parametrize("tp", TPS)
def test_the_form_of_the_rfc_is_refused_for_every_layer(
    exports: Exports, loader: Loader, caplog: pytest.LogCaptureFixture, tp: int
) -> None:
    out = exports("llama-4-kv-heads", "vllm-json", "rfc", tps=TPS)

    with caplog.at_level(logging.WARNING, logger="sglang"):
        found = list(loader(str(out / f"rfc.tp{tp}.json"), 0, tp, 2, "llama"))

    assert found == []
    assert "Defaulting to KV cache scaling factors = 1.0 for all layers" in caplog.text


def test_a_file_for_another_number_of_ranks_is_refused(exports: Exports, loader: Loader) -> None:
    out = exports("llama-4-kv-heads", "vllm-json", "rfc", tps=TPS)

    assert list(loader(str(out / "kv_cache_scales.tp1.json"), 0, 2, 2, "llama")) == []
    assert list(loader(str(out / "kv_cache_scales.tp2.json"), 0, 1, 2, "llama")) == []


def test_what_the_file_sets_divides_k_and_v_and_multiplies_nothing() -> None:
    loaders = [
        node
        for tree in read_models().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "load_kv_cache_scales"
    ]
    targets = [
        target.attr
        for loader in loaders
        for node in ast.walk(loader)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    ]
    # attention multiplies by k_scale_float; HunYuan's `_kv_scale` is never reached
    assert set(targets) == {"k_scale", "v_scale", "_kv_scale"}

    assert "cache_k.div_(k_scale)" in open_sglang().read("srt/mem_cache/memory_pool.py")
    attention = "srt/layers/attention/"
    flashinfer = open_sglang().read(f"{attention}flashinfer_backend.py")
    assert "k_scale=layer.k_scale_float" in flashinfer
    flash = open_sglang().read(f"{attention}flashattention_backend.py")
    assert "layer.k_scale.expand(" in flash
    triton = open_sglang().read(f"{attention}triton_backend.py")
    assert "k_descale = layer.k_scale_float" in triton
    to_fp32 = take(open_sglang(), "fused_fp8_qkv_kv_cache.py", "_scale_to_f32", torch=torch)
    with pytest.raises(AttributeError):
        to_fp32(0.5, torch.device("cpu"))
