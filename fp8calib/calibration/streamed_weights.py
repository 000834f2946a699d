"""The weights of a model part by part: read ahead from the shards, placed, and dropped again.

A part is a decoder layer, or what is outside the layers. Parameters get the dtype and the layout
in which transformers itself loads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import build_glob_alternation

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.machine import return_freed_memory
from fp8calib.model.prepared import PreparedModel, is_run, mismatch_error, missing_error, tied_names
from fp8calib.model.topology import find_text_decoder
from fp8calib.model.weight_source import WeightSource

_ROWS_AT_ONCE = 1024

ReadRows = Callable[[int, int], torch.Tensor]
"""Reads the rows from a first one up to a last one, which is excluded."""


class HeldTensors(Checkpoint):
    """A checkpoint with some tensors in memory; all other tensors are read on request.

    With a dtype, tensors are cast: transformers casts them before it joins them.
    """

    def __init__(
        self, checkpoint: Checkpoint, held: dict[str, torch.Tensor], dtype: torch.dtype | None
    ) -> None:
        super().__init__(checkpoint.folder)
        self.tensors, self.held = checkpoint.tensors, held
        self._checkpoint = checkpoint
        self._dtype = dtype

    def read(self, name: str) -> torch.Tensor:
        """Give a whole tensor; one in memory is not copied."""
        held = self.held.get(name)
        return (self._checkpoint.read(name) if held is None else held).to(self._dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Give rows of the leading dimension; rows of a tensor in memory are not copied."""
        if (held := self.held.get(name)) is not None:
            return held[start:stop].to(self._dtype)
        return self._checkpoint.read_rows(name, start, stop).to(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Parameters that are loaded together, and their bytes."""

    wanted: Mapping[str, str]
    """Name in the model -> the parameter it is loaded from: itself, or the one it is tied to."""
    tensors: tuple[str, ...]
    """The tensors of the checkpoint that it needs, in the order of the files."""
    stored: int
    """Bytes in the shards."""
    placed: int
    """Bytes in the model."""
    step: int
    """Temporary bytes of making one parameter (casting, joining of experts)."""


class PartLoader:
    """Loads parts of a model that was built without weights, and drops them again."""

    def __init__(self, prepared: PreparedModel, *, device: str) -> None:
        self.weights = prepared.weights
        self.checkpoint = prepared.checkpoint
        self.device = device
        self._geometry = prepared.geometry
        self._model = prepared.model
        self._known = self._model.state_dict(keep_vars=True)
        groups = self.weights.parameters.items()
        self._maker = {made: key for key, group in groups for made in group}
        self._tied = tied_names(self._model)
        # the dtypes of parameters that transformers loads in another one than the model's
        self._dtypes: dict[str, torch.dtype] = self._model._get_dtype_plan(self._model.dtype)
        self._globs: Any = build_glob_alternation(list(self._dtypes)) if self._dtypes else None

    # --- parts ------------------------------------------------------------------------------------

    def part(self, is_wanted: Callable[[str], bool]) -> ModelPart:
        """Collect the parameters and stored buffers whose names are wanted."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        wanted, missing = dict[str, str](), list[str]()
        for name in filter(is_wanted, self._known):
            tied = (name, *self._tied.get(name, ()))
            parameter = next((each for each in tied if self.is_stored(each)), None)
            if parameter is not None and (name not in buffers or self.is_stored(name)):
                wanted[name] = parameter
            elif name not in buffers:
                missing.append(name)
        if missing:
            raise missing_error(self.checkpoint.folder, sorted(missing))
        made_from = self.weights.tensor_names({self._maker[each] for each in wanted.values()})
        tensors = tuple(name for name in self.checkpoint.tensors if name in made_from)
        placed, steps = 0, defaultdict[str, int](int)
        for name, parameter in wanted.items():
            key, dtype = self._maker[parameter], self._target(name)
            size_bytes = self._known[name].numel() * dtype.itemsize
            placed += size_bytes
            # joining makes two copies (stacks, and gate beside up), casting one
            stored = self.weights.tensor_names([key])
            is_cast = any(self.checkpoint.dtype(each) != dtype for each in stored)
            steps[key] += size_bytes * (2 if len(stored) > 1 else int(is_cast))
        return ModelPart(
            wanted=wanted,
            tensors=tensors,
            stored=sum(self.checkpoint.tensors[name].size_bytes for name in tensors),
            placed=placed,
            step=max(steps.values(), default=0),
        )

    def layers(self) -> list[ModelPart]:
        """Gather the parameters of each decoder layer."""
        paths = [f"{layer.module}." for layer in self._geometry.layers]
        return [self.part(lambda name, path=path: name.startswith(path)) for path in paths]  # type: ignore[misc]

    def around_layers(self) -> ModelPart:
        """Gather the text decoder's parameters outside its layers.

        Embeddings that are read by row are left out.
        """
        path, _ = find_text_decoder(self._model)
        inside = tuple(f"{layer.module}." for layer in self._geometry.layers)
        embeddings = {f"{name}.weight" for name in embeddings_by_row(self.weights)}
        return self.part(
            lambda name: (
                name.startswith(f"{path}." if path else "")
                and not name.startswith(inside)
                and name not in embeddings
            )
        )

    def towers(self) -> ModelPart:
        """Gather the parameters outside the text decoder, but those of the lm_head."""
        runs = is_run(self._model)
        return self.part(lambda name: not runs(name))

    def is_stored(self, name: str) -> bool:
        """Whether the checkpoint holds this parameter or buffer."""
        return name in self._maker

    # --- weights ----------------------------------------------------------------------------------

    def read(self, part: ModelPart) -> HeldTensors:
        """Read the tensors of a part as stored."""
        held = {name: self.checkpoint.read(name) for name in part.tensors}
        return HeldTensors(self.checkpoint, held, dtype=None)

    def make(
        self, part: ModelPart, tensors: HeldTensors, *, keep: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Make the parameters of a part, on the CPU, in their dtype and layout, by name.

        Without `keep` the tensors that one is made from are dropped before it is yielded.
        """
        held, by_key = tensors.held, defaultdict[str, list[str]](list)
        for name, parameter in part.wanted.items():
            by_key[self._maker[parameter]].append(name)
        for key, names in by_key.items():
            cast = HeldTensors(self.checkpoint, held, self._target(names[0]))
            made = self.weights.reading_from(cast).read_all(key)
            rooms = {tensor.untyped_storage().data_ptr() for tensor in made.values()}
            for name in self.weights.tensor_names([key]) & held.keys():
                if not keep:
                    del held[name]
                elif self.device == "cpu" and held[name].untyped_storage().data_ptr() in rooms:
                    held[name] = held[name].clone()  # the model's may be changed in place
            for name in names:
                tensor, expected = made[part.wanted[name]], self._known[name].shape
                if tensor.shape != expected:
                    folder = self.checkpoint.folder
                    raise mismatch_error(folder, name, tensor.shape, expected)
                yield name, tensor.to(self._target(name))

    @contextmanager
    def placed(
        self, part: ModelPart, made: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> Iterator[None]:
        """Hold a part in the model while the context is open, and return its memory then.

        It is read unless `made` has it.
        """
        try:
            for name, tensor in made or self.make(part, self.read(part), keep=False):
                set_tensor(self._model, name, tensor.to(self.device))
            yield
        finally:
            for name in part.wanted:
                set_tensor(self._model, name, self._known[name])
            return_freed_memory()

    def _target(self, name: str) -> torch.dtype:
        """Give the dtype that transformers loads a parameter in."""
        if self._globs is not None:
            alternation, glob_of, _ = self._globs
            if (match := alternation.search(name)) is not None:
                return self._dtypes[glob_of[str(match.lastgroup)]]
        found: torch.dtype = self._known[name].dtype
        return found


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


# --- embeddings: only the rows that the text uses are read ----------------------------------------


def embeddings_by_row(weights: WeightSource) -> dict[str, nn.Embedding]:
    """Find the token embeddings whose rows can be read one by one, by their path.

    They have the class of the input embedding and are at least as large: smaller ones may not get
    tokens.
    """
    path, decoder = find_text_decoder(weights.model)
    inputs: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    return {
        name: module
        for name, module in decoder.named_modules(prefix=path)
        if type(module) is type(inputs)
        and isinstance(module, nn.Embedding)
        and module.num_embeddings >= inputs.num_embeddings
        and f"{name}.weight" in weights.single_tensors
    }


class EmbeddingRows:
    """The rows of an embedding that the text uses, in place of the whole."""

    def __init__(
        self, embedding: Any, read_rows: ReadRows, *, dtype: torch.dtype, device: str
    ) -> None:
        self._embedding = embedding
        self._read_rows = read_rows
        self._rows = torch.zeros(0, embedding.embedding_dim, dtype=dtype)
        self._device = device
        self._ids = torch.zeros(0, dtype=torch.int64)
        """The token of each row in memory."""
        self._row_of = torch.full((embedding.num_embeddings,), -1)

    def read_others(self, read_rows: ReadRows) -> torch.Tensor:
        """Read the same rows of another embedding, for `replaced`."""
        return self._gather(self._ids, read_rows).to(self._device)

    @contextmanager
    def replaced(self, rows: torch.Tensor) -> Iterator[None]:
        """Put other rows (`read_others`) into the embedding while the context is open."""
        self._embedding.weight = nn.Parameter(rows, requires_grad=False)
        try:
            yield
        finally:
            self._embedding.weight = nn.Parameter(self._rows, requires_grad=False)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert token ids to row numbers in memory; rows not in memory are read first."""
        version, on_host = vars(ids).get("on_host", (None, ids))
        if version is None or version != ids._version:  # the model made or changed them
            on_host = ids.cpu()
        self.read(on_host)
        return self._row_of[on_host].to(ids.device, non_blocking=True)

    def read(self, ids: torch.Tensor) -> None:
        """Read the rows of these tokens that are not in memory."""
        new = torch.unique(ids[self._row_of[ids] < 0])
        if not len(new):
            return
        self._row_of[new] = torch.arange(len(new)) + len(self._ids)
        rows = self._gather(new, self._read_rows)
        if len(self._ids):  # else no second copy is made
            rows = torch.cat([self._rows.cpu(), rows])
        self._ids = torch.cat([self._ids, new])
        self._rows = rows.to(self._device)
        self._embedding.weight = nn.Parameter(self._rows, requires_grad=False)

    def _gather(self, ids: torch.Tensor, read_rows: ReadRows) -> torch.Tensor:
        """Read rows in the order of `ids`, consecutive ones together up to a limit: [ids, C]."""
        rows = self._rows.new_empty(len(ids), self._rows.shape[1], device="cpu")
        starts = (ids[1:] != ids[:-1] + 1).nonzero().flatten() + 1
        at = 0
        for consecutive in torch.tensor_split(ids, starts):
            for run in filter(len, torch.split(consecutive, _ROWS_AT_ONCE)):
                rows[at : at + len(run)] = read_rows(int(run[0]), int(run[-1]) + 1)
                at += len(run)
        return rows
