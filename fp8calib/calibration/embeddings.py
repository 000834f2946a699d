"""The embeddings of a streamed model: only the rows that the text uses are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp8calib.model.topology import find_text_decoder
from fp8calib.model.weight_source import WeightSource

_ROWS_AT_ONCE = 1024

ReadRows = Callable[[int, int], torch.Tensor]
"""Reads the rows from a first one up to a last one, which is excluded."""


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


def copy_ids(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy token ids to a device, where `EmbeddingRows` needs not wait for them."""
    copied = ids.to(device, non_blocking=True)
    if copied is not ids and not copied.is_inference():
        vars(copied)["on_host"] = copied._version, ids
    return copied


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
