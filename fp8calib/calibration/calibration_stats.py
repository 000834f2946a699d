"""The statistics of a calibration, and the file that stores them.

Every statistic is an exact reduction: a maximum or an integer sum. Whatever the order and grouping
in which parts of the data are observed and joined, the result is therefore the same, bit for bit:
it depends on no batch size, process, streaming or resuming.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import NonNegativeInt

from fp8calib.calibration.origin import METADATA_KEY, STATS_NAME, CalibrationOrigin
from fp8calib.calibration.stats_header import StatsHeader, StatsShard
from fp8calib.checkpoint.header import read_header
from fp8calib.errors import ModelError, UsageError, first_line
from fp8calib.model.geometry import KV_ROLES, Frozen, ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.positions import NUM_RANGES

if TYPE_CHECKING:  # `show` needs none of them
    import torch


COUNTS = frozenset({"expert_counts", "histogram"})
"""int64 counts, which are added; all others are fp32 magnitudes, whose maximum is kept."""
LENGTHS = {"positions": NUM_RANGES}
"""The number of elements, where a batch may give only the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStats:
    """The statistics of one site. Its fields are in the order of stats files."""

    count: int
    """The number of tokens that were observed; 0 for weights."""
    amax: torch.Tensor
    """Inputs: per input channel; k, v, q: per head; weights: per output channel: [C]."""
    amax_in: torch.Tensor | None = None
    """Weights: per input channel: [I]."""
    experts: torch.Tensor | None = None
    """Experts: per expert and block of channels on the axis that ranks split: [E, B]."""
    expert_counts: torch.Tensor | None = None
    """Experts: tokens routed to each: [E]."""
    progress: torch.Tensor | None = None
    """Tensor-wide amax inside each quarter of the data: [4]; in files of version 1."""
    positions: torch.Tensor | None = None
    """Tensor-wide amax of the tokens in each range of positions: [NUM_RANGES].

    0 in ranges that no sequence reached; None where the positions of rows are not known.
    """
    histogram: torch.Tensor | None = None
    """Counts of log2 magnitudes of the sampled tokens: [NUM_BINS]."""
    sequences: torch.Tensor | None = None
    """Tensor-wide amax of each sequence of the run: [num_sequences].

    0 in sequences that were not observed; None where the sequences of rows are not known.
    """

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the site has, by the name of their statistic."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


NAMES = tuple(field.name for field in fields(SiteStats) if field.name != "count")
"""The tensor of one is `<site>/<name>` in stats files."""


def join(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Join a statistic of two parts of the data: counts are added, of others the larger is kept."""
    return one + other if name in COUNTS else one.maximum(other)


def merge_sites(parts: Iterable[Mapping[Site, SiteStats]]) -> dict[Site, SiteStats]:
    """Join the statistics of each site over several parts of the data."""
    merged: dict[Site, SiteStats] = {}
    for part in parts:
        for site, new in part.items():
            if (old := merged.get(site)) is None:
                merged[site] = new
                continue
            tensors = old.tensors
            for name, x in new.tensors.items():
                tensors[name] = join(name, tensors[name], x) if name in tensors else x
            merged[site] = SiteStats(count=old.count + new.count, **tensors)
    return merged


SHARD_KEY = "fp8calib.part"
"""The metadata key of a shard; the file of a whole run does not have it."""
UNSCALED_QUERY_FLOOR = E4M3FN.max / 2**13
"""Below this amax a q quantized with scale 1.0 loses most of its values to subnormals."""
_ARRAY_DTYPES: Mapping[str, Any] = {"F32": np.float32, "I64": np.int64}
_HINT = "pass the stats.safetensors that calibrate wrote, or calibrate again"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStats:
    """The statistics of all sites of one run, or of one shard of it."""

    header: StatsHeader
    sites: Mapping[Site, SiteStats]
    shard: StatsShard | None = None
    """None for the whole run. The header is always that of the whole run."""

    @property
    def geometry(self) -> ModelGeometry:
        """The shape of the model that was observed."""
        return self.header.geometry

    @property
    def origin(self) -> CalibrationOrigin:
        """The model and the text, as scale files record them."""
        header = self.header
        return CalibrationOrigin(
            model=header.model_fingerprint,
            data=header.data_fingerprint,
            text_start=header.text_start,
            unquantized=header.unquantized,
            measured_quantized=header.measured_quantized,
        )

    @property
    def expert_counts(self) -> dict[str, list[int]]:
        """The number of tokens that reached each expert, by the module of the up projections."""
        return {
            site.module: found.expert_counts.tolist()
            for site, found in self.sites.items()
            if found.expert_counts is not None and site.module.endswith(".up_proj")
        }

    def list_unfit_queries(self) -> dict[int, float]:
        """List the layers whose q clips or becomes zero at scale 1.0, each with its amax."""
        found: dict[int, float] = {}
        for layer, attention in self.geometry.attentions():
            seen = self.sites.get(attention.site(Role.Q))
            if seen is None or not seen.count:
                continue
            amax = float(seen.amax.max()) / attention.query_divisor
            if amax > E4M3FN.max or 0 < amax < UNSCALED_QUERY_FLOOR:
                found[layer.index] = amax
        return found

    def without_kv(self) -> Self:
        """Leave out K and V, so that a checkpoint gets no scales of them."""
        kept = {site: seen for site, seen in self.sites.items() if site.role not in KV_ROLES}
        return replace(self, sites=kept)


class _Envelope(Frozen):
    """The metadata of a stats file."""

    header: StatsHeader
    counts: dict[str, NonNegativeInt]
    digest: str
    """sha256 over the header, the counts and every tensor, so that damage is detected."""
    aliases: dict[str, str]
    """Tensors that are not stored -> the equal tensor that is: q, k and v have the same input."""


def save_stats(stats: RunStats, path: Path) -> None:
    """Write one safetensors file; equal stats give equal bytes."""
    from fp8calib.checkpoint.tensor_file import save_tensors  # noqa: PLC0415 -- imports torch

    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    sites = {site: stats.sites[site] for site in sorted(stats.sites)}
    named = {f"{site}/{name}": x for site in sites for name, x in sites[site].tensors.items()}
    for key, stored in named.items():
        tensor = stored.contiguous()
        identity = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
        if (first := seen.setdefault(identity, key)) == key:
            tensors[key] = tensor
        else:
            aliases[key] = first
    counts = {str(site): found.count for site, found in sites.items()}
    envelope = _Envelope(header=stats.header, counts=counts, aliases=aliases, digest="")
    shard = "" if stats.shard is None else stats.shard.model_dump_json()
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    envelope = envelope.model_copy(update={"digest": _digest(envelope, arrays, shard)})
    metadata = {METADATA_KEY: envelope.model_dump_json(), **({SHARD_KEY: shard} if shard else {})}
    save_tensors(path, tensors, metadata=metadata)


def load_stats_file(
    path: Path, *, accepts_shard: bool = False, as_arrays: bool = False
) -> RunStats:
    """Load a stats file, or the one in the folder `path`.

    With `as_arrays` its tensors are arrays of numpy, and torch is not imported.
    """
    if path.is_dir():
        path = path / STATS_NAME
    if not path.is_file():
        raise UsageError(f"no stats file at {path}", hint="calibrate writes stats.safetensors")
    _, metadata = read_header(path)
    if METADATA_KEY not in metadata:
        command = f"fp8calib extract-kv-scales --quantized-model {shlex.quote(str(path))}"
        hint = f"{_HINT}; `{command} --model MODEL --save-path DIR` converts scales"
        raise ModelError(f"{path} is not a stats file of this tool", hint=hint)
    try:
        stats = _build(path, metadata[METADATA_KEY], metadata.get(SHARD_KEY, ""), as_arrays)
    except ValueError as error:  # pydantic's too
        raise ModelError(
            f"{path} is damaged, or of another version of this tool: {first_line(error)}",
            hint=_HINT,
        ) from error
    if stats.shard is not None and not accepts_shard:
        raise UsageError(
            f"{path} holds only {stats.shard.describe()} of the statistics",
            hint="join all shards by `fp8calib export SHARDS --out DIR`, and pass its "
            f"{STATS_NAME}",
        )
    return stats


def _build(path: Path, envelope_text: str, shard_text: str, as_arrays: bool) -> RunStats:
    envelope = _Envelope.model_validate_json(envelope_text)
    shard = StatsShard.model_validate_json(shard_text) if shard_text else None
    arrays = {
        key: np.fromfile(
            path,
            _ARRAY_DTYPES.get(entry.dtype, np.uint8),
            count=math.prod(entry.shape),
            offset=entry.start,
        ).reshape(entry.shape)
        for key, entry in read_header(path)[0].items()
    }
    if envelope.digest != _digest(envelope, arrays, shard_text):
        raise ValueError("its digest does not match its contents")
    # torch takes seconds to import
    convert: Any = (lambda array: array) if as_arrays else import_module("torch").from_numpy
    stored = {key: key for key in arrays if key != "text_hashes"}  # of earlier versions
    by_site: dict[str, dict[str, torch.Tensor]] = {text: {} for text in envelope.counts}
    for key, first in (stored | envelope.aliases).items():
        text, _, name = key.rpartition("/")
        by_site[text][name] = convert(arrays[first])
    return RunStats(
        header=envelope.header,
        sites={
            Site.parse(text): SiteStats(count=envelope.counts[text], **found)
            for text, found in by_site.items()
        },
        shard=shard,
    )


def _digest(envelope: _Envelope, arrays: Mapping[str, np.ndarray[Any, Any]], shard: str) -> str:
    digest = hashlib.sha256(envelope.model_dump_json(exclude={"digest"}).encode())
    digest.update(shard.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}\0torch.{array.dtype}\0{list(array.shape)}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def join_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort half-open ranges of sequences and join adjacent ones; refuse those that overlap."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if joined and first < joined[-1][1]:
            raise ValueError(f"sequence {first} is in two shards")
        if joined and first == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return tuple(joined)


# --- shards ---------------------------------------------------------------------------------------


def merge_shards(named: Sequence[tuple[str, RunStats]]) -> RunStats:
    """Merge all shards of one run, with their names in messages: in any order, they are the run."""
    if not named:
        raise ModelError("no shards to join", hint="name the stats.safetensors of every shard")
    found: list[tuple[str, RunStats, StatsShard]] = []
    for name, stats in named:
        if stats.shard is None or stats.shard.is_checkpoint:
            what = "the statistics of a whole run"
            if stats.shard is not None:
                what = "the checkpoint of an interrupted run: repeat its command with --resume"
            raise ModelError(
                f"{name} is not a finished shard, but {what}",
                hint="name the files of the shards; `fp8calib calibrate ... --shard I/N` writes "
                "one",
            )
        found.append((name, stats, stats.shard))
    found.sort(key=lambda each: each[2].index)  # the first shard names the data sources
    first_name, first, first_shard = found[0]
    for name, stats, shard in found[1:]:
        why = first.header.explain_other(stats.header) or first_shard.explain_other(shard)
        if why:
            raise ModelError(
                f"{name} and {first_name} are of different runs: {why}",
                hint="the runs of all shards must differ only in --shard",
            )
    count, indices = first_shard.count, [shard.index for *_, shard in found]
    if indices != [*range(1, count + 1)]:
        lacking = min({*range(1, count + 1)} - {*indices}, default=None)
        hint = "name every shard once"
        if lacking is not None:
            hint = f"run `fp8calib calibrate ... --shard {lacking}/{count}`, then name its file"
        given = ", ".join(map(str, indices))
        raise ModelError(f"a run of {count} shards needs each once, found {given}", hint=hint)
    others = [stats.header.skipped for _, stats, _ in found[1:]]
    skipped = tuple(item for item in first.header.skipped if all(item in each for each in others))
    return replace(
        first,
        header=first.header.model_copy(update={"skipped": skipped}),
        sites=merge_sites(stats.sites for _, stats in named),
        shard=None,
    )
