"""Each setting of an engine's numerics changes the emulation to what torch's casts give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.errors import VerificationError
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable
from fp8calib.model.shapes import Attention, Role, Site
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2
from fp8calib.numerics.schemes import SCHEMES, Granularity
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import emulate_kv
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


def make_table(
    subject: Subject, values: torch.Tensor, *, per_head: bool = False, **settings: Any
) -> ScaleTable:
    sites = [
        attention.site(role)
        for _, attention in subject.geometry.attentions()
        for role in (Role.K, Role.V, Role.Q)
    ]
    scale = Scale(values=values, source=ScaleSource.OBSERVED)
    return ScaleTable(
        geometry=subject.geometry,
        fmt=settings.get("fmt", E4M3FN),
        tp=1,
        per_head=per_head,
        scales=dict.fromkeys(sites, scale),
    )


def first_attention(subject: Subject) -> Attention:
    """Give the attention of layer 0."""
    return next(attention for _, attention in subject.geometry.attentions())


def quantizers(
    subject: Subject, numerics: Numerics, values: Any = (THIRD,), **settings: Any
) -> dict[Role, Quantizer]:
    """Give what the product does to K, V and q of layer 0."""
    dialect = settings.pop("dialect", "")
    table = make_table(subject, torch.tensor(values), **settings)
    found = emulate_kv(replace(table, dialect=dialect), numerics)
    attention = first_attention(subject)
    roles = (Role.K, Role.V, Role.Q)
    return {role: found[attention.site(role)] for role in roles if attention.site(role) in found}


def by_reciprocal(x: torch.Tensor, scale: float, *, down: bool = False) -> torch.Tensor:
    """Multiply by the reciprocal, rounded to fp32, and cast."""
    factor = torch.tensor(1.0) / torch.tensor(scale)
    if down:
        return search_down(x * factor, 1.0) * torch.tensor(scale)
    return (x * factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * torch.tensor(scale)


def test_the_vllm_cpu_cache_multiplies_by_the_reciprocal_and_rounds_toward_zero(
    wide: Subject,
) -> None:
    for role in (Role.K, Role.V):
        found = quantizers(wide, find_emulated("vllm-cpu")[1])[role].fake(X).values
        assert torch.equal(found, by_reciprocal(X, THIRD, down=True))
        assert not torch.equal(found, by_reciprocal(X, THIRD))


def test_the_vllm_gpu_cache_divides_and_rounds_to_nearest(wide: Subject) -> None:
    found = quantizers(wide, find_emulated("vllm")[1])
    assert torch.equal(found[Role.K].fake(X).values, cast(X, THIRD))
    assert torch.equal(found[Role.Q].fake(X).values, by_reciprocal(X, THIRD))


def test_the_sglang_cache_divides_in_the_dtype_of_the_model_and_takes_q_at_one(
    wide: Subject,
) -> None:
    x = X.to(torch.bfloat16)
    found = quantizers(wide, find_emulated("sglang")[1])
    quotient = x / torch.tensor(THIRD).to(torch.bfloat16)
    codes = quotient.clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = (codes.float() * torch.tensor(THIRD)).to(torch.bfloat16)
    assert torch.equal(found[Role.K].fake(x).values.to(x.dtype), expected)
    assert torch.equal(found[Role.Q].fake(x).values, cast(x, 1.0))


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("dialect", ["autofp8", "modelopt", "quark"])
def test_vllm_rounds_scales_that_are_not_compressed_tensors(
    wide: Subject, engine: str, dialect: str
) -> None:
    """VLLM 0.32 on a CPU held 0.0123291015625 for 0.0123456, with bfloat16."""
    numerics = find_emulated(engine)[1]
    rounded = quantizers(wide, numerics, (0.0123456,), dialect=dialect)
    exact = quantizers(wide, numerics, (0.0123456,), dialect="compressed-tensors")
    for role, quantizer in rounded.items():
        assert float(quantizer.scale) == 0.0123291015625  # type: ignore[arg-type]
        assert float(exact[role].scale) == pytest.approx(0.0123456, rel=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "held"), [("llama", 0.0123443603515625), ("gemma2", 0.0123291015625)]
)
def test_vllm_rounds_to_float16_where_it_serves_a_model_in_it(
    wide: Subject, model_type: str, held: float
) -> None:
    changes = {"checkpoint_dtype": "float16", "model_type": model_type}
    half = replace(wide, geometry=wide.geometry.model_copy(update=changes))
    found = quantizers(half, find_emulated("vllm")[1], (0.0123456,), dialect="quark")
    assert float(found[Role.K].scale) == held  # type: ignore[arg-type]


def test_a_scale_that_the_rounding_ruins_is_refused(wide: Subject) -> None:
    geometry = wide.geometry.model_copy(update={"checkpoint_dtype": "float16"})
    half = replace(wide, geometry=geometry)
    for value, shown in ((2e-8, "0"), (7e4, "inf")):
        with pytest.raises(VerificationError, match=rf"to float16, in which .* is {shown}"):
            quantizers(half, find_emulated("vllm")[1], (value,), dialect="quark")
        quantizers(half, find_emulated("vllm")[1], (value,), dialect="compressed-tensors")


def test_sglang_misreads_modelopts_scales_of_latents(latent: Subject) -> None:
    numerics = find_emulated("sglang")[1]
    with pytest.raises(VerificationError, match="stores latents without these scales"):
        quantizers(latent, numerics, dialect="modelopt")
    ones = quantizers(latent, numerics, (1.0,), dialect="modelopt")
    assert {float(quantizer.scale) for quantizer in ones.values()} == {1.0}  # type: ignore[arg-type]


def test_the_largest_of_a_layers_heads_serves_them_all_in_vllm_cpu(wide: Subject) -> None:
    found = quantizers(wide, find_emulated("vllm-cpu")[1], ((0.01, 0.07),), per_head=True)
    assert torch.equal(found[Role.K].fake(X).values, by_reciprocal(X, 0.07, down=True))
    own = quantizers(wide, find_emulated("vllm")[1], ((0.01, 0.07),), per_head=True)[Role.K]
    expected = cast(X, torch.tensor([0.01, 0.07]).reshape(1, 2, 1, 1))
    assert torch.equal(own.fake(X).values, expected)


@pytest.mark.parametrize(
    ("engine", "dialect", "expected"),
    [
        ("vllm", "compressed-tensors", 1.0),
        ("vllm", "modelopt", 1.0),
        ("sglang", "kv-scales", 1.0),
        ("reference", "", THIRD),
    ],
)
def test_scales_of_latent_attention_reach(
    engine: str, dialect: str, expected: float, latent: Subject
) -> None:
    found = quantizers(latent, find_emulated(engine)[1], dialect=dialect)
    assert set(found) == {Role.K, Role.V}
    for quantizer in found.values():
        assert float(quantizer.scale) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
def test_an_e5m2_cache_has_no_scales_in(engine: str, wide: Subject) -> None:
    with pytest.raises(VerificationError, match=f"{engine} uses no scales with an e5m2 KV cache"):
        quantizers(wide, find_emulated(engine)[1], fmt=E5M2)
    ones = quantizers(wide, find_emulated(engine)[1], (1.0,), fmt=E5M2)
    x = X.clone().clamp(-400, 400)
    expected = cast(x, 1.0, torch.float8_e5m2)
    if engine == "vllm-cpu":
        expected = search_down(x, 1.0, torch.float8_e5m2)
    assert torch.equal(ones[Role.K].fake(x).values, expected)


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
    engine: str, values: tuple[float], fmt: Any, saturates: bool, wide: Subject
) -> None:
    found = quantizers(wide, find_emulated(engine)[1], values, fmt=fmt)
    assert found[Role.K].saturates is found[Role.V].saturates is saturates


# --- inputs ------------------------------------------------------------------------------------

Q_INPUT = Site("model.layers.0.self_attn.q_proj", Role.INPUT)
INPUTS = torch.randn(7, 160, generator=torch.Generator().manual_seed(2)) * 3


def test_the_values_of_these_tests_tell_a_reciprocal_from_a_division() -> None:
    assert not torch.equal(cast(X, THIRD), by_reciprocal(X, THIRD))


def scheme_of(subject: Subject, name: str, numerics: Numerics, stats: Any = None) -> Candidate:
    """Ask the product what a scheme does in an engine."""
    return emulate_scheme(subject, SCHEMES[name], numerics, stats=stats)


def test_tokens_are_multiplied_by_the_reciprocal_of_a_bounded_scale_in_vllm(
    wide: Subject,
) -> None:
    amax = 448 * torch.tensor(THIRD)
    ties = near_ties(float(amax * torch.tensor(1 / 448))).T
    x = torch.cat([ties, amax.expand(5, 1)], 1)
    x[3] *= 1e-6
    found = scheme_of(wide, "fp8-dynamic", find_emulated("vllm")[1]).quantizers[Q_INPUT]
    scales = (x.abs().amax(1, keepdim=True) * torch.tensor(1 / 448)).clamp(min=1 / (448 * 512))
    assert not torch.equal(scales[:3], row_scales(x)[:3])
    assert float(scales[3]) == pytest.approx(1 / (448 * 512))
    expected = (x * (1.0 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(found.fake(x).values, expected)
    assert not torch.equal(expected, cast(x, scales))


def test_groups_have_scales_that_are_powers_of_two_in_vllm(wide: Subject) -> None:
    """128 channels, and the 32 that are left."""
    found = scheme_of(wide, "fp8-block", EVERY_SIZE).quantizers[Q_INPUT]
    pieces = []
    for piece in INPUTS.split(128, 1):
        scales = [2.0 ** ceil_log2(float(row.abs().max()) / 448) for row in piece]
        pieces.append(cast(piece, torch.tensor(scales).unsqueeze(1)))
    assert torch.equal(found.fake(INPUTS).values, torch.cat(pieces, 1))
    plain = scheme_of(wide, "fp8-block", find_emulated("sglang")[1]).quantizers[Q_INPUT]
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
        engine: scheme_of(wide, "fp8-static", find_emulated(engine)[1], stats).quantizers[Q_INPUT]
        for engine in ("reference", "vllm")
    }
    scale = float(stats.sites[Q_INPUT].amax.max()) / 448
    x = near_ties(scale)
    assert torch.equal(static["vllm"].fake(x).values, by_reciprocal(x, scale))
    assert torch.equal(static["reference"].fake(x).values, cast(x, torch.tensor(scale)))
    assert not torch.equal(by_reciprocal(x, scale), cast(x, torch.tensor(scale)))


# --- weights -----------------------------------------------------------------------------------


def weight_held(subject: Subject, emulation: Candidate, name: str) -> torch.Tensor:
    """Copy a weight while the emulation holds."""
    with emulated(
        subject.model,
        subject.geometry,
        Candidate(weights=emulation.weights),
        EmulationHooks({}),
        originals=subject.originals,
    ):
        return subject.model.get_parameter(name).detach().clone()


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
    expected = torch.cat(strips, 0)
    found = weight_held(wide, scheme_of(wide, "fp8-block", EVERY_SIZE), name)
    assert torch.equal(found, expected)
    assert not torch.equal(found, first)
    reference = weight_held(wide, scheme_of(wide, "fp8-block", find_emulated("reference")[1]), name)
    assert torch.equal(reference, first)


@pytest.mark.parametrize(("dtype", "is_served_in_bf16"), [("bfloat16", True), ("float16", False)])
def test_powers_of_two_are_for_the_linears_that_deep_gemm_runs(
    tmp_path: Path, dtype: str, is_served_in_bf16: bool
) -> None:
    """64 rows, of q, k and v or of gate and up together, and 128 columns.

    q, k and v have 160 + 80 + 80 rows, gate and up 96 each; o_proj has 160 columns and down 96.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 40, "dtype": dtype}
    numerics = find_emulated("vllm")[1]
    with opened(zoo.build("llama", **sizes), tmp_path / "m") as built:
        geometry = built.geometry.model_copy(update={"checkpoint_dtype": dtype})
        subject = replace(built, geometry=geometry)
        found = scheme_of(subject, "fp8-block", numerics)
        weights = {
            name: weight_held(subject, found, f"model.layers.0.{name}.weight")
            for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
        }
        plain = {
            name: cast_blocks(subject.model.get_parameter(f"model.layers.0.{name}.weight").detach())
            for name in weights
        }
    inputs = {
        site.module.removeprefix("model.layers.0.").rpartition(".")[2]
        for site, each in found.quantizers.items()
        if each.power_of_two and ".0." in site.module
    }
    expected = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert inputs == (expected if is_served_in_bf16 else set())
    again = {
        name.rpartition(".")[2] for name in plain if not torch.equal(weights[name], plain[name])
    }
    assert again == ({"k_proj", "up_proj"} if is_served_in_bf16 else set())


def test_experts_down_projections_do_not_go_through_fp16(tmp_path: Path) -> None:
    model = zoo.build("mixtral")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            values = torch.logspace(-9, 8.8, weight[0].numel(), base=2.0).reshape(weight[0].shape)
            weight.copy_(values.expand_as(weight))
            weight[:, -1, -1] = 448.0
            weight.mul_(2.0**-20)
    numerics = replace(PLAIN, weights_through_float16=True)
    held, once = {}, {}
    with opened(model, tmp_path / "m") as subject:
        stats = run_calibration(tmp_path / "m", make_plan(draw([20, 20])))[1]
        emulation = scheme_of(subject, "fp8-static", numerics, stats)
        for name in ("gate_up_proj", "down_proj"):
            path = f"model.layers.0.mlp.experts.{name}"
            once[name] = cast(subject.model.get_parameter(path).detach(), 2.0**-20)
            held[name] = weight_held(subject, emulation, path)
    assert torch.equal(held["down_proj"], once["down_proj"])
    assert torch.equal(held["gate_up_proj"], cast(once["gate_up_proj"].half().float(), 2.0**-20))
    assert not torch.equal(held["gate_up_proj"], once["gate_up_proj"])
