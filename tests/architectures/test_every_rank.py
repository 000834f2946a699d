"""Per-rank scales of every architecture, from weights on disk cut by hand as engines cut them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from tests import zoo
from tests.doors import Role, Site, kv_scales, linear_scales, make_plan, run_calibration
from tests.truth import brute_force
from tests.zoo import draw

HEADS = 4


@dataclass(frozen=True)
class Family:
    """How a family names and cuts its projections, layer by layer, and how many KV heads it has."""

    cuts: list[dict[str, str]]
    layers: str = "model.layers"
    kv_heads: int = 2
    disk: str = "model.layers.{layer}.mlp.experts.{expert}.{name}.weight"


def read_families() -> Iterator[tuple[str, Family]]:
    """Read `ranks.yaml`; `same` is of both layers."""
    text = Path(__file__).with_name("ranks.yaml").read_text()
    for name, known in yaml.safe_load(text)["families"].items():
        cuts = [known["same"]] * 2 if "same" in known else known["cuts"]
        yield name, Family(**{k: x for k, x in known.items() if k != "same"} | {"cuts": cuts})


FAMILIES = dict(read_families())
W123 = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass
class Case:
    """A calibrated family, what is on its disk, and what its plain forward showed."""

    name: str
    family: Family
    folder: Path
    modules: dict[str, Any]
    stats: Any
    truth: brute_force.Capture

    def read(self, key: str) -> np.ndarray:
        """Read one tensor from disk."""
        with safe_open(self.folder / "model.safetensors", framework="np") as file:
            return file.get_tensor(key)

    def weight(self, path: str) -> np.ndarray:
        """Give [out, in]."""
        stored = self.read(f"{path}.weight")
        return stored.T if self.name == "gpt2" else stored

    def expert_weight(self, layer: int, expert: int, name: str) -> np.ndarray:
        """Give [out, in] of one projection of one expert."""
        if self.name == "gpt_oss":
            fused = name != "down_proj"
            key = f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if fused else name}"
            stored = self.read(key)[expert].T
            return stored[(0 if name == "gate_proj" else 1) :: 2] if fused else stored
        stored_as = W123[name] if self.name == "mixtral" else name
        return self.read(self.family.disk.format(layer=layer, expert=expert, name=stored_as))


@pytest.fixture(scope="module", params=zoo.KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("ranks") / request.param
    zoo.save(request.param, folder)
    sequences = draw([20, 20, 20], seed=11)
    prepared, stats = run_calibration(folder, make_plan(sequences))
    return Case(
        request.param,
        FAMILIES[request.param],
        folder,
        dict(prepared.model.named_modules()),
        stats,
        brute_force.run(prepared.model, sequences),
    )


def part(values: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """Give a rank its contiguous part of the leading axis."""
    size = len(values) // tp
    return values[rank * size : (rank + 1) * size]


def kv_part(heads: list[np.ndarray], tp: int, rank: int) -> np.ndarray:
    """Give a rank its KV heads; copies of a head when there are fewer heads than ranks."""
    if len(heads) < tp:
        return heads[rank * len(heads) // tp]
    size = len(heads) // tp
    return np.concatenate(heads[rank * size : (rank + 1) * size])


def take_apart(cut: str, weight: np.ndarray, kv_heads: int) -> dict[str, list[np.ndarray]]:
    """Give per name the rows of each head, of a weight that holds q, k and v."""
    size = len(weight) // (HEADS + 2 * kv_heads)
    blocks = [weight[i : i + size] for i in range(0, len(weight), size)]
    if cut == "stacked q k v":
        q, k, v = blocks[:HEADS], blocks[HEADS : HEADS + kv_heads], blocks[HEADS + kv_heads :]
    elif cut == "q k v per head":
        q, k, v = blocks[0::3], blocks[1::3], blocks[2::3]
    else:
        q, k, v = blocks[0:2] + blocks[4:6], blocks[2::4], blocks[3::4]
    return {"q_proj": q, "k_proj": k, "v_proj": v}


def own_weights(case: Case, tp: int, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """Give every projection's path and the part of its weight that a rank holds."""
    for layer, cuts in enumerate(case.family.cuts):
        for name, cut in cuts.items():
            path = f"{case.family.layers}.{layer}.{name}"
            if cut == "experts":
                for expert, suffix in product(range(4), ("gate_proj", "up_proj", "down_proj")):
                    weight = case.expert_weight(layer, expert, suffix)
                    weight = weight.T if suffix == "down_proj" else weight
                    yield f"{path}.{expert}.{suffix}", part(weight, tp, rank)
            else:
                yield from own_parts(case, path, cut, tp, rank)


def own_parts(
    case: Case, path: str, cut: str, tp: int, rank: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Give the same for one projection that is no expert's; a fused one yields its parts."""
    weight, parent = case.weight(path), path.rpartition(".")[0]
    if cut == "kv":
        yield path, kv_part(np.split(weight, case.family.kv_heads), tp, rank)
    elif cut in {"q", "column"}:
        yield path, part(weight, tp, rank)
    elif cut == "row":
        yield path, part(weight.T, tp, rank)
    elif cut == "whole":
        yield path, weight
    elif cut == "gate, up":
        for suffix, half in zip(("gate_proj", "up_proj"), np.split(weight, 2), strict=True):
            yield f"{parent}.{suffix}", part(half, tp, rank)
    else:
        for suffix, heads in take_apart(cut, weight, case.family.kv_heads).items():
            yield f"{parent}.{suffix}", kv_part(heads, tp, rank)


def own_inputs(case: Case, tp: int, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """Give every projection's path and the input that a rank sees; none for idle experts."""
    for layer, cuts in enumerate(case.family.cuts):
        for name, cut in cuts.items():
            path = f"{case.family.layers}.{layer}.{name}"
            if cut == "experts":
                seen = brute_force.run_experts(case.modules[path], case.truth.routed[path])
                for expert, rows in seen.first.items():
                    yield f"{path}.{expert}.gate_proj", rows
                    yield f"{path}.{expert}.up_proj", rows
                    yield f"{path}.{expert}.down_proj", part(seen.down[expert].T, tp, rank)
                continue
            x = np.concatenate(case.truth.inputs[path])
            parent = path.rpartition(".")[0]
            names = {"gate, up": ("gate_proj", "up_proj")}.get(cut, ("q_proj", "k_proj", "v_proj"))
            is_fused = " " in cut
            for each in [f"{parent}.{suffix}" for suffix in names] if is_fused else [path]:
                yield each, part(x.T, tp, rank) if cut == "row" else x


def scale(values: np.ndarray) -> np.float32:
    return np.float32(np.abs(values).max() / np.float32(448.0))


def per_rank(table: dict[Site, list[float]], path: str, role: Role) -> list[float]:
    return table[Site(path, role)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_weight_scales_are_those_of_the_slices_on_disk(case: Case, tp: int) -> None:
    """Exactly: the largest magnitude of what the rank holds, divided by 448 in fp32."""
    table = linear_scales(case.stats, tp=tp)
    for rank in range(tp):
        expected = dict(own_weights(case, tp, rank))
        assert {site.module for site in table} == set(expected)
        for path, values in expected.items():
            assert per_rank(table, path, Role.WEIGHT)[rank] == scale(values), path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_input_scales_are_those_of_the_channels_of_the_rank(case: Case, tp: int) -> None:
    """Row-parallel projections see some channels, all others see all."""
    table = linear_scales(case.stats, tp=tp)
    for rank in range(tp):
        for path, values in own_inputs(case, tp, rank):
            found = per_rank(table, path, Role.INPUT)[rank]
            assert found == pytest.approx(scale(values), rel=1e-5), path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kv_scales_are_those_of_the_heads_of_the_rank(case: Case, tp: int) -> None:
    """Latents are whole on every rank and share one scale; other layers are cut by KV heads."""
    table = kv_scales(case.stats, tp=tp)
    for layer, tensors in case.truth.kv.items():
        heads = [
            brute_force.head_amax([pair[place] for pair in tensors], case.family.kv_heads)
            for place in (0, 1)
        ]
        if case.name == "deepseek_v3":
            heads = [np.maximum(*heads)] * 2
        names = [a.module for index, a in attentions(case) if index == layer]
        for role, amax in zip((Role.K, Role.V), heads, strict=True):
            expected = [scale(kv_part(np.split(amax, len(amax)), tp, r)) for r in range(tp)]
            assert per_rank(table, names[0], role) == pytest.approx(expected, rel=1e-6)


def attentions(case: Case) -> Iterator[tuple[int, Any]]:
    return ((layer.index, found) for layer, found in case.stats.geometry.attentions())


def test_weights_keep_both_axes_of_all_experts_together(case: Case) -> None:
    """An expert projection's amax and amax_in are maxima over its experts."""
    for layer, cuts in enumerate(case.family.cuts):
        if "mlp.experts" not in cuts:
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights = np.abs([case.expert_weight(layer, expert, name) for expert in range(4)])
            site = Site(f"{case.family.layers}.{layer}.mlp.experts.{name}", Role.WEIGHT)
            found = case.stats.sites[site]
            np.testing.assert_array_equal(found.amax.numpy(), weights.max((0, 2)))
            assert found.amax_in is not None
            np.testing.assert_array_equal(found.amax_in.numpy(), weights.max((0, 1)))
