"""SGLang's own loader takes our `vllm-json`, number by number, and nothing of `rfc`.

Its attention does not compute with these numbers.
"""

import ast
import json
import logging
import sys
import types
from collections.abc import Callable, Iterable

import pytest
import torch
from transformers import AutoConfig

from fp8calib.engines.facts.release import SGLANG_RELEASES
from tests.real_engines.exports import Exports, read_json_scales
from tests.real_engines.package import Package, open_release
from tests.real_engines.sglang_models import MODELS
from tests.real_engines.stubs import take

TPS = (1, 2, 4)
RANKS = [(tp, rank) for tp in TPS for rank in range(tp)]


Loader = Callable[[str, int, int, int, str], Iterable[tuple[int, float]]]
"""Of a file, a rank, the number of ranks, of layers, and the class attribute `model_type`."""
MODULE = "sglang/srt/model_loader/weight_utils.py"
WANTED = {"KVCacheQuantSchema", "QuantParamSchema", "kv_cache_scales_loader"}


@pytest.fixture(scope="module")
def sglang() -> Package:
    """Open the newest release."""
    return open_release(SGLANG_RELEASES[-1])


@pytest.fixture(scope="module")
def loader(sglang: Package) -> Loader:
    """Run the loader's definition and its schemas, and nothing else, of SGLang's module."""
    kept = [
        node
        for node in sglang.parse(MODULE).body
        if getattr(node, "name", "") in WANTED
        or (isinstance(node, ast.ImportFrom) and node.module in {"pydantic", "typing"})
    ]
    module = types.ModuleType("sglang_scales")
    sys.modules[module.__name__] = module  # where pydantic looks annotations up
    vars(module).update(json=json, logger=logging.getLogger("sglang"))
    exec(compile(ast.Module(kept, []), MODULE, "exec"), vars(module))  # noqa: S102
    found: Loader = module.kv_cache_scales_loader
    return found


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


def test_what_the_file_sets_divides_k_and_v_and_multiplies_nothing(sglang: Package) -> None:
    loaders = [
        node
        for file in sglang.files
        if file.startswith(MODELS)
        for node in ast.walk(sglang.parse(file))
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

    assert "cache_k.div_(k_scale)" in sglang.read("srt/mem_cache/memory_pool.py")
    attention = "srt/layers/attention/"
    flashinfer = sglang.read(f"{attention}flashinfer_backend.py")
    assert "k_scale=layer.k_scale_float" in flashinfer
    flash = sglang.read(f"{attention}flashattention_backend.py")
    assert "layer.k_scale.expand(" in flash
    triton = sglang.read(f"{attention}triton_backend.py")
    assert "k_descale = layer.k_scale_float" in triton
    to_fp32 = take(sglang, "fused_fp8_qkv_kv_cache.py", "_scale_to_f32", torch=torch)
    with pytest.raises(AttributeError):
        to_fp32(0.5, torch.device("cpu"))
