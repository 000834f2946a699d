"""Replay what engines do with the FP8 weights of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache, cached_property, partial

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.fp8.dialect import Fp8Dialect
from fp8calib.dialects.fp8.modelopt import OLD_BLOCK_ALGORITHM
from fp8calib.dialects.fp8.quantization_config import ContradictionError, StoredScheme
from fp8calib.dialects.fp8.registry import load_finder, refine_dialect
from fp8calib.dialects.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.engines.engine import Engine
from fp8calib.engines.odd_scales import judge_weight_scales, note_unusual_weights
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LoadVerdict,
    Refusal,
    Status,
    report_refusal,
)
from fp8calib.engines.weights.blocks import list_rank_block_faults
from fp8calib.engines.weights.completeness import (
    describe_paths,
    find_wrong_values,
    list_index_problems,
    list_opened_tensors,
    list_parameter_faults,
    list_scaleless_faults,
)
from fp8calib.engines.weights.faults import QuantizedLinear, QuantizedWeights, WeightFault
from fp8calib.engines.weights.linear_loader import LinearGroup
from fp8calib.engines.weights.loading import (
    find_weight_fit,
    list_loading_faults,
    list_other_schemes,
)
from fp8calib.engines.weights.parameters import PLAIN_DTYPES
from fp8calib.engines.weights.rules import apply_rules, list_stack_faults, list_weight_faults
from fp8calib.engines.weights.stored import (
    ScaleValues,
    list_groups,
    read_scale_values,
)
from fp8calib.engines.weights.weight_rule import Effect, Opened
from fp8calib.errors import ModelError, shorten
from fp8calib.fp8.schemes import Granularity, find_nearest
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.module_paths import split_expert
from fp8calib.stats.calibration_stats import CalibrationStats

_SUFFIX = ".weight"
_STATUSES = {Effect.MISREAD: Status.MISREAD, Effect.DEFAULTED: Status.DEFAULTED}
_UNCHECKED = "what engines do with the FP8 weights is not checked"


class WeightReplay:
    """The faults of a folder's FP8 weights; what all engines share is computed once."""

    def __init__(
        self,
        folder: ScaleFolder,
        geometry: ModelGeometry,
        tp: int,
        stats: CalibrationStats | None = None,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._problem = ""
        self._odd: LoadVerdict | None = None
        self._wrong = find_wrong_values(folder, geometry) if folder.is_on_disk else None
        self._unusual = ""
        self._faults: list[WeightFault] = []
        self._weights: QuantizedWeights | None = None
        self._schemes: Mapping[str, StoredScheme] = {}
        self._opened = cache(partial(_OpenedWeights, folder, geometry))
        self._index_problems = list_index_problems(folder, geometry)
        self._located = list_opened_tensors(folder, Opened.INDEXED)
        self._tensors = {name: entry for name, (_, entry) in self._located.items()}
        consolidated = [file for file in folder.files if file.startswith("consolidated")]
        self._opens_consolidated = (
            f"vLLM prefers {shorten(consolidated[0])} to the other files" if consolidated else ""
        )
        self._paths = describe_paths(folder)
        if (stack := _find_stack(self._tensors)) is not None:
            self._problem = f"{_UNCHECKED} where one tensor holds many experts ({stack})"
        matrices = _list_matrices(self._tensors)
        self._faults += list_stack_faults(folder.config, matrices)
        stored = {name: entry for name, entry in matrices.items() if entry.dtype in WEIGHT_FORMATS}
        self._has_old_blocks = bool(stored) and _names_old_blocks(folder)
        if self._has_old_blocks:
            self._problem = (
                f"{_UNCHECKED}: engines accept {OLD_BLOCK_ALGORITHM} only for some of the linears"
            )
        elif stored:
            try:
                self._weights = self._describe(stored, matrices)
            except ModelError as error:
                self._problem = f"{_UNCHECKED}: {error.message}"
                return
            self._judge_scales(stats)
            self._faults += list_weight_faults(self._weights)
            self._faults += list_rank_block_faults(self._weights, geometry, tp)

    def _describe(
        self, stored: Mapping[str, TensorEntry], matrices: Mapping[str, TensorEntry]
    ) -> QuantizedWeights:
        """Describe the FP8 weights for tables and rules; those that no config has are left out."""
        dialect, find_scheme = load_finder(self._folder.path, self._folder.config)
        schemes: dict[str, StoredScheme] = {}
        for module in stored:
            with suppress(ContradictionError):
                schemes[module] = find_scheme(module)
        self._schemes = schemes if len(set(schemes.values())) > 1 else {}
        return QuantizedWeights(
            dialect=_refine_dialect(dialect, schemes, self._tensors),
            config=self._folder.config,
            linears=tuple(_make_linear(each, stored[each], schemes[each]) for each in schemes),
            unquantized={name for name, entry in matrices.items() if entry.dtype in PLAIN_DTYPES},
            is_mixed=_is_mixed(self._folder),
        )

    def _judge_scales(self, stats: CalibrationStats | None) -> None:
        """Compare the scales with the statistics of the model, if given."""
        largest = self._opened(Opened.INDEXED).values.largest
        if stats is None:
            self._unusual = note_unusual_weights(self._tensors, largest)
        else:
            self._odd = judge_weight_scales(self._tensors, largest, stats)

    def _judge_loading(self, engine: Engine) -> list[WeightFault]:
        """Compare what an engine creates with what is stored."""
        loader = None
        faults: list[WeightFault] = []
        rules = engine.parameter_rules
        opened = self._opened(Opened.INDEXED if rules is None else rules.opened)
        if engine.make_linear_loader is not None and not self._has_old_blocks:
            try:
                loader = engine.make_linear_loader(self._folder, self._geometry)
            except Refusal as refusal:
                return [_refuse_config(engine, refusal)]
            faults += list_loading_faults(loader, opened.groups, opened.values)
            faults += list_other_schemes(loader, opened.groups, self._schemes)
        if rules is None or not self._folder.tensors:
            return faults
        faults += list_parameter_faults(
            engine.key,
            rules,
            self._geometry,
            opened.located,
            is_quantized=_has_quantization(self._folder),
            unties=_unties_head(self._folder),
            find_fit=None if loader is None else partial(find_weight_fit, loader, opened.groups),
        )
        if loader is None:
            faults += list_scaleless_faults(engine.key, rules, opened.tensors)
        return faults

    def amend(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Add what an engine does with the weights to its report on the KV scales."""
        if engine.judges_weights:
            return self._amend_judged(report)
        like = [fault for fault in self._faults if fault.engine == engine.loader]
        own = [fault for fault in like if fault.holds(engine.version)]
        if self._weights is not None:
            own += apply_rules(engine.key, engine.weight_rules, self._weights)
        own += self._judge_loading(engine)
        refused = next((fault for fault in own if fault.effect is Effect.REFUSED), None)
        if refused is not None:
            refusal = Refusal(refused.why, fix=refused.fix)
            verdict = LoadVerdict(status=Status.REFUSED, why=refused.why, fix=refused.fix)
            report = report_refusal(self._geometry, refusal)
            return report.model_copy(update={"weights": verdict})
        for effect, status in _STATUSES.items():
            found = next((fault for fault in own if fault.effect is effect), None)
            if found is not None:
                verdict = LoadVerdict(status=status, why=found.why, fix=found.fix)
                report = report.model_copy(update={"weights": verdict})
                break
        report = self._add_shared(report)
        notes = [fault.why for fault in own if fault.effect is Effect.CONDITION]
        is_vllm = engine.name == "vllm"
        if report.weights is None:
            reasons = [fault.why for fault in own if fault.effect is Effect.UNKNOWN]
            reasons += [self._opens_consolidated] if is_vllm else []
            rules = engine.parameter_rules
            reasons += [self._paths] if rules is not None and rules.doubts_names else []
            every = (*reasons, self._problem)
            report = report.doubt(*(f"weights: {each}{engine.run_hint}" for each in every if each))
        notes += self._index_problems
        if engine.make_linear_loader is None and self._weights is not None:
            notes.append(f"names, shapes and values of scales are not checked for {engine.title}")
        report = self._suspect(report)
        return report.add_problems(*(f"weights: {why}" for why in notes))

    def _add_shared(self, report: EngineReport) -> EngineReport:
        """Add what is wrong in every engine."""
        shared = self._wrong or self._odd
        if report.weights is not None or shared is None:
            return report
        return report.model_copy(update={"weights": shared})

    def _suspect(self, report: EngineReport) -> EngineReport:
        return report.suspect(f"weights: {self._unusual}") if self._unusual else report

    def _amend_judged(self, report: EngineReport) -> EngineReport:
        """Add what an engine's loader does not look at: the numbers of scales, the index."""
        bad = self._opened(Opened.INDEXED).values.bad if self._weights is not None else {}
        # The inputs of experts are not quantized.
        name = next((n for n in bad if not (split_expert(n) and n.endswith(".input_scale"))), None)
        if report.weights is None and name is not None:
            why = f"{shorten(name)} holds {bad[name]}"
            verdict = LoadVerdict(status=Status.MISREAD, why=why, fix="quantize the model again")
            report = report.model_copy(update={"weights": verdict})
        report = self._suspect(self._add_shared(report))
        return report.add_problems(*(f"weights: {why}" for why in self._index_problems))


class _OpenedWeights:
    """The weights in the files that an engine opens."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, opened: Opened) -> None:
        self._folder = folder
        self._geometry = geometry
        self.located = list_opened_tensors(folder, opened)
        self.tensors = {name: entry for name, (_, entry) in self.located.items()}

    @cached_property
    def groups(self) -> list[LinearGroup]:
        """The linears that engines create."""
        return list(list_groups(self.tensors, self._geometry))

    @cached_property
    def values(self) -> ScaleValues:
        """What the scales hold."""
        return read_scale_values(self._folder, self.located)


def _refuse_config(engine: Engine, refusal: Refusal) -> WeightFault:
    return WeightFault(
        engine=engine.key,
        effect=Effect.REFUSED,
        why=refusal.why,
        source=f"{engine.release}, its quantization config",
        fix=refusal.fix,
    )


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
    inner = folder.config.get("text_config")
    sections = (folder.config, inner if isinstance(inner, dict) else {})
    keys = ("quantization_config", "compression_config")
    return folder.modelopt is not None or any(
        section.get(key) is not None for section in sections for key in keys
    )


def _unties_head(folder: ScaleFolder) -> bool:
    inner = folder.config.get("text_config")
    sections = (folder.config, inner if isinstance(inner, dict) else {})
    return any(section.get("tie_word_embeddings") is False for section in sections)


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


def _make_linear(module: str, entry: TensorEntry, scheme: StoredScheme) -> QuantizedLinear:
    rows, columns = entry.shape
    return QuantizedLinear(
        module=shorten(module),
        shape=(rows, columns),
        scheme=find_nearest(scheme.weights, scheme.inputs).name,
        block=scheme.block if scheme.weights is Granularity.BLOCK else None,
    )
