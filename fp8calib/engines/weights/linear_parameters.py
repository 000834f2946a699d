"""The parameters that vLLM and SGLang create for a quantized linear, by scheme.

vLLM 0.32.0 `layers/quantization/` (create_weights of each method), `model_executor/parameter.py`,
`layers/linear.py` (weight_loader_v2) and `layers/fused_moe/routed_experts.py` (weight_loader), run
with tensors of every wrong shape. SGLang 0.5.23 adapted these files, read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.weights.linear_loader import GroupKind, LinearGroup, StoredLinear
from fp8calib.engines.weights.parameters import (
    INPUT_SCALE,
    WEIGHT,
    Fit,
    Parameter,
    Shape,
    Unfilled,
    fit_exactly,
    fit_number,
    fit_slice,
)
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.fp8.schemes import Granularity, InputScaling, count_blocks

_SCALE = "weight_scale"
_TOLERANCE = 1e-5
_ROW_EXPERTS = ("down_proj", "w2")


def list_linear_parameters(
    group: LinearGroup,
    linear: StoredLinear,
    scheme: StoredScheme,
    method: str,
    *,
    short: Fit = Fit.REFUSED,
) -> Mapping[str, Parameter]:
    """List the parameters of a linear that is no expert, by the last part of their names.

    Args:
        group: what the linear is joined with.
        linear: one of its members.
        scheme: by which it is created.
        method: the `quant_method`.
        short: what becomes of tensors that are shorter along the axis that ranks split.
    """
    is_whole = linear.shard == "replicated" and len(group.members) == 1
    axis = 1 if linear.shard == "row" else 0
    name, shape, scale_axis = _describe_scale(linear, scheme, method, axis)
    fit = fit_exactly(linear.shape) if is_whole else fit_slice(linear.shape, axis, short=short)
    created = {
        WEIGHT: Parameter(
            shape=linear.shape,
            fit=fit,
            unfilled=Unfilled.MEMORY,
        ),
        name: Parameter(
            shape=shape,
            fit=_fit_scale(shape, None if is_whole else scale_axis, short),
            unfilled=Unfilled.LOWEST,
        ),
    }
    if scheme.inputs is InputScaling.STATIC:
        created[INPUT_SCALE] = Parameter(
            shape=(1,), fit=fit_number, unfilled=Unfilled.LOWEST, is_shared=True
        )
    return created


def _describe_scale(
    linear: StoredLinear, scheme: StoredScheme, method: str, axis: int
) -> tuple[str, Shape, int | None]:
    """Give a weight scale's name and shape, and the axis along which a longer one is cut."""
    is_modelopt = method.startswith("modelopt")
    if scheme.weights is Granularity.TENSOR:
        return _SCALE, (1,), None
    if scheme.weights is Granularity.CHANNEL:
        rows = linear.shape[0]
        return _SCALE, (rows,) if is_modelopt else (rows, 1), None if axis else 0
    rows, columns = count_blocks(linear.shape, scheme.block)
    if is_modelopt:
        return _SCALE, (rows, 1, columns, 1), 2 * axis
    return f"{_SCALE}_inv" if method == "fp8" else _SCALE, (rows, columns), axis


def _fit_scale(shape: Shape, axis: int | None, short: Fit) -> Callable[[Shape], Fit]:
    if shape == (1,):
        return fit_number
    return fit_exactly(shape) if axis is None else fit_slice(shape, axis, short=short)


def list_expert_parameters(
    linear: StoredLinear, scheme: StoredScheme, method: str
) -> Mapping[str, Parameter]:
    """List what an expert fills of its layer's tensors, in which scales begin as ones."""
    name = _SCALE
    shape: Shape = (1,)
    if scheme.weights is Granularity.CHANNEL:
        shape = (linear.shape[0], 1)
    elif scheme.weights is Granularity.BLOCK:
        shape = count_blocks(linear.shape, scheme.block)
        name = f"{_SCALE}_inv" if method == "fp8" else _SCALE
    created = {
        WEIGHT: Parameter(
            shape=linear.shape,
            fit=_fit_expert(linear.shape, spreads=False),
            unfilled=Unfilled.MEMORY,
        ),
        name: Parameter(
            shape=shape,
            fit=_fit_element if shape == (1,) else _fit_expert(shape, spreads=True),
            unfilled=Unfilled.ONE,
        ),
    }
    if scheme.inputs is InputScaling.STATIC:
        created[INPUT_SCALE] = Parameter(
            shape=(1,), fit=_fit_element, unfilled=Unfilled.ONE, is_shared=True
        )
    return created


def slice_experts(
    created: Mapping[str, Parameter], linear: StoredLinear, *, narrows: bool
) -> Mapping[str, Parameter]:
    """Give an expert's parameters the fits of older releases, which cut tensors that are longer.

    Args:
        created: the parameters of newer ones, in which a smaller tensor fills a part.
        linear: the expert's projection.
        narrows: whether that is so here too; if not, loading fails (RuntimeError).
    """
    axis = 1 if linear.projection in _ROW_EXPERTS else 0

    def change(parameter: Parameter) -> Parameter:
        cut = fit_slice(parameter.shape, axis)

        def fit(shape: Shape) -> Fit:
            found = parameter.fit(shape)
            if found is Fit.WHOLE or parameter.shape == (1,):
                return found
            return found if found is Fit.PARTIAL and narrows else cut(shape)

        return replace(parameter, fit=fit)

    return {name: change(each) for name, each in created.items()}


def _fit_element(shape: Shape) -> Fit:
    """Fit a tensor into an expert's number: any tensor with one element."""
    return Fit.WHOLE if all(size == 1 for size in shape) else Fit.REFUSED


def _fit_expert(expected: Shape, *, spreads: bool) -> Callable[[Shape], Fit]:
    """Make the fit of an expert's part of a tensor, which a smaller tensor leaves unfilled.

    Engines narrow the part to the tensor, for models whose sizes they pad
    (`_narrow_expert_data_for_padding`).
    """

    def fit(shape: Shape) -> Fit:
        is_row = len(shape) == 1 and expected == (1, *shape)
        if shape == expected or is_row or (spreads and shape == ()):
            return Fit.WHOLE
        if shape == (1,):
            return Fit.PARTIAL
        is_smaller = len(shape) == len(expected) and all(
            size <= limit for size, limit in zip(shape, expected, strict=True)
        )
        return Fit.PARTIAL if is_smaller else Fit.REFUSED

    return fit


def judge_gate_and_up(
    group: LinearGroup, method: str, numbers: Mapping[str, float], *, source: str
) -> Outcome | None:
    """Judge whether gate and up of each expert have one input scale.

    compressed-tensors' experts have one number for both, and a second value is an error.

    Args:
        group: quantized.
        method: the `quant_method`.
        numbers: the scales that are one number, by name.
        source: where the engine compares them.
    """
    if method != "compressed-tensors" or group.kind is not GroupKind.EXPERTS:
        return None
    for linear in group.members:
        second = {"gate_proj": "up_proj", "w1": "w3"}.get(linear.projection)
        expert = linear.module.rpartition(".")[0]
        one = numbers.get(linear.name(INPUT_SCALE))
        other = numbers.get(f"{expert}.{second}.{INPUT_SCALE}")
        if one is not None and other is not None and one != 1 and abs(one - other) > _TOLERANCE:
            what = f"has other input scales for gate and up ({expert}): ValueError"
            return Outcome(effect=Effect.REFUSED, what=what, source=source)
    return None
