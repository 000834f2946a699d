"""The groups of a model with their choices: what engines join, load and run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8calib.checkpoint.header import ITEM_SIZE_BYTES
from fp8calib.engines.check import replay_overlay
from fp8calib.engines.replay.folder import open_folder
from fp8calib.errors import ExportError, VerificationError
from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.jobs.quantization.planned import replay_settings, resolve_recipe
from fp8calib.jobs.quantization.servable import find_fault, find_load_fault
from fp8calib.jobs.stats import drop_kv
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import MX_BLOCK, SCHEMES, find_scheme
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.recipe import Quantize
from fp8calib.scales.compute import compute_kv_scales
from fp8calib.selection.ignored import span_layers
from fp8calib.selection.layer_schemes import join_linears
from fp8calib.selection.matrices import Matrix
from fp8calib.selection.select import select
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.candidates import build_kv_candidate, build_scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.planning.choices import IN_16_BITS, Choice, Group
from fp8calib.verification.report import FP8_CACHE

_UNSEEN = "its inputs cannot be emulated"
_PARTIAL = f"its inputs are no multiple of {MX_BLOCK[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The linears of a group."""

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def linears(self) -> tuple[str, ...]:
        """As the checkpoint names them."""
        return tuple(matrix.module for matrix in self.matrices)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether MXFP8 has no blocks for it."""
        return any(matrix.shape[1] % MX_BLOCK[1] for matrix in self.matrices)


class GroupMaker:
    """Makes the groups of a model, once its shape, its engines and its statistics are known."""

    def __init__(self, opened: OpenedPlan, stats: CalibrationStats) -> None:
        self._opened = opened
        self._stats = stats
        matrices = {each.module: each for each in select(opened.target.checkpoint).quantized}
        self._members = [
            Members(name=name, matrices=tuple(matrices[module] for module in modules))
            for name, modules in join_linears(matrices).items()
        ]
        self._plans: dict[str, QuantizePlan] = {}
        self._refused: dict[str, dict[str, str]] = {}
        """By scheme and group: why it is no choice."""
        for name in list_asked(opened):
            self._judge(name)
        self.refused_cache = self._explain_refused_cache()
        """Why the KV cache stays in 16 bits; empty where it need not."""

    def list_ignored(self) -> dict[str, list[str]]:
        """List the linears that stay in 16 bits in each scheme that can be chosen."""
        return {name: self._list_ignored(name) for name in self._plans}

    def describe_refused(self) -> Iterator[str]:
        """Describe the schemes that are no choice for some groups, with a reason."""
        for name, found in self._refused.items():
            if found:
                which = "all" if len(found) == len(self._members) else f"{len(found)}"
                why = next(iter(found.values()))
                yield f"{name} is no choice for {which} of {len(self._members)} groups: {why}"
        if self.refused_cache:
            yield f"the KV cache stays in 16 bits: {self.refused_cache}"

    def make(self, model: LoadedModel) -> list[Group]:
        """Make the groups of `model`, which may be without weights: linears, then caches."""
        emulations = {name: self._emulate(name, model) for name in self._plans}
        parts = {name: self._split(each, model) for name, each in emulations.items()}
        return [*self._make_linears(parts), *self._make_caches()]

    # --- linears --------------------------------------------------------------------------------

    def _judge(self, name: str) -> None:
        """Find the groups that can have a scheme: all, or by kind where an engine refuses that."""
        opened = self._opened
        refused = self._refused[name] = {
            each.name: _PARTIAL
            for each in self._members
            if SCHEMES[name].is_mx and each.has_partial_blocks
        }
        unrun = (
            engine.explain_unmultiplied(SCHEMES[name], opened.gpu) if opened.gpu else ""
            for engine in opened.engines
        )
        if why := next(filter(None, unrun), ""):
            refused |= {each.name: why for each in self._members}
            return
        if not self._explain_fault(name):
            return
        kinds: dict[str, list[str]] = defaultdict(list)
        for each in self._members:
            if each.name not in refused:
                kinds[span_layers(each.name)].append(each.name)
        alone = {kind: self._explain_fault(name, only=names) for kind, names in kinds.items()}
        refused |= {group: why for kind, why in alone.items() if why for group in kinds[kind]}
        if why := self._explain_fault(name):
            refused |= {each.name: why for each in self._members}

    def _explain_fault(self, name: str, only: Sequence[str] | None = None) -> str:
        """Say why an engine does not load a scheme where it is not refused yet; empty if all do.

        `only` names groups: all others stay in 16 bits.
        """
        opened = self._opened
        self._plans.pop(name, None)
        left = [each for each in self._members if only is not None and each.name not in only]
        ignored = [*self._list_ignored(name), *(path for each in left for path in each.linears)]
        if len(set(ignored)) == sum(len(each.linears) for each in self._members):
            return ""
        asked = resolve_recipe(Quantize(scheme=name, ignore=tuple(dict.fromkeys(ignored))))
        try:
            plan, reports, unchecked = replay_settings(
                opened.folder, asked, drop_kv(self._stats), opened.engines
            )
        except ExportError as error:
            return error.message
        if unchecked:
            return unchecked
        faults = {
            f"{engine} {'cannot' if find_load_fault(report) else 'may not'} load it": fault
            for engine, report in reports.items()
            if (fault := find_fault(report))
        }
        why = next((f"{who}: {fault}" for who, fault in sorted(faults.items())), "")
        if not why and only is None:
            self._plans[name] = plan
        return why

    def _list_ignored(self, name: str) -> list[str]:
        """List the linears that cannot have a scheme."""
        refused = self._refused[name]
        return [path for each in self._members if each.name in refused for path in each.linears]

    def _emulate(self, name: str, model: LoadedModel) -> Candidate:
        target, numerics = self._opened.target, self._opened.numerics
        return build_scheme(
            name,
            find_scheme(name),
            target,
            model,
            numerics,
            fmt=E4M3FN,
            stats=self._stats,
            ignore=self._list_ignored(name),
        )

    def _split(self, emulation: Candidate, model: LoadedModel) -> dict[str, Candidate]:
        """Split an emulation by group; what no hook sees is left out."""
        source = WeightSource(model, self._opened.target.checkpoint)
        group_of = {m.source: each.name for each in self._members for m in each.matrices}
        modules: dict[str, set[str]] = defaultdict(set)
        for change in emulation.weights:
            tensors = source.tensor_names([each.name for each in change.parameters])
            for name in {group_of[tensor] for tensor in tensors}:
                modules[name] |= {s.module for p in change.parameters for s in p.sites}
        return {name: emulation.only(frozenset(paths)) for name, paths in modules.items() if paths}

    def _make_linears(self, parts: Mapping[str, Mapping[str, Candidate]]) -> Iterator[Group]:
        layer_of = self._opened.target.geometry.index_modules()
        sizes = {name: _list_sizes(self._plans[name]) for name in parts}
        for each in self._members:
            choices = [Choice(name=IN_16_BITS, size_bytes=_count_plain(each))]
            refused = {
                n: found[each.name] for n, found in self._refused.items() if each.name in found
            }
            layers: set[int] = set()
            for name, found in parts.items():
                emulation = found.get(each.name)
                if emulation is None:
                    refused.setdefault(name, _UNSEEN)
                    continue
                sites = {s for w in emulation.weights for p in w.parameters for s in p.sites}
                layers |= {layer_of[site.module] for site in sites}
                size = sum(sizes[name][linear] for linear in each.linears)
                choices.append(Choice(name=name, size_bytes=size, emulation=emulation))
            yield Group(
                name=each.name,
                layers=tuple(sorted(layers)),
                linears=each.linears,
                choices=tuple(choices),
                refused=refused,
            )

    # --- caches ---------------------------------------------------------------------------------

    def _explain_refused_cache(self) -> str:
        opened = self._opened
        geometry = opened.target.geometry
        if not geometry.kv_elements_per_token:
            return "the model has no KV cache"
        if not opened.request.kv_tokens:
            return "--kv-tokens 0"
        sizes = {attention.k_head_dim for _, attention in geometry.attentions()}
        for engine in opened.engines:
            if opened.gpu and (why := engine.explain_unserved(FP8_CACHE, opened.gpu, sizes)):
                return why
            report = replay_overlay(engine, geometry, 1, open_folder(opened.folder))
            if why := find_fault(report):
                return f"{engine.key} does not use KV scales of this model: {why}"
        return ""

    def _make_caches(self) -> Iterator[Group]:
        """Make a group of each cache, or of all where an engine cannot leave one in 16 bits."""
        if self.refused_cache:
            return
        opened = self._opened
        geometry = opened.target.geometry
        whole = self._emulate_cache()
        can_skip = all(engine.can_skip_caches for engine in opened.engines)
        attentions = {layer.index: attention for layer, attention in geometry.attentions()}
        changed = {site.module for site in whole.quantizers}
        stored = [i for i, each in attentions.items() if each.module in changed]
        own = [index for index in stored if attentions[index].producer is None]
        for part in [[each] for each in own] if can_skip else [own]:
            layers = geometry.with_readers(part)
            found = [attentions[index] for index in layers]
            size = sum(each.kv_elements_per_token for each in found) * opened.request.kv_tokens
            modules = frozenset(each.module for each in found)
            yield Group(
                name=f"{found[0].checkpoint_module}.kv" if can_skip else "all KV caches",
                layers=layers,
                choices=(
                    Choice(name=IN_16_BITS, size_bytes=2 * size),
                    Choice(name=FP8_CACHE, size_bytes=size, emulation=whole.only(modules)),
                ),
            )

    def _emulate_cache(self) -> Candidate:
        """Emulate the caches of all layers."""
        opened = self._opened
        table = compute_kv_scales(self._stats, E4M3FN)
        return build_kv_candidate(FP8_CACHE, table, opened.numerics, origin="")


def list_asked(opened: OpenedPlan) -> Sequence[str]:
    """List the schemes to choose from."""
    asked = opened.request.scheme
    if asked is None:
        return tuple(SCHEMES)
    return tuple(dict.fromkeys([asked] if isinstance(asked, str) else asked))


def _list_sizes(plan: QuantizePlan) -> dict[str, int]:
    """Count the bytes of each linear with its scales."""
    found: dict[str, int] = defaultdict(int)
    for shard in plan.shards:
        for tensor in shard.tensors:
            found[tensor.name.rpartition(".")[0]] += tensor.size_bytes
    return found


def _count_plain(members: Members) -> int:
    return sum(m.shape[0] * m.shape[1] * ITEM_SIZE_BYTES[m.dtype] for m in members.matrices)


def require_choices(maker: GroupMaker, groups: Sequence[Group]) -> None:
    """Refuse a model of which nothing can be quantized.

    Raises:
        VerificationError: with the reason for each scheme.
    """
    if any(len(group.choices) > 1 for group in groups):
        return
    raise VerificationError(
        f"nothing can be quantized: {'; '.join(maker.describe_refused())}",
        hint="name another --engine",
    )
