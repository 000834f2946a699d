"""Emulated cache types against the kernels of vLLM and SGLang, run by Triton's interpreter."""

import os
import subprocess
from collections.abc import Mapping

import pytest
import torch

from fp8calib.engines.facts.release import SGLANG_RELEASES
from fp8calib.engines.registry import find_emulated
from fp8calib.numerics.formats import E4M3FN
from fp8calib.plugins.kv_types import round_trips
from fp8calib.plugins.kv_types.round_trips import hadamard
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.probabilities import AttentionCall, attend_in_fp32
from tests.plugins.kv_types.by_hand import draw_vectors
from tests.real_engines.package import open_release
from tests.real_engines.vllm_job import ENVIRONMENT, PYTHON, ROOT

Pair = tuple[torch.Tensor, torch.Tensor]
SHAPES = {
    "64, bfloat16": (64, torch.bfloat16),
    "64, float32": (64, torch.float32),
    "96, bfloat16": (96, torch.bfloat16),
    "128, float16": (128, torch.float16),
}
PER_TOKEN = ("fp8_per_token_head", "int8_per_token_head")
TILE = 32
"""Keys that the kernel reads at a time."""
TWO_HALF_STEPS = 2.0**-10
"""Lengths are kept in fp16, and the kernel that dequantizes for a further prompt writes fp16."""
TIE = 2.0**-20
"""Of a vector's length: what the order of an fp32 sum makes of a sum that is zero."""


def draw_pairs() -> dict[str, Pair]:
    """Draw K and V [tokens, heads, size]."""
    return {
        name: tuple(
            draw_vectors(size, dtype, seed=seed).flatten(0, 1).transpose(0, 1).contiguous()
            for seed in (1, 2)
        )
        for name, (size, dtype) in SHAPES.items()
    }  # type: ignore[return-value]


def draw_latents() -> Pair:
    """Draw latents [tokens, size] without zeros, and their rotary part."""
    generator = torch.Generator().manual_seed(5)
    latent = torch.randn(40, 512, generator=generator) * torch.rand(40, 1, generator=generator)
    return latent.bfloat16(), torch.randn(40, 64, generator=generator).bfloat16()


def draw_calls() -> dict[str, dict[str, torch.Tensor]]:
    """Draw q, K and V [tokens, heads, size] and scales; 24 tokens are one tile of the kernel."""
    generator = torch.Generator().manual_seed(4)

    def draw(tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "query": torch.randn(tokens, 4, 64, generator=generator).to(dtype),
            "key": (3 * torch.randn(tokens, 2, 64, generator=generator)).to(dtype),
            "value": torch.randn(tokens, 2, 64, generator=generator).to(dtype),
            "k_scale": torch.tensor([0.037]),
            "v_scale": torch.tensor([0.011]),
            "q_scale": torch.tensor([0.013]),
        }

    return {"24, float32": draw(24, torch.float32), "40, float16": draw(40, torch.float16)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Pair]]:
    """Let the kernels of every type store, read back, and attend."""
    folder = tmp_path_factory.mktemp("kernels")
    given = {"stored": draw_pairs(), "attended": draw_calls(), "latents": draw_latents()}
    torch.save(given, folder / "in.pt")
    job = ROOT / "tests" / "real_engines" / "kernel_job.py"
    for file in ("mxfp8_quant_store_kv.py", "kvfp4_tensor.py", "dsa_quant_k_cache.py"):
        text = open_release(SGLANG_RELEASES[-1]).read(file)
        (folder / file).write_text(text)
    command = [PYTHON, job, folder / "in.pt", folder / "out.pt", folder]
    environment = {**os.environ, **ENVIRONMENT, "TRITON_INTERPRET": "1"}
    subprocess.run(command, env=environment, check=True, timeout=1200)
    found: Mapping[str, Mapping[str, Pair]] = torch.load(folder / "out.pt")
    return found


@pytest.fixture(scope="module")
def stored(ran: Mapping[str, Mapping[str, Pair]]) -> Mapping[str, Pair]:
    """Give what the kernels stored and read back."""
    return ran["stored"]


ONLY_READ = {"nvfp4", "nvfp4_4over6", "fp8_ds_mla", "fp8_quantized_cache"}
NAMES = [name for name in CACHE_TYPES if name not in ONLY_READ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_kernel(stored: Mapping[str, Pair], name: str, shape: str) -> None:
    if f"{shape}/{name}" not in stored:
        pytest.skip("the kernel takes no such heads or dtype")
    key, value = draw_pairs()[shape]
    found_key, found_value = stored[f"{shape}/{name}"]
    cache_type = CACHE_TYPES[name]
    if name.startswith("int4"):
        assert torch.equal(round_trips.int4_as_rotated(key), found_key)
        assert torch.equal(round_trips.int4_as_rotated(value), found_value)
    elif name.startswith("turboquant"):
        is_plain = cache_type.key is round_trips.e4m3_unscaled
        mine = cache_type.key(key) if is_plain else hadamard(cache_type.key(key))
        assert_near(mine, found_key if is_plain else settle_ties(key, mine, found_key))
        assert_near((cache_type.value or cache_type.key)(value), found_value)
    elif name == "ultraquant_4bit":
        assert torch.equal(round_trips.ultraquant(value), found_value)
        assert_near(hadamard(cache_type.key(key)), found_key)
    else:
        assert torch.equal(cache_type.key(key), found_key)
        assert torch.equal((cache_type.value or cache_type.key)(value), found_value)


def settle_ties(key: torch.Tensor, mine: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Give values between the two middle levels, which are equally far, the sign of `mine`.

    A constant vector is zero in all directions but one. The exact sum takes the upper level. vLLM
    multiplies by 1 / sqrt(128), rounded, so the sign is that of an error that each GPU sums to
    another value.
    """
    is_tied = hadamard(key).abs() <= TIE * key.float().norm(dim=-1, keepdim=True)
    assert float(is_tied.float().mean()) < 0.05
    return torch.where(is_tied, found.abs().copysign(mine), found)


def test_latents_are_those_of_the_kernel(stored: Mapping[str, Pair]) -> None:
    """SGLang's kernel multiplies by a reciprocal: few codes are the neighbours of vLLM's."""
    (latent, rope), (found, rotary) = draw_latents(), stored["latents"]
    tiles = latent.float().unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    codes = (tiles * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal((codes.float() * scale).flatten(-2), found)
    mine = CACHE_TYPES["fp8_ds_mla"].key(latent)
    assert float((mine == found).float().mean()) > 0.999
    assert bool(((mine - found).abs() <= mine.abs() * 2**-3 + 1e-7).all())
    assert torch.equal(round_trips.rotary(rope), rotary)


def assert_near(mine: torch.Tensor, found: torch.Tensor) -> None:
    """Compare within the rounding to fp16 of values as large as the largest of their vector.

    A product in another order may fall on the other side of a step: one in a thousand does.
    """
    largest = mine.abs().amax(-1, keepdim=True)
    is_near = (mine - found).abs() <= TWO_HALF_STEPS * largest + 1e-7
    assert float(is_near.float().mean()) >= 0.999


def test_interpreter_was_used(stored: Mapping[str, Pair]) -> None:
    assert {key.rpartition("/")[2] for key in stored} >= set(NAMES)


CLOSE = {"24, float32": 1e-6, "40, float16": 1e-3}
"""Relative: the kernel accumulates in fp32, and rounds P and the output to the model's dtype."""
OTHER_TILES = 3e-3
"""Where P is rounded to FP8 by the largest score of a tile, and not of all keys."""
ATTENDED = ("fp8", "fp8, q in FP8", *PER_TOKEN, *(x for x in NAMES if x.startswith("turboquant")))


@pytest.mark.parametrize("call", draw_calls())
@pytest.mark.parametrize("name", ATTENDED)
def test_attention_is_that_of_the_kernel(
    ran: Mapping[str, Mapping[str, Pair]], name: str, call: str
) -> None:
    """As a prompt, and token by token; TurboQuant's kernel attends token by token alone."""
    given = draw_calls()[call]
    expected = emulate_attention(name, **given)
    limit = CLOSE[call]
    if name == "fp8, q in FP8" and len(expected) > TILE:
        limit = OTHER_TILES
    for found in ran["attended"][f"{call}/{name}"]:
        assert (found.float() - expected).norm() <= limit * expected.norm()


def emulate_attention(
    name: str,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    q_scale: torch.Tensor,
) -> torch.Tensor:
    """Attend with the emulated cache: fp32 [tokens, heads, size]."""

    def fake(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return Quantizer(fmt=E4M3FN, scale=scale).fake(x.float()).values

    probabilities = None
    if name in CACHE_TYPES:
        own = CACHE_TYPES[name]
        key, value = own.key(key), (own.value or own.key)(value)
    else:
        key, value = fake(key, k_scale), fake(value, v_scale)
    if name == "fp8, q in FP8":
        query = fake(query, q_scale)
        factor = find_emulated("vllm")[1].probability_factor
        probabilities = Quantizer(fmt=E4M3FN, scale=torch.tensor(1 / factor))
    q, k, v = (each.float().transpose(0, 1)[None] for each in (query, key, value))
    module = torch.nn.Module()
    call = AttentionCall(
        function=torch.nn.functional.scaled_dot_product_attention,
        module=module,
        query=q,
        key=k,
        value=v,
        mask=None,
        options={"is_causal": True},
    )
    return attend_in_fp32(call, probabilities, None)[0][0]
