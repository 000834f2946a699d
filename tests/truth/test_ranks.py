"""Per-rank scales against real slices of weights, cut as a tensor-parallel engine cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8calib.errors import UsageError
from fp8calib.fp8.formats import E4M3FN
from fp8calib.geometry.sites import Role, Site
from fp8calib.geometry.tensor_parallel import check_linears
from fp8calib.scales.compute import compute_kv_scales, compute_linear_scales
from fp8calib.stats.calibration_stats import CalibrationStats
from tests import zoo
from tests.truth import brute_force
from tests.truth.test_statistics import draw, make_plan, run_calibration

HEADS, HEAD_DIM = 4, 8


def calibrated(family: str, folder: Path) -> tuple[Any, CalibrationStats, brute_force.Capture]:
    model = zoo.save(family, folder)
    sequences = draw([20, 20, 20])
    _, stats = run_calibration(folder, make_plan(sequences))
    return model, stats, brute_force.run(model, sequences)


def heads_of(weight: np.ndarray, heads: list[int]) -> np.ndarray:
    return np.concatenate([weight[h * HEAD_DIM : (h + 1) * HEAD_DIM] for h in heads])


def scale(values: np.ndarray) -> np.float32:
    return np.float32(np.abs(values).max().astype(np.float32) / np.float32(448.0))


def kv_heads_of_rank(num_kv_heads: int, tp: int, rank: int) -> list[int]:
    if num_kv_heads < tp:
        return [rank * num_kv_heads // tp]
    per_rank = num_kv_heads // tp
    return list(range(rank * per_rank, (rank + 1) * per_rank))


def split_qkv(family: str, weight: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Take a fused q/k/v apart by hand: per name, the rows of each head."""
    blocks = [weight[i : i + HEAD_DIM] for i in range(0, len(weight), HEAD_DIM)]
    if family == "gpt_neox":  # q k v of head 0, q k v of head 1, ...
        return {"q_proj": blocks[0::3], "k_proj": blocks[1::3], "v_proj": blocks[2::3]}
    if family == "falcon":  # two groups of: two q heads, k, v
        queries = blocks[0:2] + blocks[4:6]
        return {
            "q_proj": queries,
            "k_proj": [blocks[2], blocks[6]],
            "v_proj": [blocks[3], blocks[7]],
        }
    num_kv = (len(blocks) - HEADS) // 2  # all q, all k, all v
    return {
        "q_proj": blocks[:HEADS],
        "k_proj": blocks[HEADS : HEADS + num_kv],
        "v_proj": blocks[HEADS + num_kv :],
    }


FUSED = {
    "phi3": ("model.layers.1.self_attn", "qkv_proj"),
    "gpt2": ("transformer.h.1.attn", "c_attn"),
    "gpt_neox": ("gpt_neox.layers.1.attention", "query_key_value"),
    "falcon": ("transformer.h.1.self_attention", "query_key_value"),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", sorted(FUSED))
def test_fused_q_k_v_are_cut_by_heads(family: str, tp: int, tmp_path: Path) -> None:
    model, stats, _ = calibrated(family, tmp_path / "model")
    table = compute_linear_scales(stats, E4M3FN, tp=tp)
    path, name = FUSED[family]
    weight = dict(model.named_parameters())[f"{path}.{name}.weight"].detach().numpy()
    heads = split_qkv(family, weight.T if family == "gpt2" else weight)
    for part, blocks in heads.items():
        found = table.scales[Site(f"{path}.{part}", Role.WEIGHT)].values.tolist()
        for rank in range(tp):
            owned = kv_heads_of_rank(len(blocks), tp, rank)
            assert found[rank] == scale(np.concatenate([blocks[head] for head in owned]))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_llama_is_cut_as_an_engine_cuts_it(tp: int, tmp_path: Path) -> None:
    model, stats, truth = calibrated("llama", tmp_path / "model")
    table = compute_linear_scales(stats, E4M3FN, tp=tp)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    layer = "model.layers.0"
    for rank in range(tp):
        column = slice(rank * 48 // tp, (rank + 1) * 48 // tp)
        row = slice(rank * 32 // tp, (rank + 1) * 32 // tp)
        kv = kv_heads_of_rank(2, tp, rank)
        expected = {
            "self_attn.q_proj": weights[f"{layer}.self_attn.q_proj.weight"][row],
            "self_attn.k_proj": heads_of(weights[f"{layer}.self_attn.k_proj.weight"], kv),
            "self_attn.v_proj": heads_of(weights[f"{layer}.self_attn.v_proj.weight"], kv),
            "self_attn.o_proj": weights[f"{layer}.self_attn.o_proj.weight"][:, row],
            "mlp.gate_proj": weights[f"{layer}.mlp.gate_proj.weight"][column],
            "mlp.up_proj": weights[f"{layer}.mlp.up_proj.weight"][column],
            "mlp.down_proj": weights[f"{layer}.mlp.down_proj.weight"][:, column],
        }
        for name, weight in expected.items():
            found = table.scales[Site(f"{layer}.{name}", Role.WEIGHT)].values.tolist()[rank]
            assert found == scale(weight), name
        channels = {"self_attn.o_proj": row, "mlp.down_proj": column}
        for name in expected:
            x = np.concatenate(truth.inputs[f"{layer}.{name}"])[:, channels.get(name, slice(None))]
            found = table.scales[Site(f"{layer}.{name}", Role.INPUT)].values.tolist()[rank]
            assert found == pytest.approx(scale(x), rel=1e-6), name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kv_scales_cover_the_heads_of_their_rank(tp: int, tmp_path: Path) -> None:
    _, stats, truth = calibrated("llama", tmp_path / "model")
    table = compute_kv_scales(stats, E4M3FN, tp=tp)
    for layer in (0, 1):
        for role, place in ((Role.K, 0), (Role.V, 1)):
            heads = brute_force.head_amax([pair[place] for pair in truth.kv[layer]], 2)
            site = Site(f"model.layers.{layer}.self_attn", role)
            for rank in range(tp):
                expected = scale(heads[kv_heads_of_rank(2, tp, rank)])
                assert table.scales[site].values.tolist()[rank] == expected


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_cut_one_by_one(family: str, tmp_path: Path) -> None:
    model, stats, truth = calibrated(family, tmp_path / "model")
    table = compute_linear_scales(stats, E4M3FN, tp=2)
    path = "model.layers.0.mlp.experts"
    experts = dict(model.named_modules())[path]
    inputs = brute_force.run_experts(experts, truth.routed[path])
    for expert, rank in [(e, r) for e in inputs.down for r in (0, 1)]:
        own = slice(rank * 24, (rank + 1) * 24)
        down = experts.down_proj[expert].detach().numpy()
        down = down.T if family == "gpt_oss" else down
        both = experts.gate_up_proj[expert].detach().numpy()
        gate = both.T[0::2] if family == "gpt_oss" else both[:48]
        expected = {
            ("down_proj", Role.WEIGHT): down[:, own],
            ("gate_proj", Role.WEIGHT): gate[own],
            ("down_proj", Role.INPUT): inputs.down[expert][:, own],
            ("gate_proj", Role.INPUT): inputs.first[expert],
        }
        for (name, role), values in expected.items():
            found = table.scales[Site(f"{path}.{expert}.{name}", role)].values.tolist()[rank]
            assert found == pytest.approx(scale(values), rel=1e-5), (expert, name, role)


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
    table = compute_kv_scales(stats, E4M3FN, tp=4)
    for layer in (0, 1):
        latent, rotary = (np.abs(np.stack(x)).max() for x in zip(*truth.kv[layer], strict=True))
        assert (rotary > latent) == (factor > 1)
        for role in (Role.K, Role.V):
            site = Site(f"model.layers.{layer}.self_attn", role)
            assert table.scales[site].values.tolist() == [scale(np.array([latent, rotary]))] * 4


def test_layers_that_share_a_cache_carry_the_scale_of_the_layer_that_writes_it(
    tmp_path: Path,
) -> None:
    _, stats, truth = calibrated("gemma3n_text", tmp_path / "model")
    table = compute_kv_scales(stats, E4M3FN)
    for sharing, producer in ((2, 0), (3, 1)):
        heads = brute_force.head_amax([pair[0] for pair in truth.kv[producer]], 2)
        site = Site(f"model.layers.{sharing}.self_attn", Role.K)
        assert table.scales[site].values.tolist() == [scale(heads)]


@pytest.mark.parametrize(("tp", "what"), [(3, "attention heads"), (8, "attention heads")])
def test_a_degree_that_does_not_divide_the_heads_is_refused(
    tp: int, what: str, tmp_path: Path
) -> None:
    _, stats, _ = calibrated("llama", tmp_path / "model")
    with pytest.raises(UsageError, match=what):
        compute_kv_scales(stats, E4M3FN, tp=tp)


def test_a_degree_that_does_not_divide_the_intermediate_size_is_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model", intermediate_size=50)
    _, stats = run_calibration(tmp_path / "model", make_plan(draw([20])))
    check_linears(stats.geometry, 2)
    with pytest.raises(UsageError, match="50 channels"):
        check_linears(stats.geometry, 4)


def test_progress_holds_the_maximum_of_each_quarter(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    sequences = draw([20] * 7)
    prepared, stats = run_calibration(tmp_path / "model", make_plan(sequences))
    truth = brute_force.run(prepared.model, sequences)
    quarters = [0, 0, 1, 1, 2, 2, 3]
    found = stats.sites[Site("model.layers.1.self_attn", Role.V)].progress
    for quarter in range(4):
        values = [
            np.abs(pair[1]).max()
            for place, pair in zip(quarters, truth.kv[1], strict=True)
            if place == quarter
        ]
        assert float(found[quarter]) == pytest.approx(max(values), rel=1e-6)


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
