"""Match the weights of a checkpoint with the inputs that calibration observes in the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fp8calib.model.geometry import Layer, Linear
from fp8calib.model.module_paths import split_expert
from fp8calib.model.prepared import PreparedModel, tied_names
from fp8calib.plugins.gptq.hessians import expert_key
from fp8calib.quantization.matrices import Matrix

_OUTSIDE = "no linear of the decoder layers reads it"
_SHARED = "several layers share it"
_OTHER_INPUTS = "its columns are not the inputs of one linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedInput:
    """The input that a weight multiplies."""

    key: str
    """The path of the linear, or an `expert_key`."""
    runner: str
    """The path of the module that hooks observe."""
    layer: int


def map_inputs(
    prepared: PreparedModel, matrices: Collection[Matrix]
) -> tuple[Mapping[str, MappedInput], Mapping[str, str]]:
    """Find the input of every matrix by the tensors that the model's parameters are made from.

    Both by the module of the matrix: its input, or the reason why none is known.
    """
    readers = _list_readers(prepared)
    inputs: dict[str, MappedInput] = {}
    unreached: dict[str, str] = {}
    for matrix in matrices:
        found = _find_input(matrix, readers.get(matrix.source, ()))
        if isinstance(found, str):
            unreached[matrix.module] = found
        else:
            inputs[matrix.module] = found
    return inputs, unreached


def _list_readers(prepared: PreparedModel) -> Mapping[str, list[tuple[Layer, Linear]]]:
    """List, by tensor of the checkpoint, the linears whose weights are made from it."""
    tied = tied_names(prepared.model)
    readers: dict[str, list[tuple[Layer, Linear]]] = defaultdict(list)
    for layer, linear in prepared.geometry.linears():
        names = (linear.weight_name, *tied.get(linear.weight_name, ()))
        for tensor in prepared.weights.tensor_names(names):
            readers[tensor].append((layer, linear))
    return readers


def _find_input(matrix: Matrix, readers: Collection[tuple[Layer, Linear]]) -> MappedInput | str:
    """Find the input of a matrix, or the reason why there is none."""
    if not readers:
        return _OUTSIDE
    layers = {layer.index for layer, _ in readers}
    if len(layers) > 1:
        return _SHARED
    (index,) = layers
    fitting = [linear for _, linear in readers if linear.in_features == matrix.shape[1]]
    runners = {(linear.runner, _is_down(linear)) for linear in fitting}
    if len(runners) != 1:
        return _OTHER_INPUTS
    linear = fitting[0]
    if not linear.num_experts:
        return MappedInput(key=linear.module, runner=linear.runner, layer=index)
    expert = None
    if matrix.stack:
        expert = matrix.expert
    elif found := split_expert(matrix.module):
        expert = found[1]
    if expert is None or expert >= linear.num_experts:
        return _OTHER_INPUTS
    key = expert_key(linear.runner, expert, is_down=_is_down(linear))
    return MappedInput(key=key, runner=linear.runner, layer=index)


def _is_down(linear: Linear) -> bool:
    return bool(linear.num_experts) and linear.module.endswith(".down_proj")
