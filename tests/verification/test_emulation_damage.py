"""SQNR, clipped and flushed shares of every site against numpy on tensors kept by hand."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp8calib.data.sequences import Batch
from fp8calib.engines.registry import find_emulated
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation import emulate as emulate_module
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Damage, Quantizer, sum_damage
from fp8calib.verification.report import SCALE_ONE, LayerResult
from fp8calib.verification.verify import list_layers, measure_fit
from tests import zoo
from tests.verification.by_hand import (
    BATCHES,
    PADDED,
    PLAIN,
    HandCache,
    Recipe,
    Subject,
    cast,
    cast_rows,
    emulate,
    emulate_scheme,
    make_table,
    opened,
    plain_forward,
    quantize_by_hand,
)


def real_tokens(x: torch.Tensor, batch: Batch) -> np.ndarray:
    """Drop what stands on padding: of [B, H, S, D] or [B, S, C]."""
    rows = x.transpose(1, 2) if x.ndim == 4 else x
    kept = [row[:length].flatten() for row, length in zip(rows, batch.lengths, strict=True)]
    return torch.cat(kept).double().numpy()


def by_numpy(before: np.ndarray, after: np.ndarray, scale: Any) -> dict[str, float]:
    """Compute what a report says of one site."""
    return {
        "sqnr_db": 10 * math.log10((before**2).sum() / ((after - before) ** 2).sum()),
        "clipped": float((np.abs(before) / scale > 448 * (1 + 1e-6)).mean()),
        "flushed": float(((after == 0) & (before != 0)).mean()),
        "amax": float(np.abs(before).max()),
    }


SCALES = {
    Site(f"model.layers.{layer}.self_attn", role): scale
    for layer, role, scale in [
        (0, Role.K, 2e-5), (0, Role.V, 3e-3), (1, Role.K, 5e-4), (1, Role.V, 30.0)
    ]
}  # fmt: skip


def keep_kv(subject: Subject, scales: Mapping[Site, float] | None) -> dict[Site, np.ndarray]:
    """Keep the real tokens of K and V, quantized with `scales` or not at all."""

    def change(index: int, role: Role) -> Any:
        if scales is None:
            return torch.clone
        scale = torch.tensor(scales[Site(f"model.layers.{index}.self_attn", role)])
        return lambda x: cast(x, scale)

    changes = {index: (change(index, Role.K), change(index, Role.V)) for index in (0, 1)}
    kept: dict[Site, list[np.ndarray]] = {}
    for batch in BATCHES:
        cache = HandCache(subject.model.config, changes)
        plain_forward(subject.model, batch, cache)
        for index, pair in cache.seen.items():
            for role, x in zip((Role.K, Role.V), pair, strict=True):
                site = Site(f"model.layers.{index}.self_attn", role)
                kept.setdefault(site, []).append(real_tokens(x, batch))
    return {site: np.concatenate(parts) for site, parts in kept.items()}


def test_k_and_v_are_measured_where_tokens_stand(llama: Subject) -> None:
    """K clips and V flushes; the padding of three sequences counts nowhere."""
    quantizers = emulate_kv(make_table(llama, SCALES), PLAIN)
    made = Candidate(name="it", quantizers=quantizers)
    hooks = EmulationHooks(made)
    emulate(llama, made, *BATCHES, hooks=hooks)
    rows = list_layers(hooks, {}, llama.geometry.index_modules())
    looking = MeasurementHooks([made])
    emulate(llama, Candidate(), *BATCHES, hooks=looking)

    assert {row.site for row in rows} == set(map(str, SCALES))
    assert [row.sqnr_db for row in rows] == sorted(row.sqnr_db or 0 for row in rows)
    quantized, plain = keep_kv(llama, SCALES), keep_kv(llama, None)
    for row in rows:
        site = next(site for site in SCALES if str(site) == row.site)
        scale = np.float32(SCALES[site])
        assert row.scale == pytest.approx(SCALES[site], rel=1e-7)
        for before in (quantized[site], plain[site]):
            after = cast(torch.from_numpy(before).float(), torch.tensor(scale)).double().numpy()
            if before is quantized[site]:
                assert_row(row, by_numpy(before, after, scale))
        found = Damage(*sum_damage(list(looking.found["it", site][0])).tolist())
        assert found.signal == pytest.approx((before**2).sum(), rel=1e-5)
        assert found.noise == pytest.approx(((after - before) ** 2).sum(), rel=1e-5)
        assert found.num_elements == len(before)
    assert max(row.clipped for row in rows) > 0.5
    assert max(row.flushed for row in rows) > 0.001


def assert_row(row: LayerResult, expected: dict[str, float]) -> None:
    """Compare a row of the report with numpy's."""
    assert row.sqnr_db == pytest.approx(expected["sqnr_db"], abs=1e-3)
    assert row.clipped == pytest.approx(expected["clipped"], abs=1e-12)
    assert row.flushed == pytest.approx(expected["flushed"], abs=1e-12)
    assert row.amax == pytest.approx(expected["amax"], rel=1e-6)


def keep_inputs(subject: Subject, batches: Iterable[Batch]) -> dict[str, torch.Tensor]:
    """Quantize by hand, and keep the rows [N, C] that every linear and expert sees."""
    kept: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(name, []).append(x.flatten(0, -2))
        return cast_rows(x)

    recipe = Recipe(lambda w, _: cast_rows(w), lambda name: lambda x: keep(name, x))
    by_hand = quantize_by_hand(subject.model, recipe)
    for batch in batches:
        plain_forward(by_hand, batch)
    return {name: torch.cat(rows) for name, rows in kept.items()}


@pytest.mark.parametrize(
    ("family", "stride", "rel"),
    [
        ("llama", 1, 1e-5),
        ("llama", 8, 1e-5),
        *((family, 1, 0.05) for family in ("mixtral", "qwen3_moe", "gpt_oss")),
    ],
)
def test_inputs_are_measured_where_tokens_stand(
    family: str, stride: int, rel: float, tmp_path: Path
) -> None:
    """Each sequence alone by hand: of a padded batch, rows of padding must not count."""
    model = zoo.build(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 1e3  # the token that pads
    with opened(model, tmp_path / "m") as subject:
        emulation = emulate_scheme(subject, SCHEMES["fp8-dynamic"], PLAIN)
        hooks = EmulationHooks(emulation)
        assert emulate_module.FLUSH_STRIDE == 8
        with patch.object(emulate_module, "FLUSH_STRIDE", stride):
            emulate(subject, emulation, PADDED, hooks=hooks)
        alone = [
            Batch(first=0, input_ids=row[None, :length], lengths=(length,))
            for row, length in zip(PADDED.input_ids, PADDED.lengths, strict=True)
        ]
        kept = keep_inputs(subject, alone)
    assert len(kept) >= 12
    for name, before in kept.items():
        found = Damage(*hooks.damage[Site(name, Role.INPUT)].tolist())
        noise = (cast_rows(before) - before).double().square().sum()
        assert found.num_elements == before.numel(), name
        assert found.signal == pytest.approx(float(before.double().square().sum()), rel=rel)
        assert found.noise == pytest.approx(float(noise), rel=rel)
        assert found.clipped == 0
        assert found.amax == pytest.approx(float(before.abs().max()), rel=rel)


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_each_head_is_compared_with_the_scale_that_fits_its_tensor(
    family: str, tmp_path: Path
) -> None:
    """By numpy, from q, k and v of a forward pass: noise by head at 1.0 and with powers of two."""
    model = zoo.build(family)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight *= 2.0**-12
        model.model.layers[1].self_attn.q_proj.weight *= 2.0**12
    with opened(model, tmp_path / "m") as subject:
        unscaled = emulate_kv(
            make_unscaled_table(subject.geometry, E4M3FN), find_emulated("vllm")[1]
        )
        keep = {s: replace(each, is_scaled=True) for s, each in unscaled.items()}
        looking = MeasurementHooks([Candidate(name=SCALE_ONE, quantizers=keep)])
        emulate(subject, Candidate(), *BATCHES, hooks=looking)
        tensors = keep_tensors(subject)
    assert looking.found.keys() == {(SCALE_ONE, site) for site in tensors}
    fits = {site: measure_fit(sums) for (_, site), sums in looking.found.items()}
    for site, fit in fits.items():
        parts = tensors[site]
        losses, noises = [], np.zeros(2)
        for head in range(len(parts[0])):
            noise = np.zeros(2)
            for part in parts:
                exponent = np.ceil(np.log2(np.float64(np.abs(part).max()) / 448))
                for index, scale in enumerate((1.0, 2.0**exponent)):
                    x = torch.from_numpy(part[head])
                    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
                    noise[index] += float(((codes - x.double()) ** 2).sum())
            noises += noise
            losses.append(max(10 * np.log10(noise[0] / noise[1]), 0.0))
        assert fit["loss_db"] == pytest.approx(max(losses), abs=1e-3)
        assert looking.found[SCALE_ONE, site][:, :, 1].sum(1).tolist() == pytest.approx(
            noises.tolist(), rel=1e-4
        )
    losing = {str(site) for site, fit in fits.items() if fit["loss_db"] >= 1}
    assert "model.layers.1.self_attn.k" in losing
    assert not any(".layers.0." in site for site in losing)


def keep_tensors(subject: Subject) -> dict[Site, list[np.ndarray]]:
    """Keep the real tokens of q, k and v by head, [H, N, D], of every batch."""
    kept: dict[Site, list[np.ndarray]] = {}
    asked = subject.model.config._attn_implementation
    plain = ALL_ATTENTION_FUNCTIONS[asked]

    def look(module: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        path = f"model.layers.{module.layer_idx}.self_attn"
        for role, x in ((Role.Q, q), (Role.K, k), (Role.V, v)):
            flat = x.detach().transpose(0, 1).flatten(1, 2)
            mask = current[0].mask
            chosen = flat if mask is None else flat[:, mask.flatten().nonzero().squeeze(1)]
            kept.setdefault(Site(path, role), []).append(chosen.float().numpy())
        return plain(module, q, k, v, *rest, **more)

    current: list[Any] = [None]
    ALL_ATTENTION_FUNCTIONS[asked] = look
    try:
        for batch in BATCHES:
            current[0] = batch
            plain_forward(subject.model, batch)
    finally:
        ALL_ATTENTION_FUNCTIONS[asked] = plain
    return kept


@pytest.mark.parametrize("shape", [(), (2, 1, 1)])
@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-5, 900.0])
def test_a_fitted_scale_differs_by_the_power_of_two_with_which_nothing_clips(
    scale: float, shape: tuple[int, ...]
) -> None:
    """The next smaller power clips; whatever the scale is, the two round normal values alike."""
    heads = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(1))
    heads[1] *= 1e-3
    mine = Quantizer(fmt=E4M3FN, scale=torch.full(shape, scale))
    fitted = mine.fitted_to(heads)
    assert isinstance(fitted.scale, torch.Tensor)
    assert fitted.scale.shape == shape
    octaves = (fitted.scale / scale).log2()
    assert torch.equal(octaves, octaves.round())
    of_each = heads.abs().amax((1, 2), keepdim=True) if shape else heads.abs().max()
    largest = of_each / fitted.scale
    assert bool((largest <= 448).all())
    assert bool((largest * 2 > 448).all())
