"""Scales of ranks that share a latent or a cache, refused degrees, quarters and histograms."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from fp8calib.errors import UsageError
from tests import zoo
from tests.architectures import families
from tests.doors import (
    Role,
    Site,
    check_degree,
    find_text_decoder,
    kv_scales,
    make_plan,
    run_calibration,
)
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


PRODUCTS = {"linear", "matmul", "bmm", "mm", "addmm", "einsum", "grouped_mm", "_grouped_mm"}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "gemma3n_text": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "mixtral": {},
    **{
        name: families.FAMILIES[name]
        for name in ("dbrx", "gemma4_text", "jamba", "kimi_linear", "llama4_text", "nemotron_h")
    },
    "hy_v4": {**families.ROUTED, **families.LATENT},
    "inkling_text": {
        **families.ROUTED,
        "head_dim": 8,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 8,
        "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
    },
}


class FindProducts(TorchFunctionMode):
    """Collects the parameters that products multiply by, also through views, casts and slices."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._names = {id(value): {name} for name, value in model.named_parameters()}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and follow the parameters among its arguments."""
        output = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        names = set().union(*(self._names.get(id(tensor), set()) for tensor in tensors))
        if getattr(func, "__name__", "").strip("_") in PRODUCTS | {"rmatmul"}:
            self.found |= names
        elif names and len({id(tensor) for tensor in tensors}) == 1:
            for made in pytree.tree_leaves(output):
                if isinstance(made, torch.Tensor):
                    self._alive.append(made)
                    self._names[id(made)] = names
        return output


def list_covered(stats: Any) -> Iterator[str]:
    """List the patterns of the parameters that the statistics observe or name."""
    for _, linear in stats.geometry.linears():
        site = f"{linear.module}.{Role.INPUT}"
        if any(str(observed) == site for observed in stats.sites):
            yield linear.weight_name
    for item in stats.header.skipped:
        yield item.site.removesuffix(".input")
        yield f"{item.site.removesuffix('.input').removesuffix('.weight')}.*"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=zoo.NEEDS_5_23 if family == "hy_v4" else ())
        for family in sorted(FAMILIES)
    ],
)
def test_every_matrix_is_observed_or_named(family: str, tmp_path: Path) -> None:
    if FAMILIES[family]:
        model = families.save(family, FAMILIES[family], tmp_path / "model")
    else:
        model = zoo.save(family, tmp_path / "model")
    rows = draw([20, 13])
    path, _ = find_text_decoder(model)
    with torch.no_grad(), FindProducts(model) as products:
        for row in rows:
            model(row[None])
    multiplied = {
        name
        for name in products.found
        if name.startswith(f"{path}.")
        and sum(size > 1 for size in model.get_parameter(name).shape) > 1
        and not name.endswith(("bias", "embed_tokens.weight"))  # the latter may be the lm_head too
    }
    assert len(multiplied) > 5
    _, stats = run_calibration(tmp_path / "model", make_plan(rows, packed=False))
    covered = set(list_covered(stats))
    layers = stats.geometry.layers[0].module.rpartition(".")[0]
    covered -= {f"{layers}.{layer.index}.*" for layer in stats.geometry.layers}
    missed = {name for name in multiplied if not any(fnmatchcase(name, each) for each in covered)}
    assert not missed
