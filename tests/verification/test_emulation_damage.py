"""The damage of inputs, and the scales that fit heads, by numpy on tensors kept by hand."""

from collections.abc import Iterable
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
from fp8calib.verification.emulation.fake_quantize import Damage, Quantizer
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.verify import measure_fit
from tests import zoo
from tests.verification.by_hand import (
    BATCHES,
    PADDED,
    PLAIN,
    Recipe,
    Subject,
    cast_rows,
    emulate,
    emulate_scheme,
    opened,
    plain_forward,
    quantize_by_hand,
)


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
