"""The recorder: running statistics of every site, kept beside the model, never on it.

Everything stays on the device of the tensors it came from; the host reads nothing back until
`check_finite` or `stats` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fp8calib.errors import CalibrationError
from fp8calib.fp8.amax import channel_amax, head_amax, tokens_first
from fp8calib.geometry.sites import Role, Site
from fp8calib.observe.accumulators import Observation, SiteAccumulator, freeze
from fp8calib.stats.calibration_stats import SiteStats
from fp8calib.stats.histogram import count_bins
from fp8calib.stats.positions import split_positions

HISTOGRAM_SEQUENCES = 8
"""Every how many sequences one enters the histograms; amax and counts always see all of them."""
INPUT_HISTOGRAM_TOKENS = 4
"""Every how many tokens of those one enters the histograms of inputs; of K and V all do."""
_REMEMBERED_INPUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Which tokens of a batch count.

    Rows are tokens in batch-major order, `shape` is (B, S), `first` the global index of its first
    sequence. `kept` lists the rows that are no padding, by range of positions; None when all are
    kept. The sampled rows enter histograms (none in most batches); they depend on the global
    sequence index and the position only.
    """

    shape: tuple[int, int]
    first: int
    num_tokens: int
    quarter: int
    kept: torch.Tensor | None
    spans: tuple[tuple[int, int], ...]
    """Where each range of positions lies: in `kept`, or without it in every sequence."""
    kv_sample: torch.Tensor
    input_sample: torch.Tensor

    @property
    def all_ranges(self) -> torch.Tensor:
        """The range of positions of every row, padding too: int64 [B * S]."""
        sizes = [stop - first for first, stop in split_positions(self.shape[1])]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).repeat(self.shape[0])

    @property
    def ranges(self) -> torch.Tensor:
        """The range of positions of every row that counts: int64 [N]."""
        return self.all_ranges if self.kept is None else self.all_ranges[self.kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """The input of one projection of all experts, reduced."""

    amax: torch.Tensor
    """Per channel, over all experts: fp32 [C]."""
    per_expert: torch.Tensor
    """Per expert and block of channels: fp32 [E, B]."""
    counts: torch.Tensor
    """Tokens per expert: int64 [E]."""
    positions: torch.Tensor
    """Of all experts and channels, per range of positions: fp32 [len(spans)]."""
    histogram: torch.Tensor | None
    """Of sampled rows, if there are any in the batch: int64 [NUM_BINS]."""


def view_batch(
    shape: tuple[int, int], lengths: tuple[int, ...], first: int, quarter: int
) -> BatchView:
    """Work out which rows of a right-padded batch count.

    Args:
        shape: (B, S) of the batch.
        lengths: tokens of each sequence.
        first: global index of the batch's first sequence.
        quarter: which quarter of the data the batch belongs to.
    """
    kept = None
    spans = split_positions(max(lengths))
    if any(length != shape[1] for length in lengths):
        parts = [_rows(shape, lengths, range(len(lengths)), *span) for span in spans]
        kept = torch.cat(parts)
        ends = list(accumulate(map(len, parts)))
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
    sampled = [i for i in range(len(lengths)) if (first + i) % HISTOGRAM_SEQUENCES == 0]
    return BatchView(
        shape=shape,
        first=first,
        num_tokens=sum(lengths),
        quarter=quarter,
        kept=kept,
        spans=tuple(spans),
        kv_sample=_rows(shape, lengths, sampled),
        input_sample=_rows(shape, lengths, sampled, every=INPUT_HISTOGRAM_TOKENS),
    )


def _rows(
    shape: tuple[int, int],
    lengths: tuple[int, ...],
    sequences: Sequence[int],
    first: int = 0,
    stop: int | None = None,
    *,
    every: int = 1,
) -> torch.Tensor:
    ends = [lengths[i] if stop is None else min(stop, lengths[i]) for i in sequences]
    parts = [
        torch.arange(first, max(end, first), every) + i * shape[1]
        for i, end in zip(sequences, ends, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenInput:
    """An input that was reduced a moment ago, and may come again at the next linear."""

    tensor: torch.Tensor
    version: int
    amax: torch.Tensor
    positions: torch.Tensor | None
    bins: torch.Tensor | None


class Recorder:
    """Collects statistics batch by batch; `begin_batch` first, then the observations.

    A batch counts when it is ended, whole: one that is broken off leaves no trace.
    """

    def __init__(self) -> None:
        self._running: dict[Site, SiteAccumulator] = {}
        self._pending: list[Observation] = []
        self._sequences: list[tuple[int, int]] = []
        self._is_settled = True
        self._quarter = 0
        self._batch: BatchView | None = None
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._remembered: list[_SeenInput] = []

    @property
    def batch(self) -> BatchView:
        """The batch being observed."""
        if self._batch is None:
            msg = "an observation outside of a batch"
            raise RuntimeError(msg)
        return self._batch

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch; what is observed from now on belongs to it."""
        if batch.quarter != self._quarter:
            self._close_quarter()
            self._quarter = batch.quarter
        self._let_go()
        self._batch = batch

    def end_batch(self) -> None:
        """Close the batch: what was observed counts from now on."""
        self._is_settled = False
        for seen in self._pending:
            self._site(seen.site).observe(seen)
        first = self.batch.first
        self._sequences.append((first, first + self.batch.shape[0]))
        self._is_settled = True
        self._let_go()

    def _let_go(self) -> None:
        self._batch = None
        self._pending.clear()
        self._on_device.clear()
        self._remembered.clear()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences that count: first and the one after the last of every batch, in order."""
        return tuple(self._sequences)

    @property
    def is_settled(self) -> bool:
        """Whether every batch counts whole or not at all: an interruption may come in between."""
        return self._is_settled

    def observe_heads(self, site: Site, x: torch.Tensor, *, num_heads: int) -> None:
        """Take K, V or q of one layer: [B, H, S, D], H a multiple of `num_heads`.

        Falcon repeats its KV heads before it caches them; a server does not, so the amax of the
        copies is folded into the head they come from.
        """
        batch = self.batch
        counted = x
        if batch.kept is not None:
            rows = tokens_first(x)[self.rows("kept", x.device)]
            counted = rows.view(len(rows), x.shape[1], x.shape[3]).transpose(0, 1).unsqueeze(0)
        spans: tuple[tuple[int, int | None], ...] = batch.spans
        if counted.shape[2] != spans[-1][1]:  # tokens of the model's own among them
            spans = ((0, None),)
        amax, positions = _join([head_amax(counted[:, :, first:stop]) for first, stop in spans])
        amax = amax.reshape(num_heads, -1).amax(1)
        bins = None
        if site.role is not Role.Q and len(batch.kv_sample):
            bins = count_bins(tokens_first(x)[self.rows("kv_sample", x.device)])
        self._pending.append(
            Observation(
                site=site,
                num_tokens=batch.num_tokens,
                amax=amax,
                positions=positions if spans is batch.spans else None,
                histogram=bins,
            )
        )

    def observe_input(self, site: Site, x: torch.Tensor) -> None:
        """Take the input of a linear: [..., C], the leading axes ending in (B, S) or flat."""
        seen = self._input(site, x)
        self._pending.append(
            Observation(
                site=site,
                num_tokens=self._num_rows(x),
                amax=seen.amax,
                positions=seen.positions,
                histogram=seen.bins,
            )
        )

    def observe_experts(self, site: Site, seen: ExpertRows) -> None:
        """Take what the experts of a layer were given, as one projection."""
        self._pending.append(
            Observation(
                site=site,
                num_tokens=self.batch.num_tokens,
                amax=seen.amax,
                positions=seen.positions,
                histogram=seen.histogram,
                experts=seen.per_expert,
                expert_counts=seen.counts,
            )
        )

    def rows(self, which: str, device: torch.device) -> torch.Tensor:
        """Give an index list of the batch on `device`, moved there once a batch."""
        key = (which, device)
        if key not in self._on_device:
            index: torch.Tensor = getattr(self.batch, which)
            self._on_device[key] = index.to(device, non_blocking=True)
        return self._on_device[key]

    @property
    def sampling_stride(self) -> int:
        """Every how many rows one is sampled where rows do not tell their sequence."""
        size = self.batch.shape[0] * self.batch.shape[1]
        return max(size // max(len(self.batch.input_sample), 1), 1)

    def check_finite(self) -> Site | None:
        """Name the first site, in execution order, that saw NaN or inf; waits for devices."""
        found = {site: each.quarter for site, each in self._running.items() if each.is_open}
        by_device: dict[torch.device, list[tuple[Site, torch.Tensor]]] = {}
        for site, amax in found.items():
            if amax is not None:
                by_device.setdefault(amax.device, []).append((site, amax))
        if all(_all_finite([amax for _, amax in pairs]) for pairs in by_device.values()):
            return None
        bad = (s for s, amax in found.items() if amax is not None and not _all_finite([amax]))
        return next(bad)

    def stats(self) -> dict[Site, SiteStats]:
        """Close the last quarter and give what was seen, on the CPU."""
        self._close_quarter()
        return {site: freeze(running) for site, running in self._running.items()}

    def forget(self) -> None:
        """Drop everything seen so far."""
        self._let_go()
        self._running.clear()
        self._sequences.clear()

    def counts(self) -> Mapping[Site, int]:
        """Tokens seen per site so far."""
        return {site: running.count for site, running in self._running.items()}

    def _site(self, site: Site) -> SiteAccumulator:
        running = self._running.get(site)
        if running is None:
            running = self._running[site] = SiteAccumulator()
        return running

    def _close_quarter(self) -> None:
        for running in self._running.values():
            running.close_quarter(self._quarter)

    def _input(self, site: Site, x: torch.Tensor) -> _SeenInput:
        """Reduce an input, once for all the linears that read the same tensor."""
        for seen in self._remembered:
            if seen.tensor is x and seen.version == x._version:
                return seen
        rows = self._counted_rows(site, x)
        if rows is None:
            flat = x.reshape(-1, x.shape[-1])
            amax = channel_amax(flat) if len(flat) else flat.new_zeros(flat.shape[1]).float()
            positions = None
        else:
            spans = self.batch.spans
            parts = [rows[:, first:stop].transpose(0, 1) for first, stop in spans]
            amax, positions = _join([channel_amax(part) for part in parts])
        bins = self._sampled_bins(x, rows) if len(self.batch.input_sample) else None
        reduced = _SeenInput(
            tensor=x, version=x._version, amax=amax, positions=positions, bins=bins
        )
        self._remembered.append(reduced)
        del self._remembered[:-_REMEMBERED_INPUTS]
        return reduced

    def _num_rows(self, x: torch.Tensor) -> int:
        num_rows = x.shape[:-1].numel()
        size = self.batch.shape[0] * self.batch.shape[1]
        return self.batch.num_tokens if num_rows % size == 0 and num_rows else num_rows

    def _counted_rows(self, site: Site, x: torch.Tensor) -> torch.Tensor | None:
        """Give the rows that count, [L, N, C], N as `spans` cuts it; None: they do not tell."""
        batch = self.batch
        size = batch.shape[0] * batch.shape[1]
        if x.shape[:-1].numel() == size or x.shape[-3:-1] == batch.shape:
            if batch.kept is None:
                return x.reshape(-1, batch.shape[1], x.shape[-1])
            return x.reshape(-1, size, x.shape[-1])[:, self.rows("kept", x.device)]
        if batch.kept is None:
            return None
        raise CalibrationError(
            f"{site}: its shape {tuple(x.shape)} does not tell which rows are padding of the batch "
            f"{batch.shape}",
            hint="use --batch-size 1, which needs no padding",
        )

    def _sampled_bins(self, x: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        size = self.batch.shape[0] * self.batch.shape[1]
        if x.shape[:-1].numel() != size:
            rows = (x if counted is None else counted).reshape(-1, x.shape[-1])
            return count_bins(rows[:: self.sampling_stride])
        return count_bins(x.reshape(size, -1)[self.rows("input_sample", x.device)])


def _join(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the maximum of the parts' maxima, and the largest value of each part."""
    if len(parts) == 1:
        return parts[0], parts[0].amax().unsqueeze(0)
    stacked = torch.stack(list(parts))
    return stacked.amax(0), stacked.flatten(1).amax(1)


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return bool(torch.cat([tensor.flatten() for tensor in tensors]).isfinite().all())
