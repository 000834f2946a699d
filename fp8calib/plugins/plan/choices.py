"""What can be decided: schemes of linears that engines load as one, and FP8 for K and V of a layer.

A plan is the choice of each unit by name: `{linears: scheme}` for linears, `{site: rule}` for each
K and V that is stored in FP8. What it does not name stays in 16 bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES
from fp8calib.commands.check_planned import replay_settings
from fp8calib.engines.check import replay_overlay
from fp8calib.engines.gpus import explain_unmultiplied, explain_unserved
from fp8calib.engines.replay.folder import open_folder
from fp8calib.errors import ExportError, VerificationError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import KV_ROLES, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.rules import AMAX, ScaleRules, parse_rule
from fp8calib.numerics.schemes import MX_BLOCK, SCHEMES
from fp8calib.plugins.plan.inputs import OpenedPlan
from fp8calib.quantization.ignored import span_layers
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.select import find_selection
from fp8calib.quantization.settings import join_linears, make_settings
from fp8calib.verification.candidates import build_kv_candidate, build_scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.weights import Requantized, WeightChange

IN_16_BITS = "16 bits"
"""The name of the choice that quantizes nothing."""
FP8_CACHE = "fp8"
_PARTIAL = f"its inputs are no multiple of {MX_BLOCK[1]}"

Plan = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Linears that engines load as one, or K and V of a layer."""

    name: str
    layers: tuple[int, ...]
    """The indices of the decoder layers that it is in."""
    linears: tuple[str, ...] = ()
    """As the checkpoint names them; empty for a cache."""
    sites: tuple[Site, ...] = ()
    """K and V, if the unit is a KV cache."""
    plain_bytes: int
    sizes: Mapping[str, int]
    """Bytes with scales, by scheme, or of the FP8 cache of the tokens that are counted."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why other schemes are no choices."""
    shares_scale: bool = False
    """Whether K and V are the parts of latents, under one scale."""

    def plan(self, choice: str) -> Plan:
        """Give the plan that quantizes it alone, K and V by amax."""
        if choice not in self.sizes:
            return {}
        return dict.fromkeys(map(str, self.sites), str(AMAX)) or {self.name: choice}


class Choices:
    """The units of a model with their schemes, and the emulation of any plan for them."""

    def __init__(self, opened: OpenedPlan, stats: RunStats) -> None:
        self._opened, self._stats = opened, stats
        linears = find_selection(opened.model.checkpoint).require()
        matrices = {each.module: each for each in linears.quantized}
        self._members: dict[str, tuple[Matrix, ...]] = {
            name: tuple(matrices[module] for module in modules)
            for name, modules in join_linears(matrices).items()
        }
        self._sizes: dict[str, dict[str, int]] = {}
        """By scheme and linear: the bytes with scales."""
        self._refused: dict[str, dict[str, str]] = {}
        """By scheme and unit: why it is no choice."""
        for name in opened.schemes:
            self._judge(name)
        self.refused_cache = self._explain_refused_cache()
        """Why the KV cache stays in 16 bits; empty if it need not."""
        self._parts: dict[str, dict[str, Candidate]] = {}
        """By scheme and unit: what is emulated."""
        self._find_table: Callable[[str], ScaleTable] = cache(
            lambda rule: compute_kv_scales(stats, E4M3FN, rules=ScaleRules(rule=parse_rule(rule)))
        )
        self.units: tuple[Unit, ...] = ()
        self.fixed_bytes = 0
        """Of no unit, with the scales of the KV cache: one FP8 cache brings all, two in fp32."""
        self.unquantized_bytes = 0

    def describe_refused(self) -> Iterator[str]:
        """Describe the schemes that some linears cannot have, with a reason."""
        for name, found in self._refused.items():
            if found:
                which, why = f"{len(found)} of {len(self._members)}", next(iter(found.values()))
                yield f"{name} is no choice for {which} groups: {why}"
        if self.refused_cache:
            yield f"the KV cache stays in 16 bits: {self.refused_cache}"

    def open(self, prepared: PreparedModel) -> Choices:
        """Find the units of a model, which may be without weights."""
        self._parts = {name: self._split(name, prepared) for name in self._sizes}
        self.units = (*self._list_linears(), *self._list_caches())
        stored = sum(each.size_bytes for each in self._opened.model.checkpoint.tensors.values())
        caches = [unit for unit in self.units if unit.sites]
        linears = [unit for unit in self.units if unit.linears]
        self.fixed_bytes = stored - count_bytes(linears, {}) + 8 * len(caches)
        self.unquantized_bytes = stored + count_bytes(caches, {})
        if not any(unit.sizes for unit in self.units):
            raise VerificationError(
                f"nothing can be quantized: {'; '.join(self.describe_refused())}",
                hint="use another --engine or --scheme",
            )
        return self

    # --- linears --------------------------------------------------------------------------------

    def _judge(self, name: str) -> None:
        """Find the units that can have a scheme: all, or by kind where an engine refuses that."""
        opened, scheme = self._opened, SCHEMES[name]
        refused = self._refused[name] = {
            unit: _PARTIAL
            for unit, matrices in self._members.items()
            if scheme.is_mx and any(each.shape[1] % MX_BLOCK[1] for each in matrices)
        }
        for engine in opened.engines:
            if opened.gpu and (why := explain_unmultiplied(engine, scheme, opened.gpu)):
                refused |= dict.fromkeys(self._members, why)
                return
        if not self._explain_fault(name):
            return
        kinds: dict[str, list[str]] = defaultdict(list)
        for unit in self._members:
            if unit not in refused:
                kinds[span_layers(unit)].append(unit)
        alone = {kind: self._explain_fault(name, only=units) for kind, units in kinds.items()}
        refused |= {unit: why for kind, why in alone.items() if why for unit in kinds[kind]}
        if why := self._explain_fault(name):
            refused |= dict.fromkeys(self._members, why)

    def _explain_fault(self, name: str, only: Sequence[str] | None = None) -> str:
        """Say why an engine does not load a scheme where it is not refused yet; empty if all do.

        `only` names units: all others stay in 16 bits.
        """
        self._sizes.pop(name, None)
        left = [unit for unit in self._members if only is not None and unit not in only]
        ignored = dict.fromkeys(self._list_ignored(name))
        ignored |= {each.module: None for unit in left for each in self._members[unit]}
        if len(ignored) == sum(map(len, self._members.values())):
            return ""
        asked = make_settings(name, ignore=tuple(ignored))
        folder, engines = self._opened.model.source.folder, self._opened.engines
        try:
            plan, reports, unchecked = replay_settings(
                folder, asked, self._stats.without_kv(), engines
            )
        except ExportError as error:
            return error.message
        if unchecked:
            return unchecked
        faults = {
            f"{engine} {'cannot' if report.load_fault else 'may not'} load it": fault
            for engine, report in reports.items()
            if (fault := report.fault)
        }
        why = next((f"{who}: {fault}" for who, fault in sorted(faults.items())), "")
        if not why and only is None:
            self._sizes[name] = defaultdict(int)
            for tensor in (each for shard in plan.shards for each in shard.tensors):
                self._sizes[name][tensor.name.rpartition(".")[0]] += tensor.size_bytes
        return why

    def _list_ignored(self, name: str) -> list[str]:
        """List the linears that cannot have a scheme."""
        return [each.module for unit in self._refused[name] for each in self._members[unit]]

    def _split(self, name: str, prepared: PreparedModel) -> dict[str, Candidate]:
        """Split the emulation of a scheme by unit; what no hook sees is left out."""
        target = replace(self._opened.target, prepared=prepared)
        whole = build_scheme(name, name, target, self._stats, ignore=self._list_ignored(name))
        unit_of = {each.source: unit for unit, found in self._members.items() for each in found}
        modules: dict[str, set[str]] = defaultdict(set)
        for change in whole.weights:
            own = {site.module for each in change.parameters for site in each.sites}
            for tensor in prepared.weights.tensor_names([each.name for each in change.parameters]):
                modules[unit_of[tensor]] |= own
        return {
            unit: keep_modules(whole, frozenset(paths)) for unit, paths in modules.items() if paths
        }

    def _list_linears(self) -> Iterator[Unit]:
        parts, layer_of = self._parts, self._opened.target.prepared.geometry.index_modules()
        for unit, matrices in self._members.items() if self._opened.schemes else ():
            refused = {
                name: found.get(unit, "its inputs cannot be emulated")
                for name, found in self._refused.items()
                if unit not in parts.get(name, {})
            }
            found = {name: each[unit] for name, each in parts.items() if unit in each}
            changes = (change for part in found.values() for change in part.weights)
            sites = (s.module for change in changes for p in change.parameters for s in p.sites)
            yield Unit(
                name=unit,
                layers=tuple(sorted({layer_of[module] for module in sites})),
                linears=tuple(each.module for each in matrices),
                plain_bytes=sum(prod(m.shape) * ITEM_SIZE_BYTES[m.dtype] for m in matrices),
                sizes={n: sum(self._sizes[n][each.module] for each in matrices) for n in found},
                refused=refused,
            )

    # --- caches ---------------------------------------------------------------------------------

    def _explain_refused_cache(self) -> str:
        opened, geometry = self._opened, self._opened.target.prepared.geometry
        if not opened.request.kv_tokens:
            return "--kv-tokens 0"
        sizes = {attention.k_head_dim for _, attention in geometry.attentions()}
        for engine in opened.engines:
            if opened.gpu and (why := explain_unserved(engine, FP8_CACHE, opened.gpu, sizes)):
                return why
            report = replay_overlay(engine, geometry, 1, open_folder(opened.model.source.folder))
            if why := report.fault:
                return f"{engine.key} does not use KV scales of this model: {why}"
        return ""

    def _list_caches(self) -> Iterator[Unit]:
        """List the caches that layers write, each with the layers that read it."""
        opened, geometry = self._opened, self._opened.target.prepared.geometry
        for index, attention in geometry.owners().items() if not self.refused_cache else ():
            elements = attention.kv_elements_per_token * opened.request.kv_tokens
            yield Unit(
                name=f"{attention.checkpoint_module}.kv",
                layers=geometry.with_readers([index]),
                sites=tuple(attention.site(role) for role in KV_ROLES),
                plain_bytes=2 * elements,
                sizes={FP8_CACHE: elements},
                shares_scale=attention.kind == "latent",
            )

    # --- plans ----------------------------------------------------------------------------------

    def emulate(self, plan: Plan, name: str = "") -> Candidate:
        """Make the candidate of a plan.

        q and probabilities of a layer are quantized where both its K and V are.
        """
        chosen = ((self._parts.get(choice, {}), unit) for unit, choice in plan.items())
        linears = [found[unit] for found, unit in chosen if unit in found]
        found = [*linears, self._emulate_cache(plan)]
        return Candidate(
            name=name,
            quantizers={site: each for part in found for site, each in part.quantizers.items()},
            weights=tuple(change for part in found for change in part.weights),
            reads=dict(part for each in found for part in each.reads.items()),
        )

    def _emulate_cache(self, plan: Plan) -> Candidate:
        geometry = self._opened.target.prepared.geometry
        own = (site for unit in self.units for site in unit.sites)
        rules = {site: plan[str(site)] for site in own if str(site) in plan}
        if not rules:
            return Candidate()
        table = self._find_table(str(AMAX))
        scales = dict(table.scales)
        for _, attention in geometry.attentions():
            for role in KV_ROLES:
                if rule := rules.get(geometry.producer_of(attention).site(role)):
                    site = attention.site(role)
                    scales[site] = self._find_table(rule).scales[site]
        mixed = replace(table, scales=scales)
        whole = build_kv_candidate("", mixed, self._opened.target.numerics, origin="")
        both = [unit for unit in self.units if unit.sites and rules.keys() >= set(unit.sites)]
        layers = {layer for unit in both for layer in unit.layers}
        modules = {a.module for layer, a in geometry.attentions() if layer.index in layers}
        kept = keep_modules(whole, frozenset(modules))
        single = {site: each for site, each in whole.quantizers.items() if site in rules}
        return replace(kept, quantizers={**kept.quantizers, **single})


def choice_of(unit: Unit, plan: Plan) -> str:
    """Give the choice that a plan has for a unit."""
    if unit.sites:
        return FP8_CACHE if all(str(site) in plan for site in unit.sites) else IN_16_BITS
    return plan.get(unit.name, IN_16_BITS)


def count_bytes(units: Sequence[Unit], plan: Plan) -> int:
    """Count the bytes of units."""
    return sum(unit.sizes.get(choice_of(unit, plan), unit.plain_bytes) for unit in units)


def join_plans(plans: Iterable[Plan]) -> Plan:
    """Join the plans of different units."""
    return dict(pair for plan in plans for pair in plan.items())


def list_uniform(units: Sequence[Unit]) -> dict[str, Plan]:
    """List the plans with one scheme for all linears that can have it, without and with caches.

    A scheme that linears cannot have leaves them in 16 bits. K and V have amax.
    """
    cached = join_plans(unit.plan(FP8_CACHE) for unit in units if unit.sites)
    found: dict[str, Plan] = {f"cache {FP8_CACHE}": cached} if cached else {}
    for name in dict.fromkeys(n for unit in units if unit.linears for n in unit.sizes):
        found[name] = join_plans(unit.plan(name) for unit in units if unit.linears)
        if cached:
            found[f"{name}, cache {FP8_CACHE}"] = {**found[name], **cached}
    return found


def keep_modules(candidate: Candidate, modules: frozenset[str]) -> Candidate:
    """Keep what belongs to `modules`, the paths of attention modules and linears.

    Of weights without a site, those that are copied stay: norms with factors folded in.
    """

    def belongs(change: WeightChange) -> bool:
        sites = {site.module for parameter in change.parameters for site in parameter.sites}
        return sites <= modules if sites else not isinstance(change, Requantized)

    return replace(
        candidate,
        quantizers={s: q for s, q in candidate.quantizers.items() if s.module in modules},
        reads={module: each for module, each in candidate.reads.items() if module in modules},
        weights=tuple(filter(belongs, candidate.weights)),
    )
