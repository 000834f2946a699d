"""Scales of ranks that share a latent or a cache, refused degrees, quarters and histograms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8calib.errors import UsageError
from tests import zoo
from tests.doors import Role, Site, check_degree, kv_scales, make_plan, run_calibration
from tests.truth import brute_force
from tests.zoo import draw


def calibrated(family: str, folder: Path) -> tuple[Any, Any, brute_force.Capture]:
    model = zoo.save(family, folder)
    sequences = draw([20, 20, 20])
    _, stats = run_calibration(folder, make_plan(sequences))
    return model, stats, brute_force.run(model, sequences)


def scale(values: np.ndarray) -> np.float32:
    return np.float32(np.abs(values).max().astype(np.float32) / np.float32(448.0))


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_one_latent_scale_covers_both_parts_on_every_rank(factor: float, tmp_path: Path) -> None:
    model = zoo.build("deepseek_v3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[16:] *= factor  # the rotary part
    model.save_pretrained(tmp_path / "model")
    sequences = draw([20, 20, 20])
    _, stats = run_calibration(tmp_path / "model", make_plan(sequences))
    truth = brute_force.run(model, sequences)
    table = kv_scales(stats, tp=4)
    for layer in (0, 1):
        latent, rotary = (np.abs(np.stack(x)).max() for x in zip(*truth.kv[layer], strict=True))
        assert (rotary > latent) == (factor > 1)
        for role in (Role.K, Role.V):
            site = Site(f"model.layers.{layer}.self_attn", role)
            assert table[site] == [scale(np.array([latent, rotary]))] * 4


def test_layers_that_share_a_cache_carry_the_scale_of_the_layer_that_writes_it(
    tmp_path: Path,
) -> None:
    _, stats, truth = calibrated("gemma3n_text", tmp_path / "model")
    table = kv_scales(stats)
    for sharing, producer in ((2, 0), (3, 1)):
        heads = brute_force.head_amax([pair[0] for pair in truth.kv[producer]], 2)
        site = Site(f"model.layers.{sharing}.self_attn", Role.K)
        assert table[site] == [scale(heads)]


@pytest.mark.parametrize(("tp", "what"), [(3, "attention heads"), (8, "attention heads")])
def test_a_degree_that_does_not_divide_the_heads_is_refused(
    tp: int, what: str, tmp_path: Path
) -> None:
    _, stats, _ = calibrated("llama", tmp_path / "model")
    with pytest.raises(UsageError, match=what):
        kv_scales(stats, tp=tp)


def test_a_degree_that_does_not_divide_the_intermediate_size_is_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model", intermediate_size=50)
    _, stats = run_calibration(tmp_path / "model", make_plan(draw([20])))
    check_degree(stats.geometry, 2)
    with pytest.raises(UsageError, match="50 channels"):
        check_degree(stats.geometry, 4)


def test_the_maximum_of_each_sequence_is_kept(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    sequences = draw([20] * 7)
    prepared, stats = run_calibration(tmp_path / "model", make_plan(sequences))
    truth = brute_force.run(prepared.model, sequences)
    found = stats.sites[Site("model.layers.1.self_attn", Role.V)].sequences
    assert found is not None
    expected = [np.abs(pair[1]).max() for pair in truth.kv[1]]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_histograms_count_every_element_of_the_sampled_sequences(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    sequences = draw([20] * 9)
    prepared, stats = run_calibration(tmp_path / "model", make_plan(sequences))
    truth = brute_force.run(prepared.model, sequences)
    found = stats.sites[Site("model.layers.0.self_attn", Role.K)].histogram
    keys = torch.from_numpy(np.concatenate([truth.kv[0][i][0] for i in (0, 8)]))
    bits = keys.view(torch.int32) >> 16 << 16  # truncated to bfloat16
    magnitudes = np.abs(bits.view(torch.float32).numpy().astype(np.float64)).ravel()
    bins = np.floor(np.log2(magnitudes[magnitudes > 0]) * 8).astype(int) + 40 * 8 + 1
    expected = np.bincount(bins, minlength=len(found))
    expected[0] += int((magnitudes == 0).sum())
    np.testing.assert_array_equal(found.numpy(), expected)
