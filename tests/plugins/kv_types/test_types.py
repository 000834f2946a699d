"""Types of the KV cache in a model, against a cache whose layers store them by hand."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import Fp8QuantizedLayer

from fp8calib.model.geometry import Role
from fp8calib.plugins.kv_types import round_trips
from fp8calib.plugins.kv_types.types import CACHE_TYPES, Store
from fp8calib.verification.emulation.candidate import Candidate
from tests import zoo
from tests.architectures.families import LATENT, build
from tests.plugins.kv_types import by_hand
from tests.plugins.kv_types.by_hand import OneVector, draw_vectors, store_all
from tests.verification.by_hand import (
    BATCHES,
    PADDED,
    HandCache,
    emulate,
    opened,
    plain_forward,
    text_config,
)

STORED = {
    "fp8_per_token_head": by_hand.fp8_per_token_head,
    "int8_per_token_head": by_hand.int8_per_token_head,
    "nvfp4": by_hand.nvfp4,
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("name", STORED)
def test_hidden_states_are_those_of_a_cache_by_hand(name: str, family: str, tmp_path: Path) -> None:
    with opened(zoo.build(family, head_dim=16), tmp_path) as subject:
        quantizers = CACHE_TYPES[name].quantize(subject.geometry)
        found = emulate(subject, Candidate(quantizers=quantizers), *BATCHES)
        pair = (partial(store_all, STORED[name]),) * 2
        layers = [layer.index for layer, _ in subject.geometry.attentions()]
        for batch, hidden in zip(BATCHES, found, strict=True):
            cache = HandCache(text_config(subject.model), dict.fromkeys(layers, pair))
            wanted = plain_forward(subject.model, batch, cache)
            for row, length in enumerate(batch.lengths):
                assert torch.allclose(hidden[row, :length], wanted[row, :length], atol=2e-5)


def test_padding_takes_no_part_in_the_scale_of_a_sequence(tmp_path: Path) -> None:
    with opened(zoo.build("llama", head_dim=16), tmp_path) as subject:
        quantizers = CACHE_TYPES["fp8_quantized_cache"].quantize(subject.geometry)
        padded, *_ = emulate(subject, Candidate(quantizers=quantizers), PADDED)
        for row, length in enumerate(PADDED.lengths):
            one = replace(PADDED, input_ids=PADDED.input_ids[row : row + 1, :length])
            one = replace(one, lengths=(length,))
            (alone,) = emulate(subject, Candidate(quantizers=quantizers), one)
            assert torch.allclose(padded[row, :length], alone[0], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"), [("turboquant_4bit_nc", 16 + 2 + 16 + 4), ("ultraquant_4bit", 2 * (16 + 1))]
)
def test_ends_stay_in_16_bits(name: str, size: int, tmp_path: Path) -> None:
    with opened(zoo.build("llama", num_hidden_layers=6, head_dim=32), tmp_path) as subject:
        geometry = subject.geometry
        stored = {site.module for site in CACHE_TYPES[name].quantize(geometry)}
        layers = [layer.index for layer, each in geometry.attentions() if each.module in stored]
        assert layers == [2, 3]
        (_, attention), *_ = geometry.attentions()
        wanted = attention.num_kv_heads * (2 * size + 4 * 32 * 2 * 2)
        assert CACHE_TYPES[name].count_bytes(geometry) == wanted


@pytest.mark.parametrize(
    ("family", "name", "size", "part"),
    [
        ("falcon_h1", "turboquant_k8v4", 0, "does not start with it"),  # both in each layer
        ("bamba", "turboquant_k8v4", 0, ""),  # one of them in each layer
        ("llama", "nvfp4", 72, "no multiple of 16"),
        ("llama", "turboquant_4bit_nc", 96, "no power of two"),
        ("llama", "ultraquant_4bit", 16, "no multiple of 32"),
        ("llama", "int4_per_token_head", 65, "no multiple of 2"),
        ("llama", "int8_per_token_head", 65, ""),
    ],
)
def test_models_that_do_not_fit_are_told_why(
    family: str, name: str, size: int, part: str, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": 6, "head_dim": 8} if size else {}
    sizes = {"k_head_dim": size, "v_head_dim": size} if size else {}
    with opened(zoo.build(family, **changes), tmp_path) as subject:
        layers = []
        for layer in subject.geometry.layers:
            attention = layer.attention and layer.attention.model_copy(update=sizes)
            layers.append(layer.model_copy(update={"attention": attention}))
        changed = subject.geometry.model_copy(update={"layers": tuple(layers)})
        why = CACHE_TYPES[name].explain_misfit(changed)
        assert part in why
        assert bool(why) == bool(part)


SPARSE = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2}
LATENT_RANK, ROTARY = 128, 8


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_latents_in_tiles_are_those_of_a_cache_by_hand(family: str, tmp_path: Path) -> None:
    changes = {**LATENT, **SPARSE, "mlp_layer_types": ["dense", "dense"]}
    sizes = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": ROTARY}
    with opened(build(family, {**changes, **sizes}), tmp_path) as subject:
        cache_type, geometry = CACHE_TYPES["fp8_ds_mla"], subject.geometry
        assert cache_type.explain_misfit(geometry) == ""
        assert "latents" in CACHE_TYPES["mxfp8"].explain_misfit(geometry)
        wanted_bytes = LATENT_RANK + 4 * LATENT_RANK / 128 + 2 * ROTARY
        assert cache_type.count_bytes(geometry) == len(geometry.layers) * wanted_bytes
        quantizers = cache_type.quantize(geometry)
        (_, attention), *_ = geometry.attentions()
        x = torch.randn(1, 1, 5, LATENT_RANK)
        key, value = (quantizers[attention.site(role)] for role in (Role.K, Role.V))
        assert torch.equal(key.fake(x).values, store_all(by_hand.fp8_tiles, x))
        part = torch.randn(1, 1, 5, ROTARY)
        assert torch.equal(value.fake(part).values, part.bfloat16().float())
        (hidden,) = emulate(subject, Candidate(quantizers=quantizers), BATCHES[1])
        plain = plain_forward(subject.model, BATCHES[1])
        assert 0 < float((hidden - plain).norm() / plain.norm()) < 0.1


# --- what each cache type stores, against computations by hand -----------------------------------


DTYPES = (torch.bfloat16, torch.float32)
GLOBAL = torch.tensor(0.0123)
EXACT: dict[str, tuple[Store, OneVector]] = {
    "fp8_per_token_head": (round_trips.e4m3_vectors, by_hand.fp8_per_token_head),
    "int8_per_token_head": (round_trips.int8_vectors, by_hand.int8_per_token_head),
    "int4, rotated": (round_trips.int4_as_rotated, by_hand.int4_as_rotated),
    "nvfp4": (partial(round_trips.nvfp4, scale=GLOBAL), partial(by_hand.nvfp4, scale=0.0123)),
    **{
        f"turboquant, {bits}-bit values": (
            partial(round_trips.uniform_value, bits=bits),
            by_hand.uniform_value(bits),
        )
        for bits in (3, 4)
    },
    "ultraquant": (round_trips.ultraquant, by_hand.ultraquant),
    "fp8_ds_mla": (round_trips.latent_tiles, by_hand.fp8_tiles),
    "mxfp8": (round_trips.mxfp8, by_hand.mxfp8),
    "fp4_mx_block16": (round_trips.mx_block16, by_hand.mx_block16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_by_hand(name: str, dtype: torch.dtype) -> None:
    store, store_one = EXACT[name]
    x = draw_vectors(256 if name == "fp8_ds_mla" else 64, dtype)
    assert torch.equal(store(x), store_all(store_one, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_cache_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Its own class stores a prompt and a token; what it gives back of the prompt is compared."""
    for prompt in draw_vectors(64, dtype).split(1):
        layer = Fp8QuantizedLayer()
        layer.update(prompt, 2 * prompt)
        read = layer.update(prompt[:, :, :1], prompt[:, :, :1])
        for given, stored in zip((prompt, 2 * prompt), read, strict=True):
            assert torch.equal(round_trips.first_update(given).to(dtype), stored[:, :, :-1])


@pytest.mark.parametrize(
    ("store", "store_one", "size"),
    [
        (round_trips.int4_vectors, by_hand.int4_per_token_head, 64),
        (round_trips.int4_vectors, by_hand.int4_per_token_head, 96),
        (round_trips.ultraquant_key, by_hand.ultraquant_key, 64),
    ],
)
def test_rotated_values_are_those_by_hand(store: Store, store_one: OneVector, size: int) -> None:
    """Sums in another order may fall on the other side of a step: one in a thousand does."""
    x = draw_vectors(size, torch.bfloat16)
    found, wanted = store(x), store_all(store_one, x)
    largest = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    is_near = (found - wanted).abs() <= 1e-5 * largest
    assert float(is_near.all(-1).float().mean()) > 0.95


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_of_a_gaussian_are_those_of_the_table(bits: int) -> None:
    """Max, Quantizing for minimum distortion, 1960, table I."""
    halves = {3: [0.2451, 0.7560, 1.344, 2.152]}
    halves[4] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    levels = round_trips.find_gaussian_levels(64, bits) * 8
    assert levels[2 ** (bits - 1) :].tolist() == pytest.approx(halves[bits], rel=3e-3)
    assert levels.tolist() == pytest.approx((-levels.flip(0)).tolist(), abs=1e-6)


@pytest.mark.parametrize("bits", [3, 4])
def test_key_is_the_nearest_direction_of_its_length(bits: int) -> None:
    x = draw_vectors(128, torch.bfloat16)[:, :, 4:]
    found = round_trips.gaussian_key(x, bits)
    wanted = store_all(by_hand.turboquant_key(bits), x)
    error = (found - wanted).norm(dim=-1) / x.float().norm(dim=-1)
    # The table has four digits: values near a border may take the other level.
    assert float(error.median()) < 3e-3
    assert float(error.max()) < 0.2
    assert torch.allclose(found.norm(dim=-1), x.float().norm(dim=-1), rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 0.0123])
def test_four_over_six_takes_the_smaller_error(scale: float) -> None:
    x = draw_vectors(64, torch.bfloat16)
    found = round_trips.nvfp4_four_over_six(x, torch.tensor(scale))
    wanted = store_all(partial(by_hand.nvfp4_4over6, scale=scale), x)
    errors, least = (
        (each - x.float()).unflatten(-1, (-1, 16)).square().sum(-1) for each in (found, wanted)
    )
    assert torch.allclose(errors, least, rtol=1e-5)  # of two that are as good, either is taken
    assert float((found == wanted).float().mean()) > 0.98


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fp8_per_token_head", 132, 132),
        ("int8_per_token_head", 132, 132),
        ("int4_per_token_head", 68, 68),
        ("nvfp4", 72, 72),
        ("turboquant_k8v4", 128, 68),
        ("turboquant_4bit_nc", 66, 68),
        ("turboquant_k3v4_nc", 50, 68),
        ("turboquant_3bit_nc", 50, 52),
        ("ultraquant_4bit", 68, 68),
    ],
)
def test_bytes_of_a_vector_of_128(name: str, key: int, value: int) -> None:
    cache_type = CACHE_TYPES[name]
    value_size = cache_type.key_size if cache_type.value is None else cache_type.value_size
    sizes = [bits * 128 / 8 + more for bits, more in (cache_type.key_size, value_size)]
    assert sizes == [key, value]
