"""Choose the rule of each K and V by what the model loses on held-out text.

The divergences of sites that are quantized alone nearly add up, and no other site hides them. So
each site is measured alone, in the layers that lose most, and the choice is judged as a whole on
other text than it was made on. The passes are bounded: `count_passes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import torch

from fp8calib.data.sequences import DataPlan, take_sequences
from fp8calib.engines.numerics import Numerics
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.numerics.rules import AMAX
from fp8calib.verification.candidates import drop_layers
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import (
    PairedAnswer,
    PairedResult,
    RuleChoiceResult,
    RuleResult,
    SiteRuleResult,
    format_difference,
)
from fp8calib.verification.score import count_in_rounds
from fp8calib.verification.sensitivity import SEQUENCES, STANDS_OUT
from fp8calib.verification.summary import Summary, average, summarize
from fp8calib.verification.text_runs import TextRuns

CHOICE = "auto"
"""The name of the choice among the rules that it is judged with."""
IN_16_BITS = "16 bits"
_MOST_LAYERS = 8
"""Layers whose sites are measured with every rule: those that lose most."""
_LEAST_ERRORS = 4.0
"""Standard errors by which a rule is better than amax: some hundred comparisons are made."""
_AMAX = str(AMAX)

Quantizers = Mapping[Site, Quantizer]
Cell = tuple[int, tuple[Site, ...]]
"""A layer, and the sites in it that share a scale: K or V, or both of latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSearch:
    """Among what is chosen."""

    candidate: str
    """Whose statistics the rules are applied to."""
    options: Mapping[str, Quantizers]
    """By name of the rule: what quantizes every site; amax is the first."""
    numerics: Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What the first text says."""

    base: str
    """The rule of the sites that are not named."""
    sites: tuple[SiteRuleResult, ...]
    left: tuple[int, ...]
    """The layers in 16 bits."""

    @property
    def is_amax(self) -> bool:
        return self.base == _AMAX and not self.left and not any(s.rule for s in self.sites)

    def mix(
        self, options: Mapping[str, Quantizers], others: str, geometry: ModelGeometry
    ) -> dict[Site, Quantizer]:
        """Take the quantizers of the sites with a rule, and of `others` those without one."""
        rules = {site: found.rule for found in self.sites for site in found.sites if found.rule}
        mixed = {site: options[rules.get(str(site), others)][site] for site in options[others]}
        return drop_layers(mixed, self.left, geometry)


def split_text(plan: DataPlan) -> tuple[DataPlan, DataPlan]:
    """Give the text that rules are chosen on, a bounded part of the first half, and the other."""
    half = len(plan.sequences) // 2
    return take_sequences(plan, 0, min(half, SEQUENCES)), take_sequences(plan, half, None)


def count_passes(geometry: ModelGeometry, num_options: int) -> tuple[int, int]:
    """Count the passes over the text that rules are chosen on, and over the other, at most."""
    num_layers = len(geometry.owners())
    searched = min(num_layers, _MOST_LAYERS)
    of_cells = searched * (2 * num_options + 1)
    return count_in_rounds(num_layers) + of_cells + num_options + 1, num_options + 2


def describe_search(
    geometry: ModelGeometry, num_options: int, first: DataPlan, second: DataPlan
) -> str:
    """Say how much text goes through the model at most."""
    passes, judging = count_passes(geometry, num_options)
    return (
        f"at most {passes} passes over {first.num_tokens:,} tokens to choose among {num_options} "
        f"rules, {judging} over {second.num_tokens:,} others to judge"
    )


def choose_rules(
    geometry: ModelGeometry, search: RuleSearch, first: TextRuns, second: TextRuns
) -> RuleChoiceResult:
    """Choose on the first part of the text, judge on the second (`split_text`)."""
    passes, judging = count_passes(geometry, len(search.options))
    first.begin_stage("choosing rules", passes)
    chosen = _Search(search, first, geometry).run()
    if chosen.is_amax:
        return _report(search, chosen, (), first, second)
    second.begin_stage("judging the choice", judging)
    judged = _judge(search, chosen, second, geometry)
    return _report(search, chosen, judged, first, second)


def _emulate(options: Mapping[str, Quantizers]) -> dict[str, Candidate]:
    return {name: Candidate(quantizers=found) for name, found in options.items()}


class _Search:
    """Chooses on the first text."""

    def __init__(self, search: RuleSearch, runs: TextRuns, geometry: ModelGeometry) -> None:
        self._options = search.options
        self._runs = runs
        self._geometry = geometry
        self._cells = list_cells(geometry, search.options[_AMAX])
        self._can_skip = bool(search.numerics.kv_skip_flag)

    def run(self) -> _Chosen:
        """Choose for the sites of the layers that lose most, then for all others together."""
        layers = self._measure_layers()
        most = sorted(layers, key=lambda layer: -_mean(layers[layer]))[:_MOST_LAYERS]
        sites = [self._choose_cell(cell) for cell in self._cells if cell[0] in most]
        left = self._find_left(sites, {layer: _mean(found) for layer, found in layers.items()})
        return self._choose_others(_Chosen(base=_AMAX, sites=tuple(sites), left=left))

    def _find_klds(self, options: Mapping[str, Quantizers]) -> dict[str, torch.Tensor]:
        """Give the divergences with each way to quantize, run together: fp32 [N]."""
        found = self._runs.run(_emulate(options)).candidates
        return {name: scores.klds for name, scores in found.items()}

    def _find_left(
        self, sites: Sequence[SiteRuleResult], layers: Mapping[int, float]
    ) -> tuple[int, ...]:
        """Find the layers that stand out with the best rules too, where the engine can leave one.

        `layers` is what each costs with amax.
        """
        if not self._can_skip:
            return ()
        rest = {site.layer: [each for each in sites if each.layer == site.layer] for site in sites}
        costs = {layer: sum(each.kld for each in found) for layer, found in rest.items()}
        usual = median_low(list({**layers, **costs}.values()))
        errors = {
            layer: 2 * sum(each.kld_se or 0.0 for each in found) for layer, found in rest.items()
        }
        left = [layer for layer, cost in costs.items() if cost - errors[layer] > STANDS_OUT * usual]
        return self._geometry.with_readers(left)

    def _choose_others(self, chosen: _Chosen) -> _Chosen:
        """Choose the rule of the sites without one of their own."""
        mixed = {name: chosen.mix(self._options, name, self._geometry) for name in self._options}
        klds = self._find_klds(mixed)
        best = min(klds, key=lambda name: _mean(klds[name]))
        pair = compare_paired(best, _AMAX, klds, self._runs.lengths)
        return replace(chosen, base=best) if _is_sure(pair) else chosen

    def _measure_layers(self) -> dict[int, torch.Tensor]:
        """Quantize one layer at a time."""
        layers = {
            str(layer): self._take(_AMAX, (c for c in self._cells if c[0] == layer))
            for layer in dict.fromkeys(layer for layer, _ in self._cells)
        }
        return {
            int(name): scores.klds
            for found in self._runs.run_rounds(_emulate(layers))
            for name, scores in found.candidates.items()
        }

    def _choose_cell(self, cell: Cell) -> SiteRuleResult:
        """Quantize the sites of a cell alone with every rule that changes them."""
        tried: dict[str, dict[Site, Quantizer]] = {}
        for name in self._options:
            found = self._take(name, [cell])
            if not any(_is_same(found, other) for other in tried.values()):
                tried[name] = found
        klds = self._find_klds(tried)
        best = min(klds, key=lambda name: _mean(klds[name]))
        pair = None if best == _AMAX else compare_paired(best, _AMAX, klds, self._runs.lengths)
        own = best if pair is not None and _is_sure(pair) else ""
        kld, kld_se = average(klds[own or _AMAX], self._runs.lengths)
        layer, sites = cell
        return SiteRuleResult(
            layer=layer,
            sites=tuple(map(str, sites)),
            rule=own,
            kld=kld,
            kld_se=kld_se,
            against_amax=pair,
        )

    def _take(self, name: str, cells: Iterator[Cell] | Sequence[Cell]) -> dict[Site, Quantizer]:
        sites = [site for _, sites in cells for site in sites]
        return {site: self._options[name][site] for site in sites}


def list_cells(geometry: ModelGeometry, quantizers: Quantizers) -> list[Cell]:
    """List what gets a rule of its own; a layer that reads another's cache has none."""
    cells: list[Cell] = []
    for layer, attention in geometry.attentions():
        sites = tuple(
            site for role in (Role.K, Role.V) if (site := attention.site(role)) in quantizers
        )
        if attention.kind == "latent" and sites:
            cells.append((layer.index, sites))
        else:
            cells += ((layer.index, (site,)) for site in sites)
    return cells


def make_rule_result(
    candidate: str, rule: str, summary: Summary, against_best: PairedResult | None
) -> RuleResult:
    """Make the result of a rule that was applied to the statistics of `candidate`."""
    return RuleResult(
        candidate=candidate,
        rule=rule,
        ppl_ratio=summary.ppl_ratio,
        ppl_ratio_se=summary.ppl_ratio_se,
        kld_mean=summary.kld_mean,
        kld_se=summary.kld_se,
        against_best=against_best,
    )


def _judge(
    search: RuleSearch, chosen: _Chosen, runs: TextRuns, geometry: ModelGeometry
) -> tuple[RuleResult, ...]:
    """Score the choice and each rule everywhere, the choice first."""
    mixed = chosen.mix(search.options, chosen.base, geometry)
    compared = runs.run(_emulate({CHOICE: mixed, **search.options}))
    klds = {name: scores.klds for name, scores in compared.candidates.items()}
    results = []
    for name, scores in compared.candidates.items():
        summary = summarize(scores, compared.reference, runs.lengths)
        pair = None if name == CHOICE else compare_paired(name, CHOICE, klds, runs.lengths)
        results.append(make_rule_result(search.candidate, name, summary, pair))
    return tuple(results)


def _report(
    search: RuleSearch,
    chosen: _Chosen,
    judged: Sequence[RuleResult],
    first: TextRuns,
    second: TextRuns,
) -> RuleChoiceResult:
    beaten = next((one.against_best for one in judged if one.rule == _AMAX), None)
    is_gained = beaten is not None and beaten.answer is PairedAnswer.WORSE
    named = [s for s in chosen.sites if s.rule and s.layer not in chosen.left]
    flag = search.numerics.spell_skip(chosen.left if is_gained else ())
    if beaten is None:
        sentence = "nothing is gained over amax: no other rule is better outside the noise."
    elif is_gained:
        sentence = f"{_describe(chosen, named)} (KLD {format_difference(beaten)} with amax)."
    else:
        sentence = (
            f"nothing is gained over amax: on other text than it was chosen on, the choice does "
            f"not gain outside the noise (KLD {format_difference(beaten)} with amax)."
        )
    return RuleChoiceResult(
        candidate=search.candidate,
        options=tuple(search.options),
        is_gained=is_gained,
        default=chosen.base if is_gained else _AMAX,
        rules={site: one.rule for one in named for site in one.sites} if is_gained else {},
        left_layers=chosen.left if is_gained else (),
        flag=flag,
        sites=chosen.sites,
        judged=tuple(judged),
        chosen_on_tokens=first.num_tokens,
        judged_on_tokens=second.num_tokens,
        sentence=sentence,
    )


def _describe(chosen: _Chosen, named: Sequence[SiteRuleResult]) -> str:
    layers = ", ".join(map(str, chosen.left))
    parts = [
        *(f"{' and '.join(one.sites)}: {one.rule}" for one in named),
        *([f"layers {layers}: {IN_16_BITS}"] if layers else []),
    ]
    others = "all" if not parts else "all others"
    return "; ".join([*parts, f"{others}: {chosen.base}"])


def _is_sure(pair: PairedResult) -> bool:
    """Tell whether a rule is better, and beyond what the best of many rules is by chance."""
    is_far = pair.se is not None and abs(pair.difference) > _LEAST_ERRORS * pair.se
    return pair.answer is PairedAnswer.BETTER and is_far


def _mean(klds: torch.Tensor) -> float:
    return float(klds.double().mean())


def _is_same(one: Quantizers, other: Quantizers) -> bool:
    return all(quantizer.is_same(other[site]) for site, quantizer in one.items())
