"""FP8 weights whose scales are missing, or have another shape than the config says.

Engines allocate scales by the config and fill them from the checkpoint. They do not check that all
of them were filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.dialects.fp8.weights import (
    Companions,
    is_companion,
    list_scale_shapes,
    name_companions,
)
from fp8calib.engines.engine import Effect
from fp8calib.engines.weights.faults import WeightFault, fault_per_engine
from fp8calib.errors import shorten
from fp8calib.fp8.schemes import Granularity, InputScaling

_ALLOCATION_SOURCES = {
    "vllm": "vLLM 0.32.0 quantization/utils/fp8_utils.py (create_fp8_scale_parameter)",
    "sglang": "SGLang 0.5.23 srt/layers/quantization/fp8.py, compressed_tensors/schemes",
    "transformers": "transformers 5.23, which reports it MISSING",
}
_LOADING_SOURCES = {
    "vllm": "vLLM 0.32.0 model_executor/parameter.py, tried",
    "sglang": "SGLang 0.5.23 srt/layers/parameter.py",
}
_MISSING_FIX = "complete the download or the export: the weight is useless without its scale"
_SHAPE_FIX = "use the config that the weights were quantized with"


def list_scale_faults(
    schemes: Mapping[str, StoredScheme], tensors: Mapping[str, TensorEntry]
) -> Iterator[WeightFault]:
    """List the first missing scale, and the first with another shape than the config says.

    Args:
        schemes: what the config says, by the path of each linear with an FP8 weight.
        tensors: all of the checkpoint's, by name.
    """
    names = {module: name_companions(f"{module}.weight") for module in schemes}
    strange = _list_strange(tensors)
    missing = (
        _explain_missing(names[each], schemes[each], tensors)
        for each in schemes
        if each not in strange
    )
    if why := next(filter(None, missing), ""):
        misread = f"{why}: the engine uses uninitialised memory"
        yield from fault_per_engine(_ALLOCATION_SOURCES, Effect.MISREAD, misread, _MISSING_FIX)
    misfits = (_explain_misfit(names[each], schemes[each], tensors) for each in schemes)
    if why := next(filter(None, misfits), ""):
        yield from fault_per_engine(
            _LOADING_SOURCES, Effect.REFUSED, f"{why} (AssertionError)", _SHAPE_FIX
        )


def _list_strange(tensors: Mapping[str, TensorEntry]) -> set[str]:
    """List the modules whose scale has a name that only their model uses, such as `scale`."""
    parts = (name.rpartition(".") for name in tensors)
    return {
        module
        for module, _, suffix in parts
        if "scale" in suffix and not is_companion(f"{module}.{suffix}")
    }


def _explain_missing(
    names: Companions, scheme: StoredScheme, tensors: Mapping[str, TensorEntry]
) -> str:
    wanted = [names.scales]
    if scheme.inputs is InputScaling.STATIC:
        wanted.append(names.input_scales)
    lacking = (spellings for spellings in wanted if not any(name in tensors for name in spellings))
    first = next(lacking, None)
    return f"there is no {shorten(first[0])} beside the FP8 weight" if first else ""


def _explain_misfit(
    names: Companions, scheme: StoredScheme, tensors: Mapping[str, TensorEntry]
) -> str:
    """Say that a scale has another granularity; a shape that fits none is not judged.

    One number where the config has a scale per row is valid for an expert: it is used for all rows.
    """
    found = [name for name in names.scales if name in tensors]
    if len(found) != 1:
        return ""
    shape = tensors[found[0]].shape
    shapes = list_scale_shapes(tensors[f"{names.module}.weight"].shape, scheme.block)
    fitting = [granularity for granularity, known in shapes.items() if shape in known]
    is_spread = ".experts." in names.module and Granularity.TENSOR in fitting
    if not fitting or scheme.weights in fitting or is_spread:
        return ""
    what = f"{shorten(found[0])} has shape {list(shape)}, which is per {fitting[0]}"
    return f"{what}, and the config says per {scheme.weights}"
