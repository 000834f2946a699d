"""SGLang's own loader takes our `vllm-json`, number by number, and nothing of `rfc`."""

from __future__ import annotations

import logging

import pytest
from transformers import AutoConfig

from tests.real_engines.exports import Exports, read_json_scales
from tests.real_engines.sglang_loader import Loader, extract_loader

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


def test_the_ranks_of_one_file_have_scales_of_their_own(exports: Exports) -> None:
    out = exports("llama-4-kv-heads", "vllm-json", "rfc", tps=TPS)
    file = out / "kv_cache_scales.tp4.json"
    ranks = [read_json_scales(file, str(rank)) for rank in range(4)]
    (whole,) = [read_json_scales(out / "kv_cache_scales.tp1.json", "0")]

    assert len({tuple(scales.values()) for scales in ranks}) == 4
    assert {layer: max(scales[layer] for scales in ranks) for layer in whole} == whole


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
