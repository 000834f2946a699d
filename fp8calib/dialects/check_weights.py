"""What engines do with the FP8 weights of a checkpoint folder, beside its KV scales."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.block_cuts import list_rank_faults
from fp8calib.dialects.check_files import ScaleFolder
from fp8calib.dialects.check_report import EngineReport, Refusal, Status, Verdict, report_refusal
from fp8calib.dialects.engine_rules import SGLANG, TGI, TRANSFORMERS, VLLM
from fp8calib.dialects.fp8_activations import ActivationKind, Scheme
from fp8calib.dialects.fp8_schemes import load_finder
from fp8calib.dialects.fp8_serving import list_weight_faults
from fp8calib.dialects.fp8_weights import WEIGHT_FORMATS, Granularity
from fp8calib.dialects.served_weights import (
    Effect,
    QuantizedLinear,
    QuantizedWeights,
    WeightFault,
)
from fp8calib.errors import VerificationError, shorten
from fp8calib.geometry import ModelGeometry

_NAMES = {"vllm": VLLM, "sglang": SGLANG, "tgi": TGI, "transformers": TRANSFORMERS}
_SUFFIX = ".weight"
_FLOATS = ("BF16", "F16", "F32")
_METHODS = {"fp8": "autofp8"}
_UNREAD = "what engines make of its FP8 weights is not checked"


class WeightCheck:
    """The faults of a folder's FP8 weights, found once for all engines."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> None:
        self._geometry = geometry
        self._problem = ""
        self._faults: list[WeightFault] = []
        try:
            weights = _describe(folder)
        except VerificationError as error:
            self._problem = f"{_UNREAD}: {error.message}"
            return
        if weights.linears:
            self._faults += list_weight_faults(weights)
            self._faults += list_rank_faults(weights, geometry, tp)

    def amend(self, engine: str, report: EngineReport) -> EngineReport:
        """Add what an engine makes of the weights to what it makes of the KV scales.

        Args:
            engine: its name on the command line.
            report: of the KV scales.
        """
        own = [fault for fault in self._faults if fault.engine == _NAMES[engine]]
        for fault in own:
            if fault.effect is Effect.REFUSED:
                return report_refusal(self._geometry, Refusal(fault.why, mend=fault.mend))
        misread = next((fault for fault in own if fault.effect is Effect.MISREAD), None)
        told = [fault.why for fault in own if fault.effect is Effect.CONDITION]
        told += [self._problem] if self._problem else []
        return report.model_copy(
            update={
                "weights": misread and _misread(misread),
                "problems": (*report.problems, *(f"weights: {why}" for why in told)),
            }
        )


def _misread(fault: WeightFault) -> Verdict:
    return Verdict(status=Status.MISREAD, why=fault.why, mend=fault.mend)


def _describe(folder: ScaleFolder) -> QuantizedWeights:
    """Tell what of a folder is quantized, and how; without FP8 weights there are no linears.

    Raises:
        VerificationError: its config does not say, or contradicts the weights.
    """
    matrices = {
        name.removesuffix(_SUFFIX): entry
        for held in folder.tensors.values()
        for name, entry in held.items()
        if name.endswith(_SUFFIX) and len(entry.shape) == 2
    }
    stored = {name: entry for name, entry in matrices.items() if entry.dtype in WEIGHT_FORMATS}
    form, linears = _find_linears(folder, stored) if stored else ("", ())
    return QuantizedWeights(
        form=form,
        config=folder.config,
        linears=linears,
        left=[name for name, entry in matrices.items() if entry.dtype in _FLOATS],
    )


def _find_linears(
    folder: ScaleFolder, stored: Mapping[str, TensorEntry]
) -> tuple[str, tuple[QuantizedLinear, ...]]:
    method, find_scheme = load_finder(folder.path, folder.config)
    linears = []
    for module, entry in stored.items():
        scheme = find_scheme(module)
        rows, columns = entry.shape
        linears.append(
            QuantizedLinear(
                module=shorten(module),
                shape=(rows, columns),
                scheme=_name_scheme(scheme),
                block=scheme.block if scheme.granularity is Granularity.BLOCK else None,
            )
        )
    return _METHODS.get(method, method), tuple(linears)


def _name_scheme(scheme: Scheme) -> str:
    if scheme.input is ActivationKind.NONE:
        return "w8a16"
    if scheme.granularity is Granularity.BLOCK:
        return "fp8-block"
    return "fp8-static" if scheme.input is ActivationKind.STATIC else "fp8-dynamic"
