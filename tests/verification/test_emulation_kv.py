"""Emulated K, V and q against a plain forward whose cache was quantized by torch's casts."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fp8calib.engines.arithmetic import Numerics
from fp8calib.errors import VerificationError
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Attention, Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from tests.verification import by_hand
from tests.verification.by_hand import (
    BATCHES,
    FULL,
    PLAIN,
    Change,
    HandCache,
    Subject,
    cast,
    changed_queries,
    emulate,
    plain_forward,
    search_down,
    text_config,
)

TOWARD_ZERO = Numerics(name="down", kv_rounding="toward-zero")
WITH_QUERY = Numerics(name="query", quantizes_query=True)
BYPASSES_REGISTRY = ("falcon",)
TOO_SMALL, TOO_LARGE = 0.37, 41.0
"""Times amax / 448: K clips, many of V flush to zero."""


def producers(subject: Subject) -> dict[int, Attention]:
    """Give the layers that have a cache of their own."""
    pairs = subject.geometry.attentions()
    return {layer.index: attention for layer, attention in pairs if attention.producer is None}


def head_amaxes(subject: Subject) -> dict[Site, torch.Tensor]:
    """Look at K and V in a plain forward: largest magnitude per KV head."""
    leave = dict.fromkeys(producers(subject), (torch.clone, torch.clone))
    cache = HandCache(text_config(subject.model), leave)
    plain_forward(subject.model, FULL, cache)
    return {
        attention.site(role): x.abs().amax((0, 2, 3)).reshape(attention.num_kv_heads, -1).amax(1)
        for index, attention in producers(subject).items()
        for role, x in zip((Role.K, Role.V), cache.seen[index], strict=True)
    }


def make_table(subject: Subject, values: dict[Site, torch.Tensor], **settings: Any) -> ScaleTable:
    """Wrap scales; layers that read another's cache carry a scale that must not matter."""
    shared = {
        attention.site(role): torch.full_like(values[owner.site(role)], 3.0)
        for _, attention in subject.geometry.attentions()
        if attention.producer is not None
        for owner in [producers(subject)[attention.producer]]
        for role in (Role.K, Role.V)
    }
    return by_hand.make_table(subject, {**shared, **values}, **settings)


def factor(site: Site) -> float:
    """Make K clip and V flush."""
    return TOO_SMALL if site.role is Role.K else TOO_LARGE


def by_heads(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Lay a scale per KV head beside [B, H, S, D], whose heads may be repeated."""
    repeats = x.shape[1] // len(scales)
    each = [scales[head // repeats] for head in range(x.shape[1])]
    return torch.stack(each).reshape(1, -1, 1, 1)


def hand_forward(
    subject: Subject, batch: Any, scales: dict[Site, torch.Tensor], quantize: Any = cast
) -> torch.Tensor:
    """Run a plain forward; `scales` are per KV head."""

    def change(site: Site) -> Change:
        return lambda x: quantize(x, by_heads(x, scales[site]))

    changes = {
        index: (change(attention.site(Role.K)), change(attention.site(Role.V)))
        for index, attention in producers(subject).items()
    }
    return plain_forward(subject.model, batch, HandCache(text_config(subject.model), changes))


def assert_same(
    subject: Subject,
    table: ScaleTable,
    scales: dict[Site, torch.Tensor],
    *,
    numerics: Numerics = PLAIN,
    quantize: Any = cast,
) -> None:
    """Compare the emulation with the plain forward, bit for bit."""
    quantizers = emulate_kv(table, numerics)
    assert set(quantizers) == set(scales), "no site of a layer that reads another's cache"
    found = emulate(subject, Candidate(quantizers=quantizers), *BATCHES)
    for batch, hidden in zip(BATCHES, found, strict=True):
        assert torch.equal(hidden, hand_forward(subject, batch, scales, quantize))
        assert not torch.equal(hidden, plain_forward(subject.model, batch))


Spread = dict[Site, torch.Tensor]


def per_tensor(subject: Subject, room: float = 0.0, largest: float = 448.0) -> Spread:
    """Give one scale for all heads, which leaves `room`, or clips and flushes."""
    return {
        site: (amax.max() / largest * (room or factor(site))).expand(len(amax))
        for site, amax in head_amaxes(subject).items()
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_scale_belongs_to_the_heads_of_its_rank(subject: Subject, tp: int) -> None:
    """Each rank has heads of its own, or the ranks that share a head agree on its scale."""
    values, spread = {}, {}
    for site, amax in head_amaxes(subject).items():
        num_heads = len(amax)
        count = min(tp, num_heads)
        own = amax.max() / 448 * factor(site) * torch.linspace(0.7, 1.9, count)
        values[site] = torch.stack([own[rank * count // tp] for rank in range(tp)])
        spread[site] = torch.stack([own[head * count // num_heads] for head in range(num_heads)])
    assert_same(subject, make_table(subject, values, tp=tp), spread)


def test_a_scale_per_head_belongs_to_its_head(subject: Subject) -> None:
    scales = {
        site: amax / 448 * factor(site) * torch.linspace(0.7, 1.9, len(amax))
        for site, amax in head_amaxes(subject).items()
    }
    values = {site: value.unsqueeze(0) for site, value in scales.items()}
    assert_same(subject, make_table(subject, values, per_head=True), scales)


def test_rounding_toward_zero_takes_the_value_a_search_finds(subject: Subject) -> None:
    """The scales leave room: what is beyond the largest value has no neighbour toward zero."""
    spread = per_tensor(subject, room=1.37)
    table = make_table(subject, {site: value[:1] for site, value in spread.items()})
    assert_same(subject, table, spread, numerics=TOWARD_ZERO, quantize=search_down)


def test_no_scales_are_scales_of_one(subject: Subject) -> None:
    ones = {site: torch.ones_like(amax) for site, amax in head_amaxes(subject).items()}
    assert_same(subject, make_unscaled_table(subject.geometry, E4M3FN), ones)


@pytest.mark.parametrize(
    ("fmt", "dtype", "largest"),
    [(E4M3FNUZ, torch.float8_e4m3fnuz, 240.0), (E5M2, torch.float8_e5m2, 57344.0)],
    ids=["e4m3fnuz", "e5m2"],
)
def test_other_formats_have_their_own_values(
    fmt: Fp8Format, dtype: torch.dtype, largest: float, llama: Subject
) -> None:
    spread = per_tensor(llama, largest=largest)
    table = make_table(llama, {site: value[:1] for site, value in spread.items()}, fmt=fmt)
    assert_same(llama, table, spread, quantize=partial(cast, dtype=dtype))


def test_scales_of_a_cache_that_stays_in_16_bits_are_refused(llama: Subject) -> None:
    scales = {site: torch.ones(1) for site in head_amaxes(llama)}
    table = replace(make_table(llama, scales), dialect="quark")
    rounding = Numerics(name="other", kv_rounded_dialects=frozenset({"quark"}))
    assert emulate_kv(table, rounding)
    with pytest.raises(VerificationError, match="other caches llama in 16 bits"):
        emulate_kv(table, replace(rounding, kv_plain_types=("llama",)))


# --- q -----------------------------------------------------------------------------------------


def lossless(subject: Subject) -> Spread:
    """Give scales of K and V that nearly keep them: what differs comes of q."""
    return {site: torch.full_like(amax, 0.01) for site, amax in head_amaxes(subject).items()}


def query_table(subject: Subject, values: Spread) -> ScaleTable:
    kv = {site: value[:1] for site, value in lossless(subject).items()}
    return make_table(subject, {**kv, **values})


def test_q_is_quantized_on_its_way_into_attention(subject: Subject) -> None:
    """Shared layers too; latent attention is left alone."""
    family = text_config(subject.model).model_type
    if family in BYPASSES_REGISTRY:
        pytest.skip("q does not go through transformers' attention interface")
    attentions = [attention for _, attention in subject.geometry.attentions()]
    numbers = {a.site(Role.Q): 0.0123 + 0.004 * i for i, a in enumerate(attentions)}
    table = query_table(subject, {s: torch.tensor([v]) for s, v in numbers.items()})
    quantizers = emulate_kv(table, WITH_QUERY)
    changes: list[Change] = [
        torch.clone if a.kind == "latent" else partial(_cast_query, a, numbers[a.site(Role.Q)])
        for a in attentions
    ]
    spread = lossless(subject)
    for batch in BATCHES:
        (found,) = emulate(subject, Candidate(quantizers=quantizers), batch)
        with changed_queries(subject.model, changes):
            expected = hand_forward(subject, batch, spread)
        assert torch.equal(found, expected)
        without = hand_forward(subject, batch, spread)
        assert torch.equal(found, without) == (family == "deepseek_v3")


def _cast_query(attention: Attention, scale: float, query: torch.Tensor) -> torch.Tensor:
    if attention.query_divisor == 1.0:
        return cast(query, scale)
    before_scaling = query / attention.query_divisor
    return cast(before_scaling, scale) * attention.query_divisor
