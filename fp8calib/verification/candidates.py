"""Open candidates (statistics, scales of any dialect, FP8 checkpoints) and emulate them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from fp8calib.calibration.calibration_origin import CalibrationOrigin, explain_difference
from fp8calib.calibration.calibration_stats import (
    STATS_NAME,
    CalibrationStats,
    calibrate_first,
    is_stats_file,
    load_stats_file,
)
from fp8calib.calibration.unquantized_tensors import compare_with_base
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import refuse_external_links, require_path
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, UsageError, cut_list, format_ranges, name_ranges
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import require_format
from fp8calib.formats.fp8.pairing import is_fp8_checkpoint
from fp8calib.formats.read import check_origin, has_kv_scales, read_scales
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.table import ScaleSource, ScaleTable
from fp8calib.model.live_model import LiveCheckpoint
from fp8calib.model.load import LoadedModel
from fp8calib.model.shapes import ModelGeometry, Role, Site
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, find_scheme
from fp8calib.quantization.calibrated_scales import InputScales
from fp8calib.quantization.select import find_selection
from fp8calib.quantization.settings import make_settings
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import (
    emulate_kv,
    explain_plain_cache,
    find_misreads,
    fit_kv,
    make_unscaled_table,
    takes_latents_unscaled,
)
from fp8calib.verification.emulation.planned import emulate_planned
from fp8calib.verification.emulation.stored import emulate_stored, list_embedding_and_head
from fp8calib.verification.renamed import rename_sites
from fp8calib.verification.same_config import find_other_setting

Scales = str | Path | CalibrationStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""
_SAMPLE_BYTES = 4096
_ELEMENTS_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The unquantized model that candidates are made for, and how they are emulated."""

    checkpoint: Checkpoint
    fingerprint: str
    geometry: ModelGeometry
    model: LoadedModel
    """It may be without weights."""
    numerics: Numerics
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""


def open_candidate(
    given: Scales, target: Target, *, name: str = "", scheme: str | None = None
) -> Candidate:
    """Read what is compared with the model, check that it belongs to it, and emulate it.

    Args:
        given: statistics, or a path: of a stats file, of the output folder of a calibration, of
            scales of any dialect, or of an FP8 checkpoint, which is read as the engine reads it.
        target: the unquantized model.
        name: that of statistics in memory.
        scheme: the scheme of weights and inputs that statistics are for; None for the KV cache.

    Raises:
        UsageError: the path does not exist, or `scheme` is given and no statistics are.
        ModelError: the scales or statistics are not valid, or of another model.
    """
    if isinstance(given, CalibrationStats):
        return _open_stats(name or "statistics", given, target, scheme)
    name, path, numerics = str(given), find_candidate(str(given)), target.numerics
    if is_stats_file(path):
        return _open_stats(name, load_stats_file(path), target, scheme, folder=path.parent)
    if path.is_dir() and is_fp8_checkpoint(path):
        checkpoint = Fp8Checkpoint.open(
            path,
            fuse=numerics.fused_share_scales,
            through_float16=numerics.weights_through_float16,
            keeps_equal_scales=numerics.modelopt_keeps_equal_scales,
        )
        require_format(path, checkpoint.load_config())
        _check_config(checkpoint, target)
        _check_origin(name, checkpoint.origin, target)
        table = _read_scales(name, path, target) if has_kv_scales(path) else None
        _refuse_scheme(name, scheme)
        return _build_checkpoint(name, checkpoint, table, target)
    table = _read_scales(name, path, target)
    if path.is_dir() and target.checkpoint.has_weights:
        _check_weights(path, target)
    _refuse_scheme(name, scheme)
    made = build_kv_candidate(name, table, numerics, origin=table.dialect)
    return replace(made, origin=table.origin)


def _refuse_scheme(name: str, scheme: str | None) -> None:
    if scheme is not None:
        raise UsageError(
            f"--scheme {scheme} needs statistics, and {name} holds none",
            hint="leave out --scheme to verify the scales of the file",
        )


def _open_stats(
    name: str,
    stats: CalibrationStats,
    target: Target,
    scheme: str | None,
    *,
    folder: Path | None = None,
) -> Candidate:
    """Make a candidate of statistics, and check that they belong to the model.

    Their scales are those that `export` writes: of q as well, if q needs a scale. If `folder`,
    which holds them, has an overlay, they are those of the overlay.
    """
    if stats.header.model_fingerprint != target.fingerprint and not _is_base(stats.origin, target):
        difference = explain_difference(stats.header.model_fingerprint, target.fingerprint)
        raise ModelError(
            f"{name}: these statistics are of another model "
            f"({stats.geometry.architecture}, {len(stats.geometry.layers)} layers): {difference}",
            hint="calibrate this model, or pass the model that was calibrated",
        )
    stats = rename_sites(stats, target.geometry)
    if scheme is not None:
        made = build_scheme(name, scheme, target, stats)
    else:
        has_query = bool(stats.list_unfit_queries())
        overlay = None if folder is None else folder / find_dialect("kv-overlay").path()
        if has_query and overlay is not None and overlay.is_dir():
            headers = map(read_header, overlay.glob("*.safetensors"))
            has_query = any(key.endswith(".q_scale") for each in headers for key in each.tensors)
        table = compute_kv_scales(stats, target.fmt, query=has_query)
        made = build_kv_candidate(name, table, target.numerics, origin="statistics, amax")
    return replace(made, stats=stats, origin=stats.origin)


def find_candidate(name: str) -> Path:
    """Find the file or folder of a candidate; in the output of a calibration, its statistics.

    Raises:
        UsageError: the path does not exist.
        ModelError: the folder links to files outside of it.
    """
    path = Path(name)
    require_path(path, option="--scales")
    if not path.is_dir():
        return path
    refuse_external_links(path)
    return path / STATS_NAME if is_stats_file(path / STATS_NAME) else path


def _read_scales(name: str, path: Path, target: Target) -> ScaleTable:
    table = read_scales(path, target.geometry, fills_layers=True).table
    _check_origin(name, table.origin, target)
    return table


def _check_origin(name: str, origin: CalibrationOrigin | None, target: Target) -> None:
    if not _is_base(origin, target):
        check_origin(name, origin, target.fingerprint)


def _is_base(origin: CalibrationOrigin | None, target: Target) -> bool:
    """Tell whether a quantized model, or one in memory, was made from the calibrated one.

    One in memory may have another config and dtype than its files. Without weights, in a dry run,
    there is nothing to compare.
    """
    if not target.checkpoint.has_weights:
        return True
    is_made = bool(target.checkpoint.form) or isinstance(target.checkpoint, LiveCheckpoint)
    if origin is None or not origin.unquantized or not is_made:
        return False
    return not compare_with_base(origin.unquantized, target.checkpoint).difference


def _check_weights(folder: Path, target: Target) -> None:
    """Refuse an overlay whose weights or config are another model's."""
    try:
        opened = Checkpoint.open(folder)
    except ModelError:
        return  # no weights beside the scales: nothing to compare
    with opened as overlay:
        _check_config(overlay, target)
        for name, entry in overlay.tensors.items():
            own = target.checkpoint.tensors.get(name)
            if own is None or (own.dtype != entry.dtype and own.shape == entry.shape):
                continue
            if own.shape != entry.shape or overlay.sample_bytes(
                name, _SAMPLE_BYTES
            ) != target.checkpoint.sample_bytes(name, _SAMPLE_BYTES):
                raise ModelError(
                    f"{folder}: its {name} is not that of the model, so the scales belong to "
                    "another model",
                    hint="pass the model that the overlay was made from",
                )


def _check_config(checkpoint: Checkpoint, target: Target) -> None:
    """Refuse a checkpoint that engines compute in another way than the model."""
    if other := find_other_setting(checkpoint.load_config(), target.model.config):
        raise ModelError(
            f"{checkpoint.folder}: its config.json is not that of the model: {other}",
            hint="engines follow it: copy the value from the model's config.json",
        )


def build_kv_candidate(
    name: str, table: ScaleTable, numerics: Numerics, *, origin: str
) -> Candidate:
    """Build a candidate that quantizes the KV cache with the scales of `table`.

    `origin` is shown to people.
    """
    kind = "per-head" if table.per_head else "per-tensor"
    ranks = f", {table.tp} ranks" if table.tp > 1 else ""
    unused = (
        f"; {numerics.name} ignores scales of latent attention: 1.0"
        if takes_latents_unscaled(table, numerics)
        else ""
    )
    description = f"KV cache {table.fmt.name}, {kind} scales{ranks} ({origin}){unused}"
    description += "".join(f"; {note}" for note in _note_defaulted(table))
    return _build_kv(name, description, table, numerics)


def build_unscaled(
    name: str, geometry: ModelGeometry, fmt: Fp8Format, numerics: Numerics
) -> Candidate:
    """Build the candidate without scales."""
    table = make_unscaled_table(geometry, fmt)
    return _build_kv(name, f"KV cache {fmt.name}, every scale 1.0", table, numerics)


def _build_kv(name: str, description: str, table: ScaleTable, numerics: Numerics) -> Candidate:
    reads, notes = find_misreads(table, numerics), list(_note_defaulted(table))
    if misread := [layer.index for layer, a in table.geometry.attentions() if a.module in reads]:
        layers = format_ranges(misread)
        note = f"layers {layers} read the cache of other layers with their own scales, 1.0 where "
        notes.insert(0, f"{note}the file has none, and so misread it")
    return Candidate(
        name=name,
        description=description,
        quantizers=emulate_kv(table, numerics),
        reads=reads,
        fitted=fit_kv(table.geometry, table.fmt, numerics),
        notes=tuple(notes),
        table=table,
    )


def list_defaulted(table: ScaleTable) -> list[int]:
    """List the layers for which a file has no scale, so that engines use 1.0."""
    return [
        layer.index
        for layer, attention in table.geometry.attentions()
        if table.scales[attention.site(Role.K)].source is ScaleSource.DEFAULTED
    ]


def _note_defaulted(table: ScaleTable) -> Iterator[str]:
    if layers := list_defaulted(table):
        yield f"the file has no scale for {name_ranges(layers)}: 1.0, as engines serve it"


def leave_cache(
    candidate: Candidate, layers: Collection[int], geometry: ModelGeometry
) -> Candidate:
    """Leave the KV cache of some layers in 16 bits, as an engine's option does.

    Raises:
        UsageError: a layer has no KV cache, or shares it with one that is not named.
    """
    known = {layer.index: attention for layer, attention in geometry.attentions()}
    if unknown := sorted(set(layers) - known.keys()):
        raise UsageError(
            f"layer {unknown[0]} has no KV cache that could stay in 16 bits",
            hint=f"layers with one: {format_ranges(known)}",
        )
    if shared := sorted(set(geometry.with_readers(layers)) - set(layers)):
        raise UsageError(
            f"{name_ranges(shared)}: of the same KV cache "
            "as a layer in 16 bits, which would be read as if it were quantized",
            hint="name all layers that share a cache, or none",
        )
    left = {attention.module for index, attention in known.items() if index in layers}

    def keep(quantizers: Mapping[Site, Quantizer]) -> dict[Site, Quantizer]:
        return {site: each for site, each in quantizers.items() if site.module not in left}

    has_plain = layers and candidate.has_cache
    plain = f"; layers {format_ranges(sorted(layers))} in 16 bits" if has_plain else ""
    return replace(
        candidate,
        description=candidate.description + plain,
        quantizers=keep(candidate.quantizers),
        fitted=keep(candidate.fitted),
    )


def build_scheme(
    name: str,
    scheme: str,
    target: Target,
    stats: CalibrationStats | None = None,
    *,
    ignore: Sequence[str] = (),
) -> Candidate:
    """Build a candidate: the checkpoint that `quantize` would write with `scheme` and `ignore`."""
    found, fmt = find_scheme(scheme), target.fmt
    if found.has_static_inputs and stats is None:
        raise UsageError(
            f"--scheme {scheme}: its input scales come from calibration",
            hint=calibrate_first("--scales", recipe="w8a8-static"),
        )
    emulation = emulate_planned(
        make_settings(scheme, ignore=ignore),
        find_selection(target.checkpoint, ignore=ignore),
        target.geometry,
        WeightSource(target.model, target.checkpoint),
        target.numerics,
        fmt=fmt,
        scale_input=InputScales(stats, fmt=fmt).of if stats and found.has_static_inputs else None,
    )
    rounding = _describe_rounding(emulation.quantizers, target.numerics)
    description = f"{scheme}: {found.description}, {fmt.name}{rounding}"
    return replace(emulation, name=name, description=description)


def _build_checkpoint(
    name: str, checkpoint: Fp8Checkpoint, table: ScaleTable | None, target: Target
) -> Candidate:
    """Build a candidate of a whole FP8 checkpoint, with its KV scales if it has any."""
    model, numerics = target.model, target.numerics
    source = WeightSource(model, checkpoint)
    # No FP8 scheme changes these, and all candidates are scored with the unquantized model's head.
    original = target.checkpoint
    for end in source.tensor_names(list_embedding_and_head(model)) - checkpoint.quantized:
        is_stored_alike = end in original and original.dtype(end) == checkpoint.dtype(end)
        if is_stored_alike and _is_changed(end, checkpoint, original):
            raise ModelError(
                f"{checkpoint.folder}: its {end} is not that of the model",
                hint="pass the model that the checkpoint was made from",
            )

    def is_changed(name: str) -> bool:
        return _is_changed(name, checkpoint, original)

    emulation = emulate_stored(checkpoint, target.geometry, source, numerics, is_changed=is_changed)
    parts = [f"{checkpoint.dialect.name} checkpoint, weights {checkpoint.fmt.name}"]
    kv = Candidate(name=name)
    if table is not None and (why := explain_plain_cache(table, numerics)):
        kv = replace(kv, notes=(f"its KV scales are ignored: {why}",))
    elif table is not None:
        kv = _build_kv(name, "", table, numerics)
        parts += [f"KV cache {table.fmt.name}", *_note_defaulted(table)]
    return replace(
        kv,
        description=", ".join(parts) + _describe_rounding(emulation.quantizers, numerics),
        quantizers={**emulation.quantizers, **kv.quantizers},
        weights=emulation.weights,
        notes=(*kv.notes, *emulation.notes),
        origin=checkpoint.origin,
    )


def check_sites(candidate: Candidate, geometry: ModelGeometry) -> None:
    """Refuse a candidate that quantizes nothing, or whose sites the model lacks.

    Raises:
        ModelError: naming the candidate, and a site.
    """
    modules = {attention.module for _, attention in geometry.attentions()}
    modules |= {linear.module for _, linear in geometry.linears()}
    lacking = [site for site in candidate.quantizers if site.module not in modules]
    if lacking:
        raise ModelError(
            f"{candidate.name}: it quantizes {cut_list(lacking, 1)}, which the model does not have",
            hint="are the scales of this model?",
        )
    if not candidate.quantizers and not candidate.weights:
        raise ModelError(
            f"{candidate.name}: it quantizes nothing of this model",
            hint="add --scheme fp8-dynamic if it has no KV cache: this emulates FP8 weights",
        )


def _describe_rounding(quantizers: Mapping[Site, Quantizer], numerics: Numerics) -> str:
    rounded = [each for each in quantizers.values() if each.power_of_two]
    if all(each.block == MX_BLOCK for each in rounded):  # whose format asks for them
        return ""
    return f"; {numerics.name} rounds the scales of blocks and groups up to powers of two"


def _is_changed(name: str, checkpoint: Fp8Checkpoint, original: Checkpoint) -> bool:
    """Tell whether any value differs: a fine-tune may change a few rows of an embedding only."""
    if name not in original or original.dtype(name) != checkpoint.dtype(name):
        return True
    shape = checkpoint.tensors[name].shape
    if shape != original.tensors[name].shape:
        return True
    if len(shape) < 2:
        return not _are_equal(checkpoint.read(name), original.read(name))
    step = max(_ELEMENTS_AT_ONCE // max(prod(shape[1:]), 1), 1)
    blocks = ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return not all(
        _are_equal(checkpoint.read_rows(name, *block), original.read_rows(name, *block))
        for block in blocks
    )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits: NaN differs from itself."""
    return torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other)))
