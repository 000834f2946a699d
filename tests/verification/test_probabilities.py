"""Softmax probabilities in FP8 against attention computed element by element."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.engines.registry import ENGINES, find_emulated
from fp8calib.model.geometry import Role
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation import probabilities
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks
from fp8calib.verification.emulation.fake_quantize import Damage, Quantizer, add_damage
from fp8calib.verification.emulation.probabilities import (
    AttentionCall,
    attend_in_fp32,
    attending_bytes,
)
from tests.kit.allocations import peak_allocated
from tests.kit.minutes import in_minutes, takes_minutes
from tests.verification.by_hand import FULL, PADDED, Subject, plain_forward

QUANTIZER = Quantizer(fmt=E4M3FN, scale=torch.tensor(1 / 256))
WITHOUT_INTERFACE = ("falcon",)
HEADS, KV_HEADS, LENGTH, SIZE = 4, 2, 7, 8


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def make_call(mask: torch.Tensor | None = None, **options: Any) -> AttentionCall:
    return AttentionCall(
        function=lambda *_, **__: (torch.empty(0), None),
        module=nn.Identity(),
        query=draw(2, HEADS, LENGTH, SIZE, seed=1),
        key=draw(2, KV_HEADS, LENGTH, SIZE, seed=2),
        value=draw(2, KV_HEADS, LENGTH, SIZE, seed=3),
        mask=mask,
        options=options,
    )


def may_see(mask: torch.Tensor | None, place: tuple[int, int, int, int], *, causal: bool) -> float:
    """Give what is added to a score: 0, minus infinity, or what a mask of floats says."""
    b, h, i, j = place
    if mask is None:
        return -math.inf if causal and j > i else 0.0
    value = mask[b % mask.shape[0], h % mask.shape[1], i % mask.shape[2], j]
    if mask.dtype == torch.bool:
        return 0.0 if bool(value) else -math.inf
    return float(value)


def attend_by_hand(call: AttentionCall, *, quantized: bool, tile: int = LENGTH) -> torch.Tensor:
    """Compute every output from its definition, one query at a time."""
    options: Mapping[str, Any] = call.options
    q, k, v = (x.numpy().astype(np.float64) for x in (call.query, call.key, call.value))
    scaling, softcap = options.get("scaling", SIZE**-0.5), options.get("softcap")
    output = np.zeros((2, LENGTH, HEADS, SIZE))
    for b, h, i in np.ndindex(2, HEADS, LENGTH):
        group = h * KV_HEADS // HEADS
        scores = []
        for j in range(LENGTH):
            score = scaling * float(q[b, h, i] @ k[b, group, j])
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if (bias := options.get("position_bias")) is not None:
                score += float(bias[0, h, i, j])
            causal = options.get("is_causal", True)
            scores.append(score + may_see(call.mask, (b, h, i, j), causal=causal))
        largest = max(scores)
        p = np.array([math.exp(score - largest) for score in scores])
        total = p.sum()
        if (sinks := options.get("s_aux")) is not None:
            total += math.exp(float(sinks[h]) - largest)
        if quantized:
            for j in range(LENGTH):  # relative to the largest score from its tile on
                seen = max(scores[j - j % tile :])
                if seen > -math.inf:
                    rounded = float(ml_dtypes.float8_e4m3fn(256 * math.exp(scores[j] - seen)))
                    p[j] = rounded / 256 * math.exp(seen - largest)
        output[b, i, h] = sum(p[j] * v[b, group, j] for j in range(LENGTH)) / total
    return torch.from_numpy(output).float()


WINDOW = torch.tensor([[0 <= i - j < 3 for j in range(LENGTH)] for i in range(LENGTH)])
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"is_causal": False},
    "scaled": {"scaling": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": draw(HEADS, seed=4)},
    "window": {"mask": WINDOW.expand(2, 1, LENGTH, LENGTH)},
    "floats": {"mask": torch.where(WINDOW, 0.0, torch.finfo(torch.float32).min)[None, None]},
    "bias": {"position_bias": draw(1, HEADS, LENGTH, LENGTH, seed=5)},
    "all": {
        "mask": WINDOW[None, None],
        "softcap": 1.5,
        "s_aux": draw(HEADS, seed=4),
        "scaling": 0.7,
    },
}


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute by torch's operations on the CPU, then by the kernel, on the GPU if there is one."""
    if request.param == "torch":
        return "cpu"
    pytest.importorskip("triton", reason="Triton is in the extra `test`")
    monkeypatch.setattr(probabilities, "has_probability_kernel", lambda _device: True)
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def place(call: AttentionCall, device: str) -> AttentionCall:
    tensors = {name: getattr(call, name) for name in ("query", "key", "value", "mask")}
    moved = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    options = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.options.items()
    }
    return replace(call, options=options, **moved)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a row that sees no key
@pytest.mark.parametrize(
    ("device", "chunk"),
    [
        ("torch", 30),
        ("kernel", 60),
        *(pytest.param("torch", chunk, marks=takes_minutes) for chunk in (1, 1 << 20)),
    ],
    indirect=["device"],
)
@pytest.mark.parametrize("tile", [None, 3, *in_minutes(LENGTH, 1)])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_output_is_that_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, name: str, tile: int | None, chunk: int, device: str
) -> None:
    """In 16 bits, and rounded: all keys at once, or in tiles of which the last comes first."""
    for constant in ("_CHUNK_SIZE", "_GPU_CHUNK_SIZE"):
        monkeypatch.setattr(probabilities, constant, chunk)
    call = make_call(**OPTIONS[name])
    expected = attend_by_hand(call, quantized=tile is not None, tile=tile or LENGTH)

    quantizer = None
    if tile is not None:
        quantizer = replace(QUANTIZER, tile=tile % LENGTH).to(torch.device(device))
    found = attend_in_fp32(place(call, device), quantizer, None)[0].cpu()

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("length", "tile"), [(1024, 0), (1024, 128), (300, 0)])
def test_attention_takes_no_more_memory_than_planned(length: int, tile: int) -> None:
    shape = (2, 16, length, 4)
    call = replace(make_call(), query=draw(*shape, seed=1), key=draw(*shape, seed=2))
    call = replace(call, value=draw(*shape, seed=3))
    peaks: list[int] = []
    with peak_allocated(peaks):
        attend_in_fp32(call, replace(QUANTIZER, tile=tile), None)
    planned = attending_bytes(torch.device("cpu"), 16, length)
    assert planned / 4 < peaks[0] - 4 * call.query.numel() < planned


@pytest.mark.parametrize("device", ["torch", "kernel"], indirect=True)
@pytest.mark.parametrize("first", [0, 3])
def test_the_damage_is_that_of_every_8th_query_of_the_first_sequence(
    first: int, device: str
) -> None:
    """Padding does not count: a row of the second sequence is never measured."""
    shape = (2, HEADS, 20, SIZE)
    call = replace(make_call(), query=draw(*shape, seed=6), key=draw(*shape, seed=7))
    call = replace(call, value=draw(*shape, seed=8))
    kept = torch.tensor([*range(first, 18), 23, 24])
    quantizer = QUANTIZER.to(torch.device(device))
    _, [row] = attend_in_fp32(place(call, device), quantizer, kept if first else None)
    totals: dict[str, torch.Tensor] = {}
    add_damage(totals, [("P", row)])

    signal, noise, count = 0.0, 0.0, 0
    for head, row in itertools.product(range(HEADS), range(first, 18 if first else 20, 8)):
        q, k = call.query[0, head, row].double(), call.key[0, head, : row + 1].double()
        scores = (k @ q).numpy() * SIZE**-0.5
        p = np.exp(scores - scores.max())
        rounded = (p * 256).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 256
        signal, noise, count = signal + (p**2).sum(), noise + ((rounded - p) ** 2).sum(), count + 20
    damage = Damage(*totals["P"].tolist())
    assert (damage.num_elements, damage.amax, damage.clipped) == (count, 1.0, 0.0)
    assert damage.signal == pytest.approx(signal, rel=1e-5)
    assert damage.noise == pytest.approx(noise, rel=1e-3)


@pytest.mark.parametrize("batch", [PADDED, FULL])
def test_the_attention_of_every_family_is_reproduced(subject: Subject, batch: Any) -> None:
    """Windows, sinks, softcaps, groups of heads: with P as it is nothing changes."""
    decoder, seen = Decoder(subject.model), set()
    hooks = EmulationHooks(Candidate())

    def attend(attention: Any, *given: Any) -> Any:
        call = AttentionCall(*given)
        seen.add(attention.module)
        return attend_in_fp32(call, None, None)[0], None

    with open_hooks(
        subject.model, subject.geometry, hooks, query=True, inputs=False, attend=attend
    ):
        cache = HookedCache(decoder.config, subject.geometry.owners(), (), hooks)
        found = decoder.run(batch, cache)

    expected = plain_forward(subject.model, batch)
    for row, length in enumerate(batch.lengths):
        torch.testing.assert_close(
            found[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4
        )
    is_met = subject.model.config.model_type not in WITHOUT_INTERFACE
    assert seen == ({a.module for _, a in subject.geometry.attentions()} if is_met else set())


def test_a_model_with_other_attention_keeps_it(llama: Subject) -> None:
    attention = next(a for _, a in llama.geometry.attentions())
    hooks = EmulationHooks(Candidate(quantizers={attention.site(Role.P): QUANTIZER}))
    hooks.begin_batch(FULL)
    hooks.attend(attention, make_call())
    assert hooks.damage == {}


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ, E5M2])
def test_the_engines_that_cast_p_do_so_for_e4m3fn(llama: Subject, fmt: Fp8Format) -> None:
    table = make_unscaled_table(llama.geometry, fmt)
    casting = set()
    for key, engine in ENGINES.items():
        if engine.numerics is None:
            continue
        found = emulate_kv(table, find_emulated(key)[1])
        casts = [each for site, each in found.items() if site.role is Role.P]
        if casts:
            casting.add(key)
            assert all(each.fmt is fmt and float(each.scale) == 1 / 256 for each in casts)
    assert casting == ({"vllm", "sglang"} if fmt is E4M3FN else set())
