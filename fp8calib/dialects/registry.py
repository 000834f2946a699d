"""The forms scales are written in, as data, and the verb that writes several of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.overlay import plan_overlay
from fp8calib.dialects.kv.json import write_vllm_json
from fp8calib.dialects.kv.metadata import Provenance
from fp8calib.dialects.kv.overlay import STRICT_TYPES, UNLISTED_NAME, write_kv_overlay
from fp8calib.dialects.kv.rfc import write_rfc
from fp8calib.dialects.kv.tensors import write_kv_scales
from fp8calib.dialects.kv.tgi import write_tgi_overlay
from fp8calib.errors import ExportError, UsageError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.tensor_parallel import check_heads, check_linears
from fp8calib.scales.compute import (
    Fallback,
    ScaleSource,
    ScaleTable,
    compute_kv_scales,
    compute_linear_scales,
)
from fp8calib.scales.rules import AMAX, Rule
from fp8calib.stats.calibration_stats import CalibrationStats

WHY_NOT_OBSERVED = {
    ScaleSource.SHARED: "reads another layer's K and V, so it carries that layer's scale",
    ScaleSource.ALL_ZERO: "only zeros were seen, so its scale is the fallback",
    ScaleSource.UNSEEN: "no token came by, so its scale is the fallback",
}
"""Why a scale was not computed from what was seen at its site."""

_KV_ALONE = (
    "only its kv_cache section is written: no KV scales tell those of weights and activations, "
    "which `fp8calib calibrate` measures"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """What can be said about a format before anything is computed."""

    name: str
    path_pattern: str
    """The folder or file under the output folder; `{tp}` is the number of ranks."""
    description: str
    needs_model: bool = False
    """Overlays: the model's weights are part of it."""
    replaces_quantization: bool = False
    """Its `quantization_config` would take the place of the model's own."""
    per_tp: bool = False
    """One file for each tensor-parallel degree."""
    per_head: bool = False
    has_linears: bool = False
    """Weights and activations have scales too."""
    joins_kv: bool = False
    """One scale a layer for k and v, none for q."""
    lists_all_layers: bool = False
    """Layers without K and V have an entry as well, 1.0."""

    def path(self, tp: int = 1) -> str:
        """Name the folder or file for `tp` ranks."""
        return self.path_pattern.format(tp=tp)


FORMATS: Mapping[str, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec(
            name="kv-overlay",
            path_pattern="kv-overlay",
            description="a checkpoint: the model's weights, KV scales, a quantization_config",
            needs_model=True,
            replaces_quantization=True,
        ),
        FormatSpec(
            name="kv-overlay-head",
            path_pattern="kv-overlay-head",
            description="the same checkpoint with a scale for each KV head",
            needs_model=True,
            replaces_quantization=True,
            per_head=True,
        ),
        FormatSpec(
            name="tgi",
            path_pattern="tgi",
            description="a checkpoint with one kv_scale per layer, no quantization_config",
            needs_model=True,
            joins_kv=True,
        ),
        FormatSpec(
            name="kv-scales",
            path_pattern="kv_scales.safetensors",
            description="only the scale tensors",
        ),
        FormatSpec(
            name="vllm-json",
            path_pattern="kv_cache_scales.tp{tp}.json",
            description="the scales file of vLLM 0.4 to 0.6 and SGLang",
            per_tp=True,
            joins_kv=True,
            lists_all_layers=True,
        ),
        FormatSpec(
            name="rfc",
            path_pattern="rfc.tp{tp}.json",
            description="the RFC's JSON: KV cache, MLP and attention scales",
            per_tp=True,
            has_linears=True,
            joins_kv=True,
            lists_all_layers=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Note:
    """Something a user should know about a file that was written."""

    subject: str
    """A site, a layer, or an entry of the model's folder."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFormats:
    """What `write_formats` wrote."""

    files: tuple[str, ...]
    """Relative to the output folder, sorted."""
    notes: tuple[Note, ...]


def check_formats(names: Iterable[str]) -> None:
    """Refuse formats that are not known.

    Raises:
        UsageError: naming the first, and those that are known.
    """
    for name in names:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise UsageError(f"--format {name}: unknown format", hint=f"known formats: {known}")


def paths(names: Iterable[str], tps: Iterable[int]) -> frozenset[str]:
    """Name everything at the top of the output folder that these formats write."""
    specs = [FORMATS[name] for name in names]
    degrees = tuple(tps)
    return frozenset(spec.path(tp) for spec in specs for tp in _degrees(spec, degrees))


def check_export(geometry: ModelGeometry, formats: Sequence[str], tps: Sequence[int]) -> None:
    """Refuse what cannot be written, before anything is computed.

    Raises:
        UsageError: a format is unknown, or a degree does not fit the model.
    """
    check_formats(formats)
    specs = [FORMATS[name] for name in formats]
    for tp in tps:
        check_heads(geometry, tp)
        if any(spec.has_linears for spec in specs):
            check_linears(geometry, tp)


def check_overlay_source(
    geometry: ModelGeometry, formats: Sequence[str], source: Checkpoint | None
) -> None:
    """Refuse a model that overlays of these formats cannot be made of.

    Raises:
        UsageError: there is no model, and a format needs one.
        ModelError: the model's config.json is missing or broken.
        ExportError: it is another model than the geometry's, or quantized already.
    """
    specs = [FORMATS[name] for name in formats if FORMATS[name].needs_model]
    if not specs:
        return
    if source is None:
        hint = "--model names the model whose weights the overlay takes"
        raise UsageError(f"--format {specs[0].name} needs --model", hint=hint)
    _check_same_model(geometry, source)
    config = source.load_config()
    for spec in specs:
        if spec.replaces_quantization and config.get("quantization_config"):
            raise ExportError(
                f"{source.folder}: the model is quantized already, and the overlay's "
                "quantization_config would replace its own",
                hint="start from the unquantized model, or write kv-scales",
            )


def list_owned(name: str, tp: int, geometry: ModelGeometry, source: Checkpoint) -> frozenset[str]:
    """Name everything in an output folder that *is* the overlay, or holds the one file."""
    if not FORMATS[name].needs_model:
        return paths([name], [tp])
    unlisted = {UNLISTED_NAME} if geometry.model_type in STRICT_TYPES else frozenset[str]()
    return plan_overlay(source).names | unlisted


def check_replaced(formats: Iterable[str], out: Path, source: Checkpoint) -> None:
    """Refuse to replace an overlay folder in which there is something no overlay of `source` has.

    Raises:
        UsageError: naming what would be lost.
    """
    known = plan_overlay(source).names | {UNLISTED_NAME}
    for spec in (FORMATS[name] for name in formats):
        folder = out / spec.path()
        if spec.needs_model and folder.is_dir():
            strangers = sorted({entry.name for entry in folder.iterdir()} - known)
            if strangers:
                raise UsageError(
                    f"{folder}: holds what this command does not write: {', '.join(strangers[:5])}",
                    hint="move it away, or name another folder",
                )


def write_formats(
    stats: CalibrationStats,
    formats: Sequence[str],
    out: Path,
    *,
    fmt: Fp8Format,
    tps: Sequence[int],
    source: Checkpoint | None,
    query: bool,
    fallback: Fallback | None,
    rule: Rule = AMAX,
    quantized: Mapping[int, ScaleTable] | None = None,
) -> WrittenFormats:
    """Write scales in each of `formats`, those that depend on it once for each degree.

    Args:
        stats: what was seen.
        formats: names of `FORMATS`.
        out: a folder that is there, none of whose entries has a name of `paths`.
        fmt: the FP8 format the scales are for.
        tps: tensor-parallel degrees of the engines.
        source: the model, for overlays.
        query: write `q_scale` too, where the form has it.
        fallback: what sites get that nothing was seen at.
        rule: which magnitude of an activation the largest FP8 value stands for.
        quantized: for each degree, the scales with which somebody else writes quantized weights:
            `rfc` has these, and names the files.

    Raises:
        UsageError: a format or a degree that cannot be, or a model that is missing.
        ExportError: a scale cannot be computed, or a file not written.
    """
    check_export(stats.geometry, formats, tps)
    check_overlay_source(stats.geometry, formats, source)
    job = _Job(
        stats=stats,
        fmt=fmt,
        source=source,
        query=query,
        fallback=fallback,
        rule=rule,
        quantized=quantized,
    )
    written = []
    for spec in (FORMATS[name] for name in dict.fromkeys(formats)):
        for tp in _degrees(spec, tuple(dict.fromkeys(tps))):
            target = out / spec.path(tp)
            _WRITERS[spec.name](job, spec, tp, target)
            written.append(target)
        job.note_layers_without_cache(spec)
        job.note_unobserved_weights(spec)
    files = (file for target in written for file in _list_files(target))
    return WrittenFormats(
        files=tuple(sorted(file.relative_to(out).as_posix() for file in files)),
        notes=tuple(dict.fromkeys(job.notes)),
    )


def write_table(
    table: ScaleTable,
    name: str,
    target: Path,
    *,
    source: Checkpoint,
    provenance: Provenance | None = None,
) -> tuple[Note, ...]:
    """Write KV scales that are there already in one form.

    Args:
        table: scales of the ranks, or heads, that the form is for.
        name: of `FORMATS`.
        target: the file, or the folder of an overlay, which is empty or not there.
        source: the model, for overlays.
        provenance: where the scales were taken from, to be written down with them.

    Returns:
        What a user should know: layers without scales of their own, files left out.

    Raises:
        UsageError: the form is not known.
        ExportError: it cannot be written.
    """
    check_formats([name])
    spec = FORMATS[name]
    check_overlay_source(table.geometry, [name], source)
    notes = [*_notes_of_origins(table), *_notes_of_bare_layers(spec, table.geometry)]
    if spec.needs_model:
        write = write_tgi_overlay if spec.joins_kv else write_kv_overlay
        skipped = write(table, source, target, provenance=provenance)
        notes.extend(_notes_of_left_out(spec, skipped))
    elif spec.has_linears:
        write_rfc(table, None, target, provenance=provenance)
        notes.append(Note(spec.name, _KV_ALONE))
    elif spec.joins_kv:
        write_vllm_json(table, target, provenance=provenance)
    else:
        write_kv_scales(table, target, provenance=provenance)
    return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every writer needs, and the notes that come up."""

    stats: CalibrationStats
    fmt: Fp8Format
    source: Checkpoint | None
    query: bool
    fallback: Fallback | None
    rule: Rule
    quantized: Mapping[int, ScaleTable] | None
    notes: list[Note] = field(default_factory=list)

    def kv_table(self, *, tp: int = 1, per_head: bool = False, query: bool = False) -> ScaleTable:
        table = compute_kv_scales(
            self.stats,
            self.fmt,
            tp=tp,
            per_head=per_head,
            query=query,
            fallback=self.fallback,
            rule=self.rule,
        )
        return self._noted(table)

    def linear_table(self, tp: int) -> ScaleTable:
        if self.quantized is not None:
            return self._noted(self.quantized[tp])
        table = compute_linear_scales(
            self.stats, self.fmt, tp=tp, fallback=self.fallback, rule=self.rule
        )
        return self._noted(table)

    def note_left_out(self, spec: FormatSpec, skipped: Mapping[str, str]) -> None:
        self.notes.extend(_notes_of_left_out(spec, skipped))

    def note_unobserved_weights(self, spec: FormatSpec) -> None:
        """Say which weights a form of weights and activations is written without."""
        if spec.has_linears:
            weights = (item for item in self.stats.header.skipped if item.site.endswith(".weight"))
            self.notes.extend(
                Note(item.site, f"not in {spec.name}: {item.why}") for item in weights
            )

    def note_layers_without_cache(self, spec: FormatSpec) -> None:
        self.notes.extend(_notes_of_bare_layers(spec, self.stats.geometry))

    def _noted(self, table: ScaleTable) -> ScaleTable:
        self.notes.extend(_notes_of_origins(table))
        self.notes.extend(_notes_of_kept_amax(table))
        return table


def _notes_of_origins(table: ScaleTable) -> Iterator[Note]:
    return (Note(str(site), WHY_NOT_OBSERVED[scale.source]) for site, scale in table.not_observed())


def _notes_of_left_out(spec: FormatSpec, skipped: Mapping[str, str]) -> Iterator[Note]:
    return (Note(name, f"left out of {spec.name}: {why}") for name, why in skipped.items())


def _notes_of_bare_layers(spec: FormatSpec, geometry: ModelGeometry) -> Iterator[Note]:
    if spec.lists_all_layers:
        why = "caches no K and V; the JSON forms want every layer, so it is 1.0 there"
        yield from (Note(layer.module, why) for layer in geometry.layers if layer.attention is None)


def _notes_of_kept_amax(table: ScaleTable) -> Iterator[Note]:
    """Say once for all sites of a reason where the rule could not be followed."""
    for why in dict.fromkeys(table.kept_amax.values()):
        first, *others = (str(site) for site, reason in table.kept_amax.items() if reason == why)
        yield Note(f"{first} and {len(others)} more" if others else first, why)


def _write_kv_overlay(job: _Job, spec: FormatSpec, tp: int, target: Path) -> None:
    table = job.kv_table(tp=tp, per_head=spec.per_head, query=job.query)
    job.note_left_out(spec, write_kv_overlay(table, _require(job.source), target))


def _write_tgi(job: _Job, spec: FormatSpec, tp: int, target: Path) -> None:
    job.note_left_out(spec, write_tgi_overlay(job.kv_table(tp=tp), _require(job.source), target))


def _write_kv_scales(job: _Job, _: FormatSpec, tp: int, target: Path) -> None:
    write_kv_scales(job.kv_table(tp=tp, query=job.query), target)


def _write_vllm_json(job: _Job, _: FormatSpec, tp: int, target: Path) -> None:
    write_vllm_json(job.kv_table(tp=tp), target)


def _write_rfc(job: _Job, _: FormatSpec, tp: int, target: Path) -> None:
    linears, with_weights = job.linear_table(tp), job.quantized is not None
    write_rfc(job.kv_table(tp=tp), linears, target, with_weights=with_weights)


_WRITERS: Mapping[str, Callable[[_Job, FormatSpec, int, Path], None]] = {
    "kv-overlay": _write_kv_overlay,
    "kv-overlay-head": _write_kv_overlay,
    "tgi": _write_tgi,
    "kv-scales": _write_kv_scales,
    "vllm-json": _write_vllm_json,
    "rfc": _write_rfc,
}


def _degrees(spec: FormatSpec, tps: tuple[int, ...]) -> tuple[int, ...]:
    return tps if spec.per_tp else (1,)


def _require(source: Checkpoint | None) -> Checkpoint:
    assert source is not None  # noqa: S101 -- check_overlay_source refused it
    return source


def _check_same_model(geometry: ModelGeometry, source: Checkpoint) -> None:
    parents = {name.rpartition(".")[0] for name in source.tensors}
    modules = {parent for name in parents for parent in _list_prefixes(name)}
    for layer, attention in geometry.attentions():
        if attention.checkpoint_module not in modules:
            raise ExportError(
                f"{source.folder}: no tensor lies under {attention.checkpoint_module}, where layer "
                f"{layer.index} of the calibrated model has its attention",
                hint="name the model the statistics were made of",
            )


def _list_prefixes(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(1, len(pieces) + 1)]


def _list_files(target: Path) -> list[Path]:
    if target.is_file():
        return [target]
    return [path for path in target.rglob("*") if path.is_file()]
