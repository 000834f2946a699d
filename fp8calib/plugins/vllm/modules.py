"""Match vLLM's modules with the sites of a model, and join what its ranks have observed.

The names are the engine's answer: its loader says which of the checkpoint's tensors fill a
parameter, and so which linears and attention a module runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from fp8calib.calibration.calibration_stats import COUNTS, NAMES, SiteStats, join
from fp8calib.calibration.stats_header import Observe
from fp8calib.errors import CalibrationError
from fp8calib.model.geometry import KV_ROLES, Attention, Frozen, Linear, ModelGeometry, Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.tensor_parallel import rank_range


class Rank(Frozen):
    """A worker of vLLM, as it describes itself."""

    version: str
    tp: tuple[int, int]
    """Its tensor-parallel rank, and their number."""
    pp: tuple[int, int]
    """Its pipeline rank, and their number."""
    modules: Mapping[str, Mapping[str, Any]]
    """What can be observed here, by vLLM's names."""
    loads: Mapping[str, Sequence[str]]
    """The tensors of the checkpoint by the parameter that they fill."""
    problem: str
    """Why the loader did not say where all tensors go; empty if it did."""

    def describe(self) -> str:
        """Name it for messages."""
        return f"rank {self.tp[0]} of {self.tp[1]}, stage {self.pp[0]} of {self.pp[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Which module of vLLM shows which sites."""

    linears: Mapping[Site, tuple[str, Linear]]
    attentions: Mapping[str, Attention]
    """By vLLM's name."""
    unseen: Mapping[Site, str]
    """Sites that no module shows, with the reason."""

    def list_modules(self) -> list[str]:
        """List the modules to observe."""
        return sorted({*(name for name, _ in self.linears.values()), *self.attentions})


def match_sites(ranks: Sequence[Rank], prepared: PreparedModel, observe: Observe) -> Matched:
    """Match the ranks' modules with the sites that a recipe observes."""
    geometry = prepared.geometry
    known = {name: each for rank in ranks for name, each in rank.modules.items()}
    module_of = dict(_list_modules_of_tensors(ranks, known))
    # a quantized weight has other names than the weight that it means
    module_of = {_find_owner(name): each for name, each in module_of.items()} | module_of
    linears: dict[Site, tuple[str, Linear]] = {}
    unseen: dict[Site, str] = {}
    layers = defaultdict[str, set[int]](set)
    """The layers whose weights are in a module of vLLM or below it."""
    for layer, linear in geometry.linears():
        tensors = prepared.weights.tensor_names({linear.weight_name})
        found = (module_of.get(name, module_of.get(_find_owner(name))) for name in tensors)
        modules = {each for each in found if each is not None}
        for module in modules:
            for above in _list_ancestors(module):
                layers[above].add(layer.index)
        if not observe.inputs or linear.runner in prepared.ignored:
            continue
        site = Site(linear.module, Role.INPUT)
        if why := _explain_unseen(linear, modules, known):
            unseen[site] = why
        else:
            linears[site] = next(iter(modules)), linear
    attentions: dict[str, Attention] = {}
    if observe.kv or observe.query:
        attentions = dict(_match_attentions(geometry, known, layers))
        problem = next((rank.problem for rank in ranks if rank.problem), "")
        _check_complete(geometry, attentions.values(), problem)
        attentions |= _list_drafters(geometry, known, ranks[0].tp[1])
    shown = {name: each for name, each in attentions.items() if each.module not in prepared.ignored}
    return Matched(linears=linears, attentions=shown, unseen=unseen)


def _list_modules_of_tensors(
    ranks: Sequence[Rank], known: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for rank in ranks:
        for parameter, tensors in rank.loads.items():
            module = next((name for name in _list_ancestors(parameter) if name in known), None)
            if module is not None:
                yield from ((tensor, module) for tensor in tensors)


def _find_owner(name: str) -> str:
    return name.rpartition(".")[0]


def _list_ancestors(name: str) -> Iterator[str]:
    """List a name and those of all modules above it, from the inside out."""
    while name:
        yield name
        name = _find_owner(name)


def _explain_unseen(
    linear: Linear, modules: set[str], known: Mapping[str, Mapping[str, Any]]
) -> str:
    """Explain why no module of vLLM shows the input of a linear; empty if one does."""
    if len(modules) != 1:
        return "vLLM has no linear of its own for it"
    found = known[next(iter(modules))]
    if found["kind"] == "experts":
        is_gate = linear.num_experts > 0 and linear.shard != "row"
        return "" if is_gate else "vLLM computes it inside its fused kernel for experts"
    if found["kind"] != "linear" or found["inputs"] != linear.in_features:
        return f"vLLM runs it as part of {next(iter(modules))}"
    return ""


def _match_attentions(
    geometry: ModelGeometry,
    known: Mapping[str, Mapping[str, Any]],
    layers: Mapping[str, set[int]],
) -> Iterator[tuple[str, Attention]]:
    by_index = {layer.index: layer for layer in geometry.layers}
    for name, module in known.items():
        if module["kind"] not in ("heads", "latent") or "site" in module:
            continue
        around = next((layers[above] for above in _list_ancestors(name) if above in layers), set())
        found = [by_index[index] for index in around]
        if len(found) == 1 and found[0].attention is not None:
            yield name, found[0].attention


def _list_drafters(
    geometry: ModelGeometry, known: Mapping[str, Mapping[str, Any]], tp: int
) -> Iterator[tuple[str, Attention]]:
    """List the attention of a drafter, which the model's geometry lacks."""
    own = {attention.module for _, attention in geometry.attentions()}
    for name, module in known.items():
        if "site" not in module:
            continue
        site = f"drafter.{module['site']}" if module["site"] in own else module["site"]
        yield (
            name,
            Attention(
                module=site,
                checkpoint_module=module["site"],
                kind=module["kind"],
                num_heads=module["num_heads"] * tp,
                num_kv_heads=module["num_kv_heads_whole"],
                k_head_dim=module["head_size"],
                v_head_dim=module["head_size"],
            ),
        )


def _check_complete(geometry: ModelGeometry, found: Iterable[Attention], problem: str) -> None:
    counts = Counter(attention.module for attention in found)
    for layer, attention in geometry.attentions():
        if counts[attention.module] != 1:
            number = counts[attention.module] or "no"
            why = f"; its loader stopped with {problem}" if problem else ""
            raise CalibrationError(
                f"layer {layer.index} ({attention.module}) has {number} module of attention in "
                f"vLLM{why}",
                hint="leave out --engine to calibrate it with transformers",
            )


# --- joining the ranks ----------------------------------------------------------------------------


def join_observed(
    matched: Matched, observe: Observe, ranks: Sequence[Rank], found: Sequence[Mapping[Site, Any]]
) -> dict[Site, SiteStats]:
    """Join what the ranks have observed into the statistics of the model's sites.

    `found` are the statistics of each rank, by vLLM's modules.
    """
    sites: dict[Site, SiteStats] = {}
    for site, (name, linear) in matched.linears.items():
        parts = [
            (range(0) if linear.num_experts else _own_channels(rank, name), stats[key])
            for rank, stats in zip(ranks, found, strict=True)
            if (key := Site(name, Role.INPUT)) in stats
        ]
        if parts:
            sites[site] = _join(parts, linear.in_features)
    for name, attention in matched.attentions.items():
        roles = (*(KV_ROLES if observe.kv else ()), *((Role.Q,) if observe.query else ()))
        for role in roles:
            is_query = role is Role.Q
            if attention.producer is not None and not is_query:
                continue
            count = attention.num_heads if is_query else attention.num_kv_heads
            parts = [
                (_own_heads(rank, name, role, count), stats[key])
                for rank, stats in zip(ranks, found, strict=True)
                if (key := Site(name, role)) in stats
            ]
            if not parts:
                continue
            joined = _join(parts, count)
            divisor = attention.query_divisor if is_query else 1.0
            sites[attention.site(role)] = joined if divisor == 1 else _multiply(joined, divisor)
    return sites


def _own_channels(rank: Rank, name: str) -> range:
    """Give the input channels of a linear that a rank has."""
    module = rank.modules[name]
    here, whole = module["inputs_here"], module["inputs"]
    first = rank.tp[0] * here if here < whole else 0
    return range(first, first + here)


def _own_heads(rank: Rank, name: str, role: Role, count: int) -> range:
    own = rank_range(count, rank.tp[1], rank.tp[0])
    here = rank.modules[name]["num_heads" if role is Role.Q else "num_kv_heads"]
    if here != len(own):
        raise CalibrationError(
            f"{name}: {rank.describe()} has {here} heads of {role}, and {len(own)} of {count} were "
            "expected"
        )
    return own


def _join(parts: Sequence[tuple[range, SiteStats]], count: int) -> SiteStats:
    """Join the parts of a tensor that ranks have observed; ranks with the same part are equal."""
    distinct = dict(parts)
    if len({stats.count for stats in distinct.values()}) != 1:
        raise CalibrationError("ranks have observed different numbers of tokens")
    owned = list(distinct.items())
    tensors: dict[str, torch.Tensor] = {}
    for name in NAMES:
        held = [(place, stats.tensors[name]) for place, stats in owned if name in stats.tensors]
        if not held:
            continue
        if name == "amax" and len(held) > 1:
            tensors[name] = torch.zeros(count)
            for place, own in held:
                tensors[name][place.start : place.stop] = own
        else:
            tensors[name] = reduce(partial(join, name), (own for _, own in held))
    return SiteStats(count=owned[0][1].count, **tensors)


def _multiply(stats: SiteStats, factor: float) -> SiteStats:
    tensors = {
        name: found if name in COUNTS else found * factor for name, found in stats.tensors.items()
    }
    return SiteStats(count=stats.count, **tensors)
