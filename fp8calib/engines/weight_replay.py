"""What engines do with the weights of a checkpoint folder, in three passes.

1. What the folder stores (`weights/stored.py`), once for engines that open the same files.
2. What an engine's class creates (`weights/linears.py`) under the config (`weights/reader.py`).
3. The rule: a stored tensor beside what is created for it (`weights/linear_tensors.py`; parameters
   that are no linears, `weights/parameters.py`; what breaks whatever is stored, `weights/rules.py`
   and `weights/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.engines.engine import Engine
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LinearCount,
    LoadVerdict,
    Refusal,
    Unjudged,
    report_refusal,
)
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.linear_tensors import compare_linears, count_unknown, list_created
from fp8calib.engines.weights.linears import find_decoder, list_groups
from fp8calib.engines.weights.parameters import compare_parameters
from fp8calib.engines.weights.reader import LinearReader
from fp8calib.engines.weights.rules import QuantizedWeights, apply_rules
from fp8calib.engines.weights.stored import StoredWeights, find_wrong_values, list_index_problems
from fp8calib.engines.weights.weight_rule import NameRules
from fp8calib.model.drafters import find_promise, is_drafted
from fp8calib.model.shapes import ModelGeometry

_CONFIG_KEYS = ("quantization_config", "compression_config")


class WeightReplay:
    """The findings on the weights of a folder."""

    def __init__(
        self,
        folder: ScaleFolder,
        geometry: ModelGeometry,
        tp: int,
        stats: CalibrationStats | None = None,
    ) -> None:
        self.stored = StoredWeights(folder, stats)
        self._folder = folder
        self._geometry = geometry
        self._tp = tp
        self._index_problems = list_index_problems(folder, geometry)

    def amend(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Add what an engine does with the weights to its report on the KV scales."""
        if engine.make_reader is None and not engine.weight_rules:
            # Its own loader was run, which looks neither at values nor at the index.
            values = self._blame_values(
                find_wrong_values(self._folder, self._geometry, prefers_single=True)
            )
            if report.weights is None and values is not None:
                report = report.model_copy(update={"weights": values.judge()})
            return self._add_notes(report, [])
        count, found = self._list_findings(engine)
        refused = next((each for each in found if each.status is Status.REFUSED), None)
        if refused is not None:
            refusal = Refusal(refused.text, fix=refused.fix)
            report = report_refusal(self._geometry, refusal)
            return report.model_copy(update={"weights": refused.judge()})
        doubts = [each for each in found if each.status is Status.UNKNOWN]
        wrong = [
            each
            for status in (Status.MISREAD, Status.DEFAULTED)
            for each in found
            if each.status is status
        ]
        certain = [each for each in wrong if not (doubts and each.is_silent)]
        if (values := self._wrong_values) is not None:
            certain.append(values)
        if certain:
            report = report.model_copy(update={"weights": certain[0].judge()})
            others = dict.fromkeys(each.text for each in certain[1:])
            report = report.add_problems(*(f"weights, too: {text}" for text in others))
        elif doubts:
            report = report.doubt(*(f"weights: {each.text}{engine.run_hint}" for each in doubts))
            report = report.model_copy(update={"if_loaded": _find_if_loaded(doubts, wrong)})
        notes = [each.text for each in found if each.status is Status.USED]
        return self._add_notes(report.model_copy(update={"linears": count}), notes)

    @cached_property
    def _wrong_values(self) -> Finding | None:
        return self._blame_values(find_wrong_values(self._folder, self._geometry))

    def _blame_values(self, why: str) -> Finding | None:
        fix = "write the checkpoint again, with each tensor once"
        finding = Finding(status=Status.MISREAD, why=why, fix=fix) if why else None
        return finding or self.stored.unlike_stats

    def _add_notes(self, report: EngineReport, notes: Sequence[str]) -> EngineReport:
        report = report.suspect(*(f"weights: {text}" for text in self.stored.suspicious))
        return report.add_problems(*(f"weights: {why}" for why in [*notes, *self._index_problems]))

    def _list_findings(self, engine: Engine) -> tuple[LinearCount | None, list[Finding]]:
        """List what an engine does with the weights other than loading them as they are."""
        count: LinearCount | None = None
        found: list[Finding] = []
        try:
            if not self.stored.has_old_blocks:
                # An engine without a reader, as a plug-in may be, has rules alone.
                reader = engine.make_reader and engine.make_reader(self._folder, self._geometry)
                count, found = self._compare_linears(engine, reader)
        except Refusal as refusal:
            found = [Finding.of(refusal)]
            if not isinstance(refusal, Unjudged):
                return None, found
        config, tensors = self._folder.config, self.stored.tensors
        if self._folder.tensors:
            inner = config.get("text_config")
            sections = [config, *([inner] if isinstance(inner, dict) else [])]
            found += compare_parameters(
                engine.name_rules or NameRules(),
                self._geometry,
                tensors,
                is_quantized=self._folder.modelopt is not None
                or any(each.get(key) is not None for each in sections for key in _CONFIG_KEYS),
                unties=any(each.get("tie_word_embeddings") is False for each in sections),
            )
        found += (Finding(status=Status.UNKNOWN, why=why) for why in self.stored.doubts)
        num_layers, decoder = len(self._geometry.layers), find_decoder(self._geometry)
        is_whole = any(len(each.shape) > 1 for each in tensors.values())
        if (
            (promise := find_promise(config))
            and is_whole
            and not any(is_drafted(name, num_layers, decoder) for name in tensors)
        ):
            why = f"config.json promises a drafter ({promise}), and no tensor of one is stored"
            text = f"{why}: decoding with it is not possible"
            found.append(Finding(status=Status.USED, why=text))
        return count, found

    def _compare_linears(
        self, engine: Engine, reader: LinearReader | None
    ) -> tuple[LinearCount | None, list[Finding]]:
        """Compare what the config and the model's class mean with what is stored."""
        stored = self.stored
        classes = {} if reader is None else reader.classes
        weights = QuantizedWeights(
            dialect=stored.dialect,
            config=self._folder.config,
            groups=tuple(list_groups(stored.tensors, self._geometry, classes)),
            schemes=stored.schemes,
            is_mixed=stored.is_mixed,
        )
        found = list(apply_rules(engine.weight_rules, weights)) if stored.schemes else []
        if reader is None:
            return None, found
        created = list_created(reader, weights.groups)
        count = None
        if stored.schemes:
            found += list_block_findings(
                *(engine.loader, weights, self._geometry, self._tp),
                repeats_scales=engine.repeats_expert_scales,
            )
            unknown = count_unknown(created)
            total = sum(len(group.members) for group in weights.groups)
            count = LinearCount(judged=total - unknown, unknown=unknown)
        try:
            reader.require_judged(stored.tensors)
        except Unjudged as refusal:
            return count, [*found, Finding.of(refusal)]
        return count, [*found, *compare_linears(reader, created, stored.values, stored.schemes)]


def _find_if_loaded(doubts: Sequence[Finding], silent: Sequence[Finding]) -> LoadVerdict | None:
    """Say what becomes of the weights if the engine loads them; None where it serves them."""
    if silent:
        return silent[0].judge()
    found = next((each for each in doubts if each.if_loaded), None)
    if found is None:
        return None
    text = f"{found.text}: {found.if_loaded}"
    return Finding(status=Status.MISREAD, why=text, fix=found.fix).judge()
