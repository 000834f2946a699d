"""A plan's model, measured: groups opened with their weights, searched, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8calib.data.sequences import DataPlan, batches
from fp8calib.errors import VerificationError
from fp8calib.jobs.planning.budget import Sizes
from fp8calib.jobs.planning.groups import GroupMaker, list_asked, require_choices
from fp8calib.jobs.planning.opened import OpenedPlan, join_texts
from fp8calib.jobs.planning.recipe import PlannedScheme
from fp8calib.jobs.planning.runs import Measurements, Runs
from fp8calib.jobs.quantization.planned import replay_settings, resolve_recipe
from fp8calib.jobs.quantization.servable import find_fault
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.stats import drop_kv
from fp8calib.jobs.verification.memory import open_scored, plan_verification
from fp8calib.jobs.verification.opened import open_verification
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.requests.verify import VerifyRequest
from fp8calib.run.streaming.model import StreamedModel
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.planning.choices import Group, emulate_plan
from fp8calib.verification.planning.gradients import can_estimate, estimate
from fp8calib.verification.planning.search import Search
from fp8calib.verification.score import AT_ONCE, count_by_share, count_in_rounds
from fp8calib.verification.text_runs import TextRuns
from fp8calib.verification.verify import Verification

_STREAMS = "each group is measured from its own layer on"
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A model that is open, its groups, and what runs them."""

    opened: OpenedPlan
    maker: GroupMaker
    groups: Sequence[Group]
    sizes: Sizes
    streamed: StreamedModel
    measurements: Measurements
    reporter: Reporter

    def open_search(self) -> Search:
        """Find the gradients, and give the search on its text."""
        return Search(
            self.groups,
            _find_slopes(self),
            self.open_runs(self.opened.search, "searching"),
            passes=self.opened.request.passes,
            num_layers=len(self.opened.target.geometry.layers),
        )

    def open_runs(self, text: DataPlan, stage: str) -> Runs:
        """Give what runs plans on a text."""
        chosen = list(batches(text, self.opened.request.batch_size))
        return Runs(
            TextRuns(self.streamed, chosen, self.reporter),
            self.groups,
            self.measurements,
            text=text.fingerprint,
            stage=stage,
        )


@contextmanager
def open_measured(
    opened: OpenedPlan, stats: CalibrationStats, measurements: Measurements, reporter: Reporter
) -> Iterator[MeasuredPlan]:
    """Find what can be chosen, and open the model layer by layer.

    Raises:
        UsageError: it does not fit into memory.
        VerificationError: nothing can be quantized.
    """
    maker = GroupMaker(opened, stats)
    for text in maker.describe_refused():
        reporter.say(text)
    asked = _ask(opened, maker)
    extra = {"gradients": _estimate_gradient_bytes(opened)}
    mode = plan_verification(
        asked, opened.model, Path.cwd(), walks=1, always_streams=_STREAMS, extra_bytes=extra
    )
    for text in mode.describe():
        reporter.say(text)
    with open_scored(asked, opened.model, mode, reporter) as streamed:
        assert isinstance(streamed, StreamedModel)  # noqa: S101 -- always
        groups = maker.make(streamed.model)
        yield MeasuredPlan(
            opened=opened,
            maker=maker,
            groups=groups,
            sizes=_count_sizes(opened, groups),
            streamed=streamed,
            measurements=measurements,
            reporter=reporter,
        )


def count_search(opened: OpenedPlan) -> int:
    """Count the passes over its text that the first search takes at most."""
    layers = opened.target.geometry.layers
    experts = sum(any(each.num_experts for each in layer.linears) for layer in layers)
    return opened.request.passes + count_in_rounds(experts * len(list_asked(opened)))


def _count_sizes(opened: OpenedPlan, groups: Sequence[Group]) -> Sizes:
    """Count what stays as it is; scales of the KV cache too, as one such cache brings all."""
    plain = sum(group.choices[0].size_bytes for group in groups)
    weights = sum(g.choices[0].size_bytes for g in groups if not g.is_cache)
    stored = sum(each.size_bytes for each in opened.target.checkpoint.tensors.values())
    brings = any(group.is_cache for group in groups)
    owned = sum(a.producer is None for _, a in opened.target.geometry.attentions())
    scales = 8 * owned * brings
    return Sizes(fixed=stored - weights + scales, unquantized=stored - weights + plain)


def _ask(opened: OpenedPlan, maker: GroupMaker) -> Verification:
    """Ask for the comparison of a full round of plans, which decides on the memory."""
    request = opened.request
    asked = open_verification(
        VerifyRequest(
            str(request.model), engine=opened.emulated.key, batch_size=request.batch_size
        ),
        opened.model,
        join_texts(opened),
    )
    groups = maker.make(opened.model.prepared.model)
    require_choices(maker, groups)
    whole = emulate_plan(groups, tuple(len(group.choices) - 1 for group in groups))
    plans = (replace(whole, name=str(number)) for number in range(AT_ONCE))
    return replace(asked, candidates=(*plans, *asked.candidates))


def _estimate_gradient_bytes(opened: OpenedPlan) -> int:
    """Estimate what the walk back takes: each scheme's weights of a layer, and its activations."""
    tokens = max(len(s) for s in opened.search.sequences) * opened.request.batch_size
    largest = 0
    for layer in opened.target.geometry.layers:
        own = [each for each in layer.linears if not each.num_experts]
        weights = sum(each.in_features * each.out_features for each in own)
        widths = sum(each.in_features + each.out_features for each in own)
        largest = max(largest, 4 * (weights * (len(SCHEMES) + 1) + 3 * tokens * widths))
    return largest


def _find_slopes(measured: MeasuredPlan) -> dict[tuple[int, int], torch.Tensor]:
    """Find the derivatives in the direction of each choice, or take those of an earlier run."""
    opened, groups, reporter = measured.opened, measured.groups, measured.reporter
    names = {
        f"{group.name}={choice.name}": (g, c)
        for g, group in enumerate(groups)
        if can_estimate(group)
        for c, choice in enumerate(group.choices)
        if c
    }
    stored = measured.measurements.find("slopes/")
    if not names.keys() <= stored.keys():
        chosen = list(batches(opened.search, opened.request.batch_size))
        layers = len(opened.target.geometry.layers)
        total = 2 * sum(batch.num_tokens for batch in chosen)
        reporter.stage("gradients", total, unit="tokens")
        found = estimate(
            measured.streamed,
            chosen,
            groups,
            seed=_SEED,
            advance=count_by_share(layers, reporter),
        )
        places = {place: name for name, place in names.items()}
        stored = {places[place]: slope for place, slope in found.items()}
        measured.measurements.add("slopes/", stored)
    return {names[name]: slope for name, slope in stored.items() if name in names}


def require_loaded(opened: OpenedPlan, planned: PlannedScheme, stats: CalibrationStats) -> None:
    """Refuse a plan that an engine does not load, as `check` judges what would be written.

    Raises:
        VerificationError: naming the engine, and why.
    """
    if planned.quantize is None:
        return
    used = stats if planned.caches else drop_kv(stats)
    asked = resolve_recipe(planned.quantize)
    _, reports, unchecked = replay_settings(opened.folder, asked, used, opened.engines)
    for engine, report in reports.items():
        if why := find_fault(report):
            raise VerificationError(
                f"{engine} does not load the plan: {why}",
                hint="name one --scheme, or another --engine",
            )
    if unchecked:
        raise VerificationError(unchecked)
