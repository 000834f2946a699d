"""What engines do with the weights of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.classes import make_pattern
from fp8calib.engines.odd_weights import judge_weight_scales, map_measured, suspect_weight_scales
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import EngineReport, Refusal, Unjudged, report_refusal
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.expected import PLAIN_DTYPES
from fp8calib.engines.weights.finding import Finding
from fp8calib.engines.weights.linear_tensors import compare_linears
from fp8calib.engines.weights.missing_tensors import (
    compare_parameters,
    describe_paths,
    find_wrong_values,
    list_index_problems,
    list_opened_files,
    list_tensors,
)
from fp8calib.engines.weights.reader import LinearReader, make_plain_reader
from fp8calib.engines.weights.rules import (
    QuantizedLinear,
    QuantizedWeights,
    apply_rules,
    list_split_expert_findings,
)
from fp8calib.engines.weights.stored import FindCreated, ScaleValues, list_groups, read_scale_values
from fp8calib.engines.weights.weight_rule import NameRules, Opened
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.modelopt import OLD_BLOCK_ALGORITHM
from fp8calib.formats.fp8.quantization_config import ContradictionError, StoredScheme
from fp8calib.formats.fp8.registry import load_finder, refine_dialect
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.schemes import Granularity, find_nearest

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
        self._weights: QuantizedWeights | None = None
        self._schemes: Mapping[str, StoredScheme] = {}
        self._read = cache(partial(_OpenedWeights, folder, geometry))
        self._index_problems = list_index_problems(folder, geometry)
        self._tensors = self._open(Opened.INDEXED).tensors
        if paths := describe_paths(folder):
            self._doubts.append(paths)
        if (stack := _find_stack(self._tensors)) is not None:
            self._doubts.append(f"{_UNCHECKED} where one tensor holds many experts ({stack})")
        matrices = _list_matrices(self._tensors)
        stored = {name: entry for name, entry in matrices.items() if entry.dtype in WEIGHT_FORMATS}
        self._has_old_blocks = bool(stored) and _names_old_blocks(folder)
        if self._has_old_blocks:
            self._doubts.append(
                f"{_UNCHECKED}: engines accept {OLD_BLOCK_ALGORITHM} only for some of the linears"
            )
        elif stored:
            self._describe(stored, matrices, stats)

    def _open(self, opened: Opened) -> _OpenedWeights:
        """Give the weights that an engine opens; engines that open the same files share them."""
        return self._read(list_opened_files(self._folder, opened))

    def _describe(
        self,
        stored: Mapping[str, TensorEntry],
        matrices: Mapping[str, TensorEntry],
        stats: CalibrationStats | None,
    ) -> None:
        """Describe the FP8 weights for tables and rules; those that no config has are left out."""
        schemes: dict[str, StoredScheme] = {}
        try:
            dialect, find_scheme = load_finder(self._folder.path, self._folder.config)
            for module in stored:
                with suppress(ContradictionError):
                    schemes[module] = find_scheme(module)
        except ModelError as error:
            self._doubts.append(f"{_UNCHECKED}: {error.message}")
            return
        self._schemes = schemes if len(set(schemes.values())) > 1 else {}
        self._weights = QuantizedWeights(
            dialect=_refine_dialect(dialect, schemes, self._tensors),
            config=self._folder.config,
            linears=tuple(
                _make_linear(each, self._find_shape(each, stored[each]), schemes[each])
                for each in schemes
            ),
            unquantized={name for name, entry in matrices.items() if entry.dtype in PLAIN_DTYPES},
            is_mixed=_is_mixed(self._folder),
        )
        largest = self._open(Opened.INDEXED).values.largest
        unmeasured = self._tensors
        if stats is not None:
            measured = map_measured(stats)
            unmeasured = {n: each for n, each in unmeasured.items() if n not in measured}
            self._unlike_stats = judge_weight_scales(self._tensors, largest, stats)
        for text, scales in suspect_weight_scales(unmeasured, largest):
            self._suspicious.append(text)
            self.odd_scales.update(scales)

    def _find_shape(self, module: str, entry: TensorEntry) -> tuple[int, int]:
        """Find the shape of a linear by config.json; that of its tensor where none is known."""
        rows, columns = entry.shape
        return self._geometry.matrices.get(f"{module}{_SUFFIX}", (rows, columns))

    def _list_findings(self, engine: Engine) -> Iterator[Finding]:
        """List what an engine does with the weights other than loading them as they are."""
        if self._weights is not None:
            yield from list_split_expert_findings(engine.loader, self._weights)
            yield from apply_rules(engine.weight_rules, self._weights)
            yield from list_block_findings(
                engine.loader,
                self._weights,
                self._geometry,
                self._tp,
                repeats_scales=engine.repeats_expert_scales,
            )
        yield from self._compare(engine)
        yield from (Finding(status=Status.UNKNOWN, why=why) for why in self._doubts)

    def _compare(self, engine: Engine) -> Iterator[Finding]:
        """Compare what the config and the model's class mean with what is stored."""
        rules = engine.name_rules or NameRules()
        opened = self._open(Opened.INDEXED)
        if not self._has_old_blocks:
            try:
                reader = self._make_reader(engine)
                reader.require_judged(self._folder)
                groups = list_groups(opened.tensors, self._geometry, self._find_created(engine))
                yield from compare_linears(reader, groups, opened.values, self._schemes)
            except Refusal as refusal:
                yield Finding.of(refusal)
                if not isinstance(refusal, Unjudged):
                    return
        if self._folder.tensors:
            yield from compare_parameters(
                rules,
                self._geometry,
                opened.located,
                is_quantized=_has_quantization(self._folder),
                unties=_unties_head(self._folder),
            )

    def _find_created(self, engine: Engine) -> FindCreated | None:
        """Give what tells how an engine's class creates a linear; None without a map of classes."""
        if engine.find_classes is None:
            return None
        classes = engine.find_classes(self._geometry.architecture) or {}
        return lambda path: classes.get(make_pattern(path), ())

    def _make_reader(self, engine: Engine) -> LinearReader:
        if engine.make_reader is not None:
            return engine.make_reader(self._folder, self._geometry)
        return make_plain_reader(self._folder)

    def amend(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Add what an engine does with the weights to its report on the KV scales."""
        if engine.judges_weights:
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
        if (values := self._open(Opened.INDEXED).wrong or self._unlike_stats) is not None:
            certain.append(values)
        if certain:
            report = report.model_copy(update={"weights": certain[0].judge()})
        elif doubts:
            report = _doubt(engine, report, doubts, wrong)
        report = self._suspect(report)
        notes = [each.text for each in found if each.status is Status.USED]
        notes += self._index_problems
        return report.add_problems(*(f"weights: {why}" for why in notes))

    def _suspect(self, report: EngineReport) -> EngineReport:
        return report.suspect(*(f"weights: {text}" for text in self._suspicious))

    def _amend_judged(self, report: EngineReport) -> EngineReport:
        """Add what an engine's loader does not look at: values of weights, the index."""
        values = self._open(Opened.SINGLE).wrong or self._unlike_stats
        if report.weights is None and values is not None:
            report = report.model_copy(update={"weights": values.judge()})
        report = self._suspect(report)
        return report.add_problems(*(f"weights: {why}" for why in self._index_problems))


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


def _refine_dialect(
    dialect: Fp8Dialect, schemes: Mapping[str, StoredScheme], tensors: Mapping[str, TensorEntry]
) -> str:
    names = {module: name_companions(f"{module}.weight").scales for module in schemes}
    stored = {
        name: schemes[module].weights
        for module, each in names.items()
        for name in each
        if name in tensors
    }
    return refine_dialect(dialect, stored).name


def _is_mixed(folder: ScaleFolder) -> bool:
    """Check whether one of ModelOpt's two configs is for a mixed precision."""
    for config in (folder.config.get("quantization_config"), folder.modelopt):
        outer = config if isinstance(config, dict) else {}
        inner = outer.get("quantization")
        fields = inner if isinstance(inner, dict) else outer
        if fields.get("quant_algo") == "MIXED_PRECISION":
            return True
    return False


def _has_quantization(folder: ScaleFolder) -> bool:
    """Check whether any engine finds a quantization config."""
    keys = ("quantization_config", "compression_config")
    return folder.modelopt is not None or any(
        section.get(key) is not None for section in _list_sections(folder) for key in keys
    )


def _unties_head(folder: ScaleFolder) -> bool:
    return any(each.get("tie_word_embeddings") is False for each in _list_sections(folder))


def _list_sections(folder: ScaleFolder) -> tuple[Mapping[str, object], ...]:
    """List the model's config and that of its text part."""
    inner = folder.config.get("text_config")
    return (folder.config, inner) if isinstance(inner, dict) else (folder.config,)


def _names_old_blocks(folder: ScaleFolder) -> bool:
    configs = (folder.config.get("quantization_config"), folder.modelopt)
    return any(OLD_BLOCK_ALGORITHM in str(config).upper() for config in configs)


def _find_stack(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Find an FP8 tensor of all experts of a layer, and shorten its name."""
    named = (
        name
        for name, entry in tensors.items()
        if entry.dtype in WEIGHT_FORMATS and len(entry.shape) == 3 and "experts" in name
    )
    stack = next(named, None)
    return None if stack is None else shorten(stack)


def _list_matrices(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """List the weights of linears, by path of the linear."""
    return {
        name.removesuffix(_SUFFIX): entry
        for name, entry in tensors.items()
        if name.endswith(_SUFFIX) and len(entry.shape) == 2
    }


def _make_linear(module: str, shape: tuple[int, int], scheme: StoredScheme) -> QuantizedLinear:
    return QuantizedLinear(
        module=shorten(module),
        shape=shape,
        scheme=find_nearest(scheme).name,
        block=scheme.block if scheme.weights is Granularity.BLOCK else None,
        granularity=scheme.weights,
    )
