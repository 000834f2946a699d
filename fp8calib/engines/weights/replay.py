"""Replay what engines do with the FP8 weights of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.fp8.autofp8 import AUTOFP8
from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.dialects.fp8.dialect import Fp8Dialect
from fp8calib.dialects.fp8.modelopt import OLD_BLOCK_ALGORITHM
from fp8calib.dialects.fp8.quantization_config import ContradictionError, FindScheme, StoredScheme
from fp8calib.dialects.fp8.registry import load_finder, refine_dialect
from fp8calib.dialects.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.engines.engine import Effect, Engine
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LoadVerdict,
    Refusal,
    Status,
    report_refusal,
)
from fp8calib.engines.weights.blocks import list_rank_block_faults
from fp8calib.engines.weights.faults import QuantizedLinear, QuantizedWeights, WeightFault
from fp8calib.engines.weights.rules import apply_rules, list_weight_faults
from fp8calib.engines.weights.scales import list_scale_faults
from fp8calib.errors import VerificationError, shorten
from fp8calib.fp8.schemes import Granularity, find_nearest
from fp8calib.geometry.model_geometry import ModelGeometry

_SUFFIX = ".weight"
_FLOATS = ("BF16", "F16", "F32")
_TRIED_DIALECTS = (COMPRESSED_TENSORS, AUTOFP8)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears of decoder layers that vLLM creates by the config in all models."""
_UNCHECKED = "what engines do with the FP8 weights is not checked"


class WeightReplay:
    """The faults of a folder's FP8 weights, computed once for all engines."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> None:
        self._geometry = geometry
        self._problem = ""
        self._faults: list[WeightFault] = []
        self._weights: QuantizedWeights | None = None
        tensors = _list_tensors(folder)
        if (stack := _find_stack(tensors)) is not None:
            self._problem = f"{_UNCHECKED} where one tensor holds many experts ({stack})"
        matrices = _list_matrices(tensors)
        stored = {name: entry for name, entry in matrices.items() if entry.dtype in WEIGHT_FORMATS}
        if not stored:
            return
        try:
            dialect, find_scheme = load_finder(folder.path, folder.config)
            self._faults += _list_contradictions(dialect, find_scheme, stored, geometry)
            schemes = {module: find_scheme(module) for module in stored}
            unquantized = {name for name, entry in matrices.items() if entry.dtype in _FLOATS}
            self._faults += _list_forgotten(dialect, find_scheme, unquantized, folder, geometry)
        except VerificationError as error:
            self._problem = f"{_UNCHECKED}: {error.message}"
            return
        if _names_old_blocks(folder):
            self._problem = (
                f"{_UNCHECKED}: engines accept {OLD_BLOCK_ALGORITHM} only for some of the linears"
            )
            return
        self._weights = QuantizedWeights(
            dialect=_refine_dialect(dialect, schemes, tensors),
            config=folder.config,
            linears=tuple(_make_linear(each, stored[each], schemes[each]) for each in stored),
            unquantized=unquantized,
            is_mixed=_is_mixed(folder),
        )
        self._faults += list_scale_faults(schemes, tensors)
        self._faults += list_weight_faults(self._weights)
        self._faults += list_rank_block_faults(self._weights, geometry, tp)

    def amend(self, engine: Engine, report: EngineReport) -> EngineReport:
        """Add what an engine does with the weights to its report on the KV scales."""
        own = [fault for fault in self._faults if fault.engine == engine.loader]
        own += apply_rules(engine, self._weights) if self._weights is not None else []
        refused = next((fault for fault in own if fault.effect is Effect.REFUSED), None)
        if refused is not None:
            refusal = Refusal(refused.why, fix=refused.fix)
            verdict = LoadVerdict(status=Status.REFUSED, why=refused.why, fix=refused.fix)
            report = report_refusal(self._geometry, refusal)
            return report.model_copy(update={"weights": verdict})
        misread = next((fault for fault in own if fault.effect is Effect.MISREAD), None)
        if misread is not None:
            verdict = LoadVerdict(status=Status.MISREAD, why=misread.why, fix=misread.fix)
            report = report.model_copy(update={"weights": verdict})
        notes = [fault.why for fault in own if fault.effect is Effect.CONDITION]
        notes += [self._problem] if self._problem else []
        return report.add_problems(*(f"weights: {why}" for why in notes))


def _list_tensors(folder: ScaleFolder) -> dict[str, TensorEntry]:
    """List the tensors of the files that the index names, else of all.

    Some folders contain the same weights again, under other names, in files that it does not name.
    """
    weight_map = folder.index.get("weight_map") if isinstance(folder.index, dict) else None
    listed = weight_map.values() if isinstance(weight_map, dict) else folder.tensors
    named = {file for file in listed if isinstance(file, str)}
    return {
        name: entry
        for file, held in folder.tensors.items()
        if file in named
        for name, entry in held.items()
    }


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


def _list_contradictions(
    dialect: Fp8Dialect, find_scheme: FindScheme, stored: Collection[str], geometry: ModelGeometry
) -> Iterator[WeightFault]:
    """Yield the first FP8 weight that compressed-tensors' config does not quantize."""
    if dialect is not COMPRESSED_TENSORS:
        return
    for module in _list_modules(geometry):
        if module not in stored:
            continue
        try:
            find_scheme(module)
        except ContradictionError as error:
            yield WeightFault(
                engine="vllm",
                effect=Effect.REFUSED,
                why=f"{error.message}: vLLM has no parameter for its scale (ValueError)",
                source="vLLM 0.32.0 models/utils.py (AutoWeightsLoader), tried",
                fix="use the config that the weights were quantized with",
            )
            return


def _list_forgotten(
    dialect: Fp8Dialect,
    find_scheme: FindScheme,
    unquantized: Collection[str],
    folder: ScaleFolder,
    geometry: ModelGeometry,
) -> Iterator[WeightFault]:
    """Yield the first linear that is not FP8 although the config quantizes it.

    A name that occurs in the config's lists is not judged: it may mean the linear by another path.
    """
    spelled = " ".join(_list_texts(folder.config.get("quantization_config")))
    for module in _list_modules(geometry) if dialect in _TRIED_DIALECTS else ():
        name = module.rpartition(".")[2]
        if module not in unquantized or name not in _PROJECTIONS or name in spelled:
            continue
        try:
            find_scheme(module)
        except ContradictionError:
            continue
        yield WeightFault(
            engine="vllm",
            effect=Effect.MISREAD,
            why=f"{module} is not FP8, but the config quantizes it: vLLM casts it without a scale",
            source="vLLM 0.32.0 model_executor/parameter.py, tried",
            fix="exclude it in the config, or quantize it",
        )
        return


def _list_modules(geometry: ModelGeometry) -> Iterator[str]:
    """List the linears of the decoder layers, by their paths in the checkpoint."""
    for _, linear in geometry.linears():
        yield (linear.checkpoint_name or "").removesuffix(_SUFFIX)


def _list_texts(config: object) -> Iterator[str]:
    """List the texts in a config's lists, at any depth."""
    if isinstance(config, list):
        yield from (item for item in config if isinstance(item, str))
    for value in config.values() if isinstance(config, Mapping) else ():
        yield from _list_texts(value)


def _make_linear(module: str, entry: TensorEntry, scheme: StoredScheme) -> QuantizedLinear:
    rows, columns = entry.shape
    return QuantizedLinear(
        module=shorten(module),
        shape=(rows, columns),
        scheme=find_nearest(scheme.weights, scheme.inputs).name,
        block=scheme.block if scheme.weights is Granularity.BLOCK else None,
    )
