"""FP8 weights whose scales are missing, or of another shape than the config says.

Engines make room for scales by the config, fill it with what the checkpoint has, and look for
nothing that is left over.
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

_MAKERS = {
    "vllm": "vLLM 0.32.0 quantization/utils/fp8_utils.py (create_fp8_scale_parameter)",
    "sglang": "SGLang 0.5.23 srt/layers/quantization/fp8.py, compressed_tensors/schemes",
    "transformers": "transformers 5.23, which reports it MISSING",
}
_LOADERS = {
    "vllm": "vLLM 0.32.0 model_executor/parameter.py, tried",
    "sglang": "SGLang 0.5.23 srt/layers/parameter.py",
}
_MEND_MISSING = "complete the download or the export: the weight means nothing without it"
_MEND_SHAPE = "take the config that the weights were quantized with"


def list_scale_faults(
    schemes: Mapping[str, StoredScheme], tensors: Mapping[str, TensorEntry]
) -> Iterator[WeightFault]:
    """List the first scale that is missing, and the first that is of another shape.

    Args:
        schemes: what the config says, by path of the linear with an FP8 weight.
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
        held = f"{why}: it serves with what its memory held"
        yield from fault_per_engine(_MAKERS, Effect.MISREAD, held, _MEND_MISSING)
    misfits = (_explain_misfit(names[each], schemes[each], tensors) for each in schemes)
    if why := next(filter(None, misfits), ""):
        yield from fault_per_engine(
            _LOADERS, Effect.REFUSED, f"{why} (AssertionError)", _MEND_SHAPE
        )


def _list_strange(tensors: Mapping[str, TensorEntry]) -> set[str]:
    """List the modules with a scale in a spelling of a model's own, such as `scale`."""
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
    """Say that a scale is of another granularity; a shape that fits none is left to engines.

    One number for a weight with a scale per row is spread over an expert's rows, rightly.
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
