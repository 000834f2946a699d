"""The names of scales that stop vLLM's weight loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.replay.load_context import LoadContext
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.vllm.model_types import TYPES_WITHOUT_KV_SCALES, LoaderKind
from fp8calib.engines.vllm.weight_loader import WeightLoader, is_companion, is_scale_name
from fp8calib.engines.weights.linears import PLAIN_DTYPES
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.quantization_config import ContradictionError
from fp8calib.formats.fp8.registry import load_finder
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.formats.kv.parse_names import is_of_draft_layer, parse_name
from fp8calib.model.module_paths import split_expert

NAMES_FIX = "name it as kv-overlay does: the attention module's path, then .k_scale or .v_scale"
_STRAY_FIX = "remove the tensor: no engine has a place for it"
_CONFIG_FIX = "add the quantization_config of kv-overlay to config.json"
_INNER_FIX = "name it .attn.attn.k_scale: vLLM's attention layer is inside .attn"
_PLACELESS_FIX = "serve the model without scales: --kv-cache-dtype fp8 then multiplies by 1.0"
_WEIGHTS = (".weight", ".weight_packed", ".qweight")


def refuse_faults(context: LoadContext, loader: WeightLoader) -> None:
    """Refuse a folder where the name of a scale stops the loader.

    Scales of quantized weights are judged elsewhere (`weights/linear_tensors.py`).

    Raises:
        Refusal: naming the scale.
    """
    tensors = context.tensors
    is_quantized = _make_test(context, tensors)
    for name in sorted(filter(is_scale_name, tensors)):
        module = name.rpartition(".")[0]
        if is_of_draft_layer(context.geometry, module):
            continue
        why = loader.find_fault(name)
        is_of_weight = is_companion(name) and parse_name(name) is None
        if why and not (is_of_weight and is_quantized(module)):
            raise _refuse(context, loader, name, why)


def _make_test(context: LoadContext, tensors: Mapping[str, TensorEntry]) -> Callable[[str], bool]:
    """Make a test of whether vLLM may have parameters for the scales of a module's weight."""
    has_codes = any(
        (name.endswith(_WEIGHTS) and entry.dtype not in PLAIN_DTYPES)
        or (entry.dtype in WEIGHT_FORMATS and not is_scale_name(name))
        for name, entry in tensors.items()
    )
    if has_codes:
        matrices = {name for name, entry in tensors.items() if len(entry.shape) > 1}
        stored = {name.rpartition(".")[0] for name in matrices}
        meant = {linear.checkpoint_name or "" for _, linear in context.geometry.linears()}
        linears = stored | {name.removesuffix(".weight") for name in meant}
        return lambda module: module in linears or split_expert(module) is not None
    try:
        _, find_scheme = load_finder(context.folder.path, context.folder.config)
    except ModelError:
        return lambda _: False

    def is_quantized(module: str) -> bool:
        if f"{module}.weight" not in tensors:
            return False
        try:
            find_scheme(module)
        except ContradictionError:
            return False
        except ModelError:
            return True
        return True

    return is_quantized


def _refuse(context: LoadContext, loader: WeightLoader, name: str, why: str) -> Refusal:
    model_type = context.geometry.model_type
    stored = context.scales.get(name)
    what = shorten(name) if stored is None else str(stored)
    if model_type in TYPES_WITHOUT_KV_SCALES and not is_companion(name):
        why = f"vLLM's attention of {model_type} has no parameters for scales (ValueError)"
        return Refusal(f"{what}: {why}", fix=_PLACELESS_FIX)
    if loader.method is None:
        return Refusal(f"{what}: {why}", fix=_CONFIG_FIX)
    if stored is None:
        return Refusal(f"{what}: {why}", fix=_STRAY_FIX)
    is_inner = loader.kind is LoaderKind.UNFORGIVING and name.rpartition(".")[0] in loader.attends
    return Refusal(f"{what}: {why}", fix=_INNER_FIX if is_inner else NAMES_FIX)
