"""Map a model's parameters to the tensors of its checkpoint, and read them.

While loading, transformers renames and merges tensors (experts become one 3-D parameter). This
module uses the conversion tables of transformers, so it can read every model that transformers
can load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.errors import ModelError, cut_list, first_line
from fp8calib.model.geometry import Linear
from fp8calib.model.layouts import gate_up_parts
from fp8calib.model.module_paths import list_paths
from fp8calib.model.topology import is_transposed

_MIXTRAL_NAMES = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
_EXPERT = r"\.experts\.\d*."
_STACK_AXES = 3

_Part = tuple[str, str | None]
"""A tensor, and the pattern of the converter that joins it to others; None if none does."""


class WeightSource:
    """Reads the parameters of a model from its checkpoint, in the checkpoint's dtype.

    Attributes:
        model: the model, with or without weights.
        source: the checkpoint that tensors are read from.
        single_tensors: parameter -> name of its tensor, for each that is one whole tensor.
        parameters: parameter or buffer -> all parameters that are made from the same tensors.
        parts: name in the model -> the tensors that are loaded into it, each with the pattern of
            the converter that joins it to others, or None.
        unmatched: name that the model has no parameter for -> the tensors that would be loaded
            into it.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self.model = model
        self.source = checkpoint
        self._loaded: Mapping[str, torch.Tensor] = {}
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(model)
        conversions = [*conversions, *_list_expert_converters(model)]
        self._converters = {
            pattern: entry
            for entry in conversions
            if isinstance(entry, WeightConverter)
            for pattern in entry.source_patterns
        }
        self.parts = _map_names(model, checkpoint, conversions)
        # not the changes of a prefix that the checkpoint does not have
        self._renamings = [
            entry.reverse_transform()
            for entry in reversed(conversions)
            if isinstance(entry, WeightRenaming)
            and (entry.was_used() or not isinstance(entry, PrefixChange))
        ]
        self.single_tensors: Mapping[str, str] = {
            parameter: parts[0][0]
            for parameter, parts in self.parts.items()
            if len(parts) == 1 and parts[0][1] is None
        }
        known = model.state_dict().keys()
        self.parameters: dict[str, tuple[str, ...]] = {}
        self.unmatched: dict[str, tuple[str, ...]] = {}
        for name, parts in self.parts.items():
            pattern = parts[0][1]
            if name not in known:
                self.unmatched[name] = tuple(tensor for tensor, _ in parts)
            elif pattern is None:
                self.parameters[name] = (name,)
            else:
                first, *others = self._converters[pattern].target_patterns
                self.parameters[name] = (name, *(name.replace(first, other) for other in others))

    @property
    def unused(self) -> list[str]:
        """The shortest paths in the checkpoint that contain matrices, but none of the model.

        Vectors are ignored: old checkpoints hold buffers that models now compute.
        """
        unused = {name for names in self.unmatched.values() for name in names}
        inside = {path for name in self.tensor_names(self.parameters) for path in list_paths(name)}
        outside = {
            next(path for path in list_paths(name) if path not in inside)
            for name in unused
            if len(self.source.tensors[name].shape) > 1 and not name.endswith("bias")
        }
        return sorted(outside, key=dot_natural_key)

    def spell(self, parameter: str) -> str:
        """Give the name that a checkpoint with these names would store a parameter under."""
        return str(rename_source_key(parameter, self._renamings, [], reverse=True)[0])

    def find_renamed(self) -> list[str]:
        """Find the tensors whose names differ from those that `save_pretrained` writes.

        If a tensor fills only a part of a parameter, such as one expert, only the path is compared.
        """
        renamings = [each for each in self._renamings if not isinstance(each, PrefixChange)]
        found = []
        for parameter in self.parameters:
            own = str(rename_source_key(parameter, renamings, [], reverse=True)[0])
            path = own.rpartition(".")[0].rpartition(".")[0]
            found += [
                name
                for name, pattern in self.parts[parameter]
                if not (name == own if pattern is None else name.startswith(f"{path}."))
            ]
        return found

    def tensor_names(self, parameters: Collection[str]) -> frozenset[str]:
        """List the tensors of the checkpoint that `parameters` are made from."""
        parts = (part for parameter in parameters for part in self.parts.get(parameter, ()))
        return frozenset(name for name, _ in parts)

    def reading_from(self, source: Any) -> WeightSource:
        """Copy this object to read from `source`, which has the tensor names of the checkpoint.

        It has `folder`, `tensors`, `read` and `read_rows`, as a checkpoint.
        """
        other = copy(self)
        other.source = source
        return other

    def reading_loaded(self) -> WeightSource:
        """Copy this object to read what a GPU holds of the model as it is stored from there."""
        loaded = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            stored = {self.source.tensors[each].dtype for each in self.tensor_names([name])}
            is_held = parameter.device.type == "cuda" and not isinstance(parameter, DTensor)
            if is_held and {TORCH_DTYPES[dtype] for dtype in stored} == {parameter.dtype}:
                loaded[name] = parameter.detach()
        other = copy(self)
        other._loaded = loaded
        return other

    def read_all(self, parameter: str) -> Mapping[str, torch.Tensor]:
        """Read a parameter and all others made from the same tensors (see `parameters`)."""
        parts = self._find(parameter)
        if (name := self.single_tensors.get(parameter)) is not None:
            return {parameter: self.source.read(name)}
        return self._convert(parameter, parts)

    def read(self, parameter: str) -> torch.Tensor:
        """Read one parameter in the layout of the model and the dtype of the checkpoint."""
        if parameter in self._loaded:
            return self._loaded[parameter]
        return self.read_all(parameter)[parameter]

    def read_rows(self, parameter: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of a parameter that is one whole tensor of the checkpoint."""
        return self.source.read_rows(self._find(parameter)[0][0], start, stop)

    def read_experts(self, parameter: str) -> Iterator[torch.Tensor]:
        """Read a 3-D parameter of experts, one expert at a time: [rows, columns]."""
        parts = self._find(parameter)
        if parameter in self._loaded:
            yield from self._loaded[parameter]
        elif (name := self.single_tensors.get(parameter)) is not None:
            for expert in range(self.source.tensors[name].shape[0]):
                yield self.source.read_rows(name, expert, expert + 1)[0]
        elif all(pattern is not None and "*" in pattern for _, pattern in parts):
            by_pattern = group_parts(parts)
            for names in zip(*by_pattern.values(), strict=True):
                one_expert = list(zip(names, by_pattern, strict=True))
                yield self._convert(parameter, one_expert)[parameter][0]
        else:
            yield from self._convert(parameter, parts)[parameter]

    def _find(self, parameter: str) -> list[_Part]:
        if parameter not in self.parts:
            raise ModelError(
                f"{self.source.folder}: the checkpoint holds no tensor for {parameter}"
            )
        return self.parts[parameter]

    def _convert(self, parameter: str, parts: list[_Part]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self._converters[str(parts[0][1])])
        for name, pattern in parts:
            converter.add_tensor(parameter, name, pattern, self.source.read(name))
        try:
            converted = converter.convert(parameter, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise ModelError(
                f"{parameter}: transformers {transformers.__version__} does not make it of "
                f"{cut_list([name for name, _ in parts], 3)} ({first_line(error)})",
                hint="a tensor that it joins may be missing, or another version may save it so",
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def group_parts(parts: Iterable[_Part]) -> Mapping[str | None, list[str]]:
    """Group tensors by the pattern of the conversion that takes them."""
    by_pattern: dict[str | None, list[str]] = defaultdict(list)
    for name, pattern in parts:
        by_pattern[pattern].append(name)
    return by_pattern


def _map_names(
    model: PreTrainedModel, checkpoint: Checkpoint, conversions: list[Any]
) -> dict[str, list[_Part]]:
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    parts: dict[str, list[_Part]] = defaultdict(list)
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        # Also by Mixtral's names of an expert's projections, for checkpoints of llm-compressor:
        # vLLM loads both (vLLM 0.32.0 `models/mixtral.py:hf_to_vllm_mapper`).
        head, experts, tail = name.partition(".experts.")
        for other, own in _MIXTRAL_NAMES.items():
            tail = tail.replace(other, own)
        for alias in (name, head + experts + tail):
            target, pattern = rename_source_key(
                alias, renamings, converters, model.base_model_prefix, known
            )
            if target in known:
                break
        if target not in known and name in known:
            target, pattern = name, None
        parts[target].append((name, pattern))
    return dict(parts)


def _list_expert_converters(model: PreTrainedModel) -> Iterator[WeightConverter]:
    """List the converters that stack experts, one tensor each, into 3-D parameters, if any."""
    for name, experts in model.named_modules():
        weight = getattr(experts, "gate_up_proj", None)
        if (
            name.rpartition(".")[2] == "experts"
            and isinstance(weight, nn.Parameter)
            and weight.dim() == _STACK_AXES
            and getattr(experts, "is_concatenated", True)
            and not getattr(experts, "has_bias", False)
        ):
            break
    else:
        return
    # most models have no experts
    from fp8calib.model.expert_layouts import EXPERT_LAYOUTS, IN_OUT  # noqa: PLC0415

    layout = EXPERT_LAYOUTS.get(model.config.get_text_config().model_type)
    is_known = layout is not None and layout[1] == IN_OUT
    is_transposed = getattr(experts, "is_transposed", is_known)  # Llama 4's lack the attribute
    transpose: list[ConversionOps] = [Transpose(1, 2)] if is_transposed else []
    yield WeightConverter(
        source_patterns=[f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"],
        target_patterns=".experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1), *transpose],
    )
    yield WeightConverter(
        source_patterns=f"{_EXPERT}down_proj.weight",
        target_patterns=".experts.down_proj",
        operations=[MergeModulelist(dim=0), *transpose],
    )


# --- linears -------------------------------------------------------------------------------------


LinearWeight = tuple[Linear, int | None, torch.Tensor]
"""A linear, the expert of it or None, and its weight: [out, in], in the checkpoint's dtype."""


def read_linears(linears: Sequence[Linear], source: WeightSource) -> Iterator[LinearWeight]:
    """Read the weights of linears, each parameter once, and stacked experts one by one."""
    modules: dict[str, Any] = dict(source.model.named_modules())
    stacks: dict[str, list[Linear]] = defaultdict(list)
    for linear in linears:
        stacks[linear.weight_name].append(linear)
    for name, stacked in stacks.items():
        module, first = modules[stacked[0].runner], stacked[0]
        if not first.num_experts:
            values = source.read(name)
            yield first, None, values.T if is_transposed(module) else values
            continue
        parts: dict[str, torch.Tensor] = {}
        """The rows of gate and of up."""
        if name.endswith("gate_up_proj"):
            is_interleaved = not getattr(module, "is_concatenated", True)
            fused = gate_up_parts(2 * first.out_features, interleaved=is_interleaved)
            parts = {part.name: torch.tensor(part.rows(range(part.count))) for part in fused}
        for expert, stored in enumerate(source.read_experts(name)):
            weight = stored.T if module.is_transposed else stored
            for linear in stacked:
                part = parts.get(linear.module.rpartition(".")[2])
                rows = None if part is None else part.to(weight.device, non_blocking=True)
                yield linear, expert, weight if rows is None else weight[rows]
