"""Each setting of an engine's numerics changes the emulation to what torch's casts give."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.engines.registry import find_emulated
from fp8calib.errors import VerificationError
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, Fp8Format
from fp8calib.numerics.schemes import SCHEMES, Granularity
from fp8calib.verification.candidates import emulate_kv
from fp8calib.verification.emulation.fake_quantize import Quantizer
from tests import zoo
from tests.doors import make_plan, run_calibration
from tests.verification.by_hand import (
    PLAIN,
    Subject,
    cast,
    cast_blocks,
    cast_rows,
    ceil_log2,
    emulate_scheme,
    hold_weights,
    make_table,
    opened,
    row_scales,
    search_down,
    tensor_scale,
)
from tests.zoo import draw

EVERY_SIZE = replace(find_emulated("vllm")[1], power_of_two_sizes=(1, 1))
"""vLLM, if DeepGEMM ran linears of every size."""
THIRD = 0.0371


def near_ties(scale: float) -> torch.Tensor:
    """Lay out what lies an ulp or two beside a tie: [codes, 5]; any other division shows there."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2 * torch.tensor(scale)
    ulps = torch.arange(-2, 3, dtype=torch.int32)
    return (ties.view(torch.int32).unsqueeze(1) + ulps).view(torch.float32)


_OTHERS = torch.randn(1, 2, 63, 5, generator=torch.Generator().manual_seed(1)) * 5
X = torch.cat([near_ties(THIRD).reshape(1, 2, 63, 5), _OTHERS])


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with opened(zoo.build("deepseek_v3"), tmp_path_factory.mktemp("mla") / "m") as found:
        yield found


def quantizers(
    subject: Subject,
    engine: str,
    values: Any = (THIRD,),
    *,
    dialect: str = "",
    per_head: bool = False,
    fmt: Fp8Format = E4M3FN,
) -> dict[Role, Quantizer]:
    """Give what an engine does to K, V and q of layer 0."""
    roles = (Role.K, Role.V, Role.Q)
    first, *others = (attention for _, attention in subject.geometry.attentions())
    sites = [attention.site(role) for attention in (first, *others) for role in roles]
    scales = dict.fromkeys(sites, torch.tensor(values))
    table = make_table(subject, scales, per_head=per_head, fmt=fmt)
    found = emulate_kv(replace(table, dialect=dialect), find_emulated(engine)[1])
    return {role: found[first.site(role)] for role in roles if first.site(role) in found}


def by_reciprocal(x: torch.Tensor, scale: float, *, down: bool = False) -> torch.Tensor:
    """Multiply by the reciprocal, rounded to fp32, and cast."""
    factor = torch.tensor(1.0) / torch.tensor(scale)
    if down:
        return search_down(x * factor, 1.0) * torch.tensor(scale)
    return (x * factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * torch.tensor(scale)


def in_model_dtype(x: torch.Tensor) -> torch.Tensor:
    """Divide in the dtype of the model, by a scale in that dtype."""
    quotient = x / torch.tensor(THIRD).to(x.dtype)
    codes = quotient.clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * torch.tensor(THIRD)).to(x.dtype)


@pytest.mark.parametrize(
    ("engine", "role", "by_hand"),
    [
        ("vllm-cpu", Role.K, lambda x: by_reciprocal(x, THIRD, down=True)),
        ("vllm-cpu", Role.V, lambda x: by_reciprocal(x, THIRD, down=True)),
        ("vllm", Role.K, lambda x: cast(x, THIRD)),
        ("vllm", Role.Q, lambda x: by_reciprocal(x, THIRD)),
        ("sglang", Role.K, in_model_dtype),
        ("sglang", Role.Q, lambda x: cast(x, 1.0)),
    ],
)
def test_each_engine_divides_and_rounds_in_its_own_way(
    engine: str, role: Role, by_hand: Callable[[torch.Tensor], torch.Tensor], wide: Subject
) -> None:
    x = X.to(torch.bfloat16) if engine == "sglang" else X
    found = quantizers(wide, engine)[role].fake(x).values.to(x.dtype)
    assert torch.equal(found, by_hand(x))
    assert not torch.equal(cast(X, THIRD), by_reciprocal(X, THIRD))


def test_the_largest_of_a_layers_heads_serves_them_all_in_vllm_cpu(wide: Subject) -> None:
    found = quantizers(wide, "vllm-cpu", ((0.01, 0.07),), per_head=True)
    assert torch.equal(found[Role.K].fake(X).values, by_reciprocal(X, 0.07, down=True))
    own = quantizers(wide, "vllm", ((0.01, 0.07),), per_head=True)[Role.K]
    expected = cast(X, torch.tensor([0.01, 0.07]).reshape(1, 2, 1, 1))
    assert torch.equal(own.fake(X).values, expected)


HALF = {"checkpoint_dtype": "float16"}
LONG, BFLOAT16, FLOAT16 = 0.0123456, 0.0123291015625, 0.0123443603515625


@pytest.mark.parametrize(
    ("family", "engine", "dialect", "changes", "given", "held"),
    [
        # vLLM 0.32 on a CPU held 0.0123291015625 for 0.0123456, with bfloat16
        *(
            ("wide", engine, dialect, {}, LONG, BFLOAT16)
            for engine in ("vllm", "vllm-cpu")
            for dialect in ("autofp8", "modelopt", "quark")
        ),
        ("wide", "vllm", "compressed-tensors", {}, LONG, LONG),
        ("wide", "vllm-cpu", "compressed-tensors", {}, LONG, LONG),
        ("wide", "vllm", "quark", HALF, LONG, FLOAT16),
        ("wide", "vllm", "quark", {**HALF, "model_type": "gemma2"}, LONG, BFLOAT16),
        ("wide", "vllm", "compressed-tensors", HALF, 7e4, 7e4),
        ("wide", "vllm", "quark", HALF, 2e-8, "to float16, in which .* is 0"),
        ("wide", "vllm", "quark", HALF, 7e4, "to float16, in which .* is inf"),
        # latent attention
        ("latent", "vllm", "compressed-tensors", {}, THIRD, 1.0),
        ("latent", "vllm", "modelopt", {}, THIRD, 1.0),
        ("latent", "sglang", "kv-scales", {}, THIRD, 1.0),
        ("latent", "reference", "", {}, THIRD, THIRD),
        ("latent", "sglang", "modelopt", {}, THIRD, "stores latents without these scales"),
        ("latent", "sglang", "modelopt", {}, 1.0, 1.0),
    ],
)
def test_the_scale_that_an_engine_holds(
    family: str,
    engine: str,
    dialect: str,
    changes: dict[str, str],
    given: float,
    held: float | str,
    request: pytest.FixtureRequest,
) -> None:
    subject: Subject = request.getfixturevalue(family)
    subject = replace(subject, geometry=subject.geometry.model_copy(update=changes))
    if isinstance(held, str):
        with pytest.raises(VerificationError, match=held):
            quantizers(subject, engine, (given,), dialect=dialect)
        return
    found = quantizers(subject, engine, (given,), dialect=dialect)
    assert Role.Q not in found or family == "wide"
    for role in (Role.K, Role.V):
        assert float(found[role].scale) == pytest.approx(held, rel=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
def test_an_e5m2_cache_has_no_scales_in(engine: str, wide: Subject) -> None:
    with pytest.raises(VerificationError, match=f"{engine} uses no scales with an e5m2 KV cache"):
        quantizers(wide, engine, fmt=E5M2)
    ones = quantizers(wide, engine, (1.0,), fmt=E5M2)
    x = X.clone().clamp(-400, 400)
    by_hand = search_down if engine == "vllm-cpu" else cast
    assert torch.equal(ones[Role.K].fake(x).values, by_hand(x, 1.0, torch.float8_e5m2))


@pytest.mark.parametrize(
    ("engine", "values", "fmt", "saturates"),
    [
        ("vllm", (1.0,), E4M3FN, True),
        ("sglang", (1.0,), E4M3FN, True),
        ("sglang", (0.5,), E4M3FNUZ, False),
        ("sglang", (0.5,), E5M2, False),
    ],
)
def test_saturation_in(
    engine: str, values: tuple[float], fmt: Fp8Format, saturates: bool, wide: Subject
) -> None:
    found = quantizers(wide, engine, values, fmt=fmt)
    assert found[Role.K].saturates is found[Role.V].saturates is saturates


# --- inputs ------------------------------------------------------------------------------------

Q_INPUT = Site("model.layers.0.self_attn.q_proj", Role.INPUT)
INPUTS = torch.randn(7, 160, generator=torch.Generator().manual_seed(2)) * 3


def test_tokens_are_multiplied_by_the_reciprocal_of_a_bounded_scale_in_vllm(
    wide: Subject,
) -> None:
    amax = 448 * torch.tensor(THIRD)
    ties = near_ties(float(amax * torch.tensor(1 / 448))).T
    x = torch.cat([ties, amax.expand(5, 1)], 1)
    x[3] *= 1e-6
    found = emulate_scheme(wide, SCHEMES["fp8-dynamic"], find_emulated("vllm")[1]).quantizers[
        Q_INPUT
    ]
    scales = (x.abs().amax(1, keepdim=True) * torch.tensor(1 / 448)).clamp(min=1 / (448 * 512))
    assert not torch.equal(scales[:3], row_scales(x)[:3])
    assert float(scales[3]) == pytest.approx(1 / (448 * 512))
    expected = (x * (1.0 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(found.fake(x).values, expected)
    assert not torch.equal(expected, cast(x, scales))


def test_groups_have_scales_that_are_powers_of_two_in_vllm(wide: Subject) -> None:
    """128 channels, and the 32 that are left."""
    found = emulate_scheme(wide, SCHEMES["fp8-block"], EVERY_SIZE).quantizers[Q_INPUT]
    pieces = []
    for piece in INPUTS.split(128, 1):
        scales = [2.0 ** ceil_log2(float(row.abs().max()) / 448) for row in piece]
        pieces.append(cast(piece, torch.tensor(scales).unsqueeze(1)))
    assert torch.equal(found.fake(INPUTS).values, torch.cat(pieces, 1))
    plain = emulate_scheme(wide, SCHEMES["fp8-block"], find_emulated("sglang")[1]).quantizers[
        Q_INPUT
    ]
    expected = torch.cat([cast_rows(piece) for piece in INPUTS.split(128, 1)], 1)
    assert torch.equal(plain.fake(INPUTS).values, expected)


def test_powers_of_two_are_exact_over_the_whole_range() -> None:
    quantizer = Quantizer(fmt=E4M3FN, scale=Granularity.TOKEN, power_of_two=True)
    exponents = range(-120, 110)
    x = torch.tensor([[448 * 2.0**n] for n in exponents])
    assert quantizer.scale_for(x).flatten().tolist() == [2.0**n for n in exponents]
    above = torch.tensor([[448 * 2.0**n * 1.001] for n in exponents])
    assert quantizer.scale_for(above).flatten().tolist() == [2.0 ** (n + 1) for n in exponents]


def test_static_scales_are_multiplied_by_their_reciprocal(wide: Subject, tmp_path: Path) -> None:
    wide.model.save_pretrained(tmp_path)
    _, stats = run_calibration(tmp_path, make_plan(draw([20, 20])))
    static = {
        engine: emulate_scheme(
            wide, SCHEMES["fp8-static"], find_emulated(engine)[1], stats=stats
        ).quantizers[Q_INPUT]
        for engine in ("reference", "vllm")
    }
    scale = float(stats.sites[Q_INPUT].amax.max()) / 448
    x = near_ties(scale)
    assert torch.equal(static["vllm"].fake(x).values, by_reciprocal(x, scale))
    assert torch.equal(static["reference"].fake(x).values, cast(x, torch.tensor(scale)))
    assert not torch.equal(by_reciprocal(x, scale), cast(x, torch.tensor(scale)))


# --- weights -----------------------------------------------------------------------------------


def test_vllm_quantizes_blocks_again_with_scales_that_are_powers_of_two(wide: Subject) -> None:
    """The checkpoint's own scales first, so both roundings show."""
    name = "model.layers.0.mlp.down_proj.weight"
    weight = wide.model.get_parameter(name).detach()
    first = cast_blocks(weight)
    strips = []
    for strip in first.split(128, 0):
        pieces = [
            cast(piece, 2.0 ** ceil_log2(tensor_scale(piece))) for piece in strip.split(128, 1)
        ]
        strips.append(torch.cat(pieces, 1))
    for numerics, held in ((EVERY_SIZE, torch.cat(strips, 0)), (PLAIN, first)):
        found = emulate_scheme(wide, SCHEMES["fp8-block"], numerics)
        assert torch.equal(hold_weights(wide, found)[name], held)
    assert not torch.equal(torch.cat(strips, 0), first)


@pytest.mark.parametrize(
    ("dtype", "linears"),
    [("float16", ""), ("bfloat16", "q_proj k_proj v_proj gate_proj up_proj")],
)
def test_powers_of_two_are_for_the_linears_that_deep_gemm_runs(
    tmp_path: Path, dtype: str, linears: str
) -> None:
    """64 rows, of q, k and v (160 + 80 + 80) or of gate and up (96 each), and 128 columns."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 40, "dtype": dtype}
    with opened(zoo.build("llama", **sizes), tmp_path / "m") as built:
        geometry = built.geometry.model_copy(update={"checkpoint_dtype": dtype})
        subject = replace(built, geometry=geometry)
        found = emulate_scheme(subject, SCHEMES["fp8-block"], find_emulated("vllm")[1])
        changed = {
            name.split(".")[-2]
            for name, held in hold_weights(subject, found).items()
            if name.startswith("model.layers.0.") and held.ndim == 2
            if not torch.equal(held, cast_blocks(subject.model.get_parameter(name).detach()))
        }
    rounded = {site.module for site, each in found.quantizers.items() if each.power_of_two}
    assert changed == {name.split(".")[-1] for name in rounded} == set(linears.split())
