"""What engines do with the weights of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.engine import Engine
from fp8calib.engines.odd_weights import judge_weight_scales, map_measured, suspect_weight_scales
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LinearCount,
    Refusal,
    Unjudged,
    report_refusal,
)
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.linear_tensors import compare_linears, count_unknown
from fp8calib.engines.weights.missing_tensors import (
    compare_parameters,
    describe_paths,
    find_wrong_values,
    list_index_problems,
    list_opened_files,
    list_tensors,
)
from fp8calib.engines.weights.rules import QuantizedWeights, apply_rules
from fp8calib.engines.weights.stored import (
    ScaleValues,
    find_decoder,
    list_groups,
    read_scale_values,
)
from fp8calib.engines.weights.weight_rule import NameRules
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.modelopt import OLD_BLOCK_ALGORITHM
from fp8calib.formats.fp8.quantization_config import ContradictionError, StoredScheme
from fp8calib.formats.fp8.registry import load_finder, refine_dialect
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.model.drafters import find_promise, is_drafted
from fp8calib.model.shapes import ModelGeometry

_SUFFIX = ".weight"
_UNCHECKED = "what engines do with the FP8 weights is not checked"
_WORST = (Status.REFUSED, Status.MISREAD, Status.DEFAULTED)


class WeightReplay:
    """The findings on a folder's weights; what all engines share is computed once."""

    def __init__(
        self,
        folder: ScaleFolder,
        geometry: ModelGeometry,
        tp: int,
        stats: CalibrationStats | None = None,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._tp = tp
        self._unlike_stats: Finding | None = None
        self.odd_scales: set[str] = set()
        """The suspicious scales of FP8 weights, which then tell nothing of K and V."""
        self._suspicious: list[str] = []
        self._doubts: list[str] = []
        self._dialect = ""
        """The name of that of the FP8 weights."""
        self._schemes: dict[str, StoredScheme] = {}
        """By the config, of the linears that are stored in FP8, by path."""
        self._opened = _OpenedWeights(folder, geometry, list_opened_files(folder))
        self._counts: dict[str, LinearCount] = {}
        """By engine."""
        self._index_problems = list_index_problems(folder, geometry)
        if paths := describe_paths(folder):
            self._doubts.append(paths)
        tensors = self._opened.tensors
        fp8 = {name: each for name, each in tensors.items() if each.dtype in WEIGHT_FORMATS}
        stacks = (name for name, e in fp8.items() if len(e.shape) == 3 and "experts" in name)
        if (stack := next(stacks, None)) is not None:
            why = f"{_UNCHECKED} where one tensor holds many experts ({shorten(stack)})"
            self._doubts.append(why)
        stored = [
            name.removesuffix(_SUFFIX)
            for name, entry in fp8.items()
            if name.endswith(_SUFFIX) and len(entry.shape) == 2
        ]
        configs = (folder.config.get("quantization_config"), folder.modelopt)
        self._has_old_blocks = bool(stored) and any(
            OLD_BLOCK_ALGORITHM in str(config).upper() for config in configs
        )
        if self._has_old_blocks:
            self._doubts.append(
                f"{_UNCHECKED}: engines accept {OLD_BLOCK_ALGORITHM} only for some of the linears"
            )
        elif stored:
            self._describe(stored, stats)

    def _describe(self, stored: Sequence[str], stats: CalibrationStats | None) -> None:
        """Find the schemes of FP8 weights by the config, and scales that do not fit them."""
        schemes: dict[str, StoredScheme] = {}
        try:
            dialect, find_scheme = load_finder(self._folder.path, self._folder.config)
            for module in stored:
                with suppress(ContradictionError):
                    schemes[module] = find_scheme(module)
        except ModelError as error:
            self._doubts.append(f"{_UNCHECKED}: {error.message}")
            return
        self._schemes = schemes
        tensors, largest = self._opened.tensors, self._opened.values.largest
        scales = {
            name: scheme.weights
            for module, scheme in schemes.items()
            for name in name_companions(f"{module}{_SUFFIX}").scales
            if name in tensors
        }
        self._dialect = refine_dialect(dialect, scales).name
        unmeasured: Mapping[str, TensorEntry] = tensors
        if stats is not None:
            measured = map_measured(stats)
            unmeasured = {name: each for name, each in tensors.items() if name not in measured}
            self._unlike_stats = judge_weight_scales(tensors, largest, stats)
        for text, odd in suspect_weight_scales(unmeasured, largest):
            self._suspicious.append(text)
            self.odd_scales.update(odd)

    def _list_findings(self, engine: Engine) -> Iterator[Finding]:
        """List what an engine does with the weights other than loading them as they are."""
        try:
            yield from [] if self._has_old_blocks else self._compare_linears(engine)
        except Refusal as refusal:
            yield Finding.of(refusal)
            if not isinstance(refusal, Unjudged):
                return
        if self._folder.tensors:
            inner = self._folder.config.get("text_config")
            sections = [self._folder.config, *([inner] if isinstance(inner, dict) else [])]
            keys = ("quantization_config", "compression_config")
            yield from compare_parameters(
                engine.name_rules or NameRules(),
                self._geometry,
                self._opened.tensors,
                is_quantized=self._folder.modelopt is not None
                or any(each.get(key) is not None for each in sections for key in keys),
                unties=any(each.get("tie_word_embeddings") is False for each in sections),
            )
        yield from (Finding(status=Status.UNKNOWN, why=why) for why in self._doubts)
        if (promise := find_promise(self._folder.config)) and self._lacks_drafter():
            why = f"config.json promises a drafter ({promise}), and no tensor of one is stored"
            yield Finding(status=Status.USED, why=f"{why}: decoding with it is not possible")

    def _lacks_drafter(self) -> bool:
        tensors = self._opened.tensors
        num_layers, decoder = len(self._geometry.layers), find_decoder(self._geometry)
        has_weights = any(len(each.shape) > 1 for each in tensors.values())
        return has_weights and not any(is_drafted(name, num_layers, decoder) for name in tensors)

    def _compare_linears(self, engine: Engine) -> Iterator[Finding]:
        """Compare what the config and the model's class mean with what is stored.

        Raises:
            Refusal: the engine does not start, or that cannot be told.
        """
        # An engine without a reader, as a plug-in may be, has rules alone.
        reader = None
        if engine.make_reader is not None:
            reader = engine.make_reader(self._folder, self._geometry)
        classes = {} if reader is None else reader.classes
        groups = tuple(list_groups(self._opened.tensors, self._geometry, classes))
        weights = QuantizedWeights(
            dialect=self._dialect,
            config=self._folder.config,
            groups=groups,
            schemes=self._schemes,
            is_mixed=_is_mixed(self._folder),
        )
        if self._schemes:
            yield from apply_rules(engine.weight_rules, weights)
        if reader is None:
            return
        if self._schemes:
            yield from list_block_findings(
                engine.loader,
                weights,
                self._geometry,
                self._tp,
                repeats_scales=engine.repeats_expert_scales,
            )
            unknown = count_unknown(reader, groups)
            total = sum(len(group.members) for group in groups)
            self._counts[engine.key] = LinearCount(judged=total - unknown, unknown=unknown)
        reader.require_judged(self._folder)
        yield from compare_linears(reader, groups, self._opened.values, self._schemes)

    def amend(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Add what an engine does with the weights to its report on the KV scales."""
        if engine.make_reader is None and not engine.weight_rules:
            return self._amend_judged(report)
        found = list(self._list_findings(engine))
        refused = next((each for each in found if each.status is Status.REFUSED), None)
        if refused is not None:
            verdict = refused.judge()
            report = report_refusal(self._geometry, Refusal(refused.text, fix=refused.fix))
            return report.model_copy(update={"weights": verdict})
        doubts = [each for each in found if each.status is Status.UNKNOWN]
        wrong = [each for status in _WORST for each in found if each.status is status]
        certain = [each for each in wrong if not (doubts and each.is_silent)]
        if (values := self._opened.wrong or self._unlike_stats) is not None:
            certain.append(values)
        if certain:
            report = report.model_copy(update={"weights": certain[0].judge()})
        elif doubts:
            report = _doubt(engine, report, doubts, wrong)
        notes = [each.text for each in found if each.status is Status.USED]
        report = report.model_copy(update={"linears": self._counts.get(engine.key)})
        return self._add_notes(report, notes)

    def _amend_judged(self, report: EngineReport) -> EngineReport:
        """Add what an engine's own loader does not look at: values of weights, the index."""
        opened = _OpenedWeights(
            self._folder, self._geometry, list_opened_files(self._folder, prefers_single=True)
        )
        values = opened.wrong or self._unlike_stats
        if report.weights is None and values is not None:
            report = report.model_copy(update={"weights": values.judge()})
        return self._add_notes(report, [])

    def _add_notes(self, report: EngineReport, notes: Sequence[str]) -> EngineReport:
        report = report.suspect(*(f"weights: {text}" for text in self._suspicious))
        return report.add_problems(*(f"weights: {why}" for why in [*notes, *self._index_problems]))


def _doubt(
    engine: Engine, report: EngineReport, doubts: list[Finding], silent: list[Finding]
) -> EngineReport:
    """Say what only the engine's own loader can tell, and what becomes of it if it loads."""
    reasons = (f"weights: {each.text}{engine.run_hint}" for each in doubts)
    report = report.doubt(*reasons)
    if silent:
        return report.model_copy(update={"if_loaded": silent[0].judge()})
    found = next((each for each in doubts if each.if_loaded), None)
    if found is None:
        return report
    text = f"{found.text}: {found.if_loaded}"
    verdict = Finding(status=Status.MISREAD, why=text, fix=found.fix).judge()
    return report.model_copy(update={"if_loaded": verdict})


class _OpenedWeights:
    """The weights in the files that an engine opens."""

    def __init__(
        self, folder: ScaleFolder, geometry: ModelGeometry, files: tuple[str, ...]
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._files = files
        self.located = list_tensors(folder, files)
        self.tensors = {name: entry for name, (_, entry) in self.located.items()}

    @cached_property
    def wrong(self) -> Finding | None:
        """What makes them wrong without an error, whatever the engine; None for nothing."""
        return find_wrong_values(self._folder, self._geometry, self._files, self.located)

    @cached_property
    def values(self) -> ScaleValues:
        """What the scales hold."""
        return read_scale_values(self._folder, self.located)


def _is_mixed(folder: ScaleFolder) -> bool:
    """Check whether one of ModelOpt's two configs is for a mixed precision."""
    for config in (folder.config.get("quantization_config"), folder.modelopt):
        outer = config if isinstance(config, dict) else {}
        inner = outer.get("quantization")
        fields = inner if isinstance(inner, dict) else outer
        if fields.get("quant_algo") == "MIXED_PRECISION":
            return True
    return False
