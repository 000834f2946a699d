"""The weights of a model part by part: read ahead from the shards, placed, and dropped again.

A part is a decoder layer, or what is outside the layers. Parameters get the dtype and the layout
in which transformers itself loads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.machine.allocator import return_freed_memory
from fp8calib.model.stored_parameters import mismatch_error, missing_error, tied_names
from fp8calib.model.weight_source import TensorSource, WeightSource


class HeldTensors:
    """A checkpoint with some tensors in memory; all other tensors are read on request."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        self.folder = checkpoint.folder
        self.tensors = checkpoint.tensors
        self._checkpoint = checkpoint
        self._held = {name: checkpoint.read(name) for name in names}

    def read(self, name: str) -> torch.Tensor:
        """Give a whole tensor; one in memory is not copied."""
        held = self._held.get(name)
        return self._checkpoint.read(name) if held is None else held

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Give rows of the leading dimension; rows of a tensor in memory are not copied."""
        held = self._held.get(name)
        return self._checkpoint.read_rows(name, start, stop) if held is None else held[start:stop]

    def copy_shared(self, tensor: torch.Tensor, names: Sequence[str]) -> None:
        """Copy those of `names` whose memory is shared with a tensor in use elsewhere."""
        room = tensor.untyped_storage().data_ptr()
        for name in names:
            held = self._held.get(name)
            if held is not None and held.untyped_storage().data_ptr() == room:
                self._held[name] = held.clone()

    def release(self, names: Sequence[str]) -> None:
        """Drop tensors that are no longer needed as stored."""
        for name in names:
            self._held.pop(name, None)


class _Casting:
    """A source whose tensors are cast before they are joined, as transformers does."""

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self.folder = source.folder
        self.tensors = source.tensors
        self._source = source
        self._dtype = dtype

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(name).to(self._dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._source.read_rows(name, start, stop).to(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Parameters that are loaded together."""

    wanted: Mapping[str, str]
    """Name in the model -> the parameter it is loaded from: itself, or the one it is tied to."""
    tensors: tuple[str, ...]
    """The tensors of the checkpoint that it needs, in the order of the files."""


class PartSize(NamedTuple):
    """Bytes of a part's weights."""

    stored: int
    """As stored in the shards."""
    placed: int
    """As placed in the model."""
    step: int
    """Temporary bytes of making one parameter (casting, joining of experts)."""


class PartLoader:
    """Loads parts of a model that was built without weights, and drops them again."""

    def __init__(
        self,
        weights: WeightSource,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.model = model = weights.model
        self.weights = weights
        self.device = device
        self.checkpoint = checkpoint
        self._known = model.state_dict(keep_vars=True)
        self._maker = {made: key for key, group in weights.parameters.items() for made in group}
        self._tied = tied_names(model)
        self._dtype_of = _dtypes_by_name(model, dtype)

    def is_stored(self, name: str) -> bool:
        """Whether the checkpoint holds this parameter or buffer."""
        return name in self._maker

    def part(self, is_wanted: Callable[[str], bool]) -> ModelPart:
        """Collect the parameters and stored buffers whose names are wanted.

        Raises:
            ModelError: the checkpoint lacks one, or has another shape for it.
        """
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        names = [
            name
            for name in self._known
            if is_wanted(name) and (name not in buffers or self.is_stored(name))
        ]
        wanted = {name: found for name in names if (found := self._find(name)) is not None}
        if missing := sorted(set(names) - set(wanted)):
            raise missing_error(self.checkpoint.folder, missing)
        keys = {self._maker[parameter] for parameter in wanted.values()}
        taken = self.weights.tensor_names(keys)
        single = self.weights.single_tensors
        for name, parameter in wanted.items():
            if parameter in single:
                self._require_shape(name, self.checkpoint.tensors[single[parameter]].shape)
        tensors = tuple(name for name in self.checkpoint.tensors if name in taken)
        return ModelPart(wanted=wanted, tensors=tensors)

    def measure(self, part: ModelPart) -> PartSize:
        """Compute the bytes of a part from the shapes of its tensors."""
        placed, steps = 0, dict[str, int]()
        for name, parameter in part.wanted.items():
            key = self._maker[parameter]
            size_bytes = self._known[name].numel() * self._target(name).itemsize
            placed += size_bytes
            steps[key] = steps.get(key, 0) + size_bytes * self._copies(name, key)
        stored = sum(self.checkpoint.tensors[name].size_bytes for name in part.tensors)
        return PartSize(stored=stored, placed=placed, step=max(steps.values(), default=0))

    def _copies(self, name: str, key: str) -> int:
        """Count the copies: joining makes two (stacks, and gate beside up), casting one."""
        names = self.weights.tensor_names([key])
        if len(names) > 1:
            return 2
        return int(any(self.checkpoint.dtype(stored) != self._target(name) for stored in names))

    def read(self, part: ModelPart) -> HeldTensors:
        """Read the tensors of a part as stored."""
        return HeldTensors(self.checkpoint, part.tensors)

    def place(self, part: ModelPart, held: HeldTensors, *, keep: bool = False) -> None:
        """Load a part into the model; held tensors are dropped once used, unless `keep` is set.

        Raises:
            ModelError: a joined weight does not have the shape the config states.
        """
        by_key: dict[str, list[str]] = {}
        for name, parameter in part.wanted.items():
            by_key.setdefault(self._maker[parameter], []).append(name)
        for key, names in by_key.items():
            source = self.weights.reading_from(_Casting(held, self._target(names[0])))
            made = source.read_all(key)
            stored = tuple(self.weights.tensor_names([key]))
            if not keep:
                held.release(stored)
            for name in names:
                tensor = made[part.wanted[name]].to(self._target(name))
                if self.device == "cpu":
                    held.copy_shared(tensor, stored)
                self._require_shape(name, tensor.shape)
                set_tensor(self.model, name, tensor.to(self.device))

    def drop(self, part: ModelPart) -> None:
        """Drop a part and return its memory to the system."""
        for name in part.wanted:
            set_tensor(self.model, name, self._known[name])
        return_freed_memory()

    def _require_shape(self, name: str, found: Sequence[int]) -> None:
        expected = self._known[name].shape
        if tuple(found) != tuple(expected):
            raise mismatch_error(self.checkpoint.folder, name, found, expected)

    def _target(self, name: str) -> torch.dtype:
        return self._dtype_of(name, self._known[name].dtype)

    def _find(self, name: str) -> str | None:
        return next((n for n in (name, *self._tied.get(name, ())) if n in self._maker), None)


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer of a model.

    Parameters require gradients, as in a whole model. Without, torch 2.13 multiplies with another
    kernel where the input is transposed (`should_fold`), which rounds differently.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    elif isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
    else:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())


def _dtypes_by_name(
    model: PreTrainedModel, dtype: torch.dtype
) -> Callable[[str, torch.dtype], torch.dtype]:
    """Give the dtype transformers loads a parameter in, from its name and its own dtype."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return lambda _name, own: own
    alternation, glob_of, _ = build_glob_alternation(list(plan))
    pattern: re.Pattern[str] = alternation

    def find(name: str, own: torch.dtype) -> torch.dtype:
        match = pattern.search(name)
        return own if match is None else plan[glob_of[str(match.lastgroup)]]

    return find
