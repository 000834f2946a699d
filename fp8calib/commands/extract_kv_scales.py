"""Copy the KV scales of a quantized checkpoint or file to another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import BeforeAfter, Result, WrittenCheck, describe_written
from fp8calib.errors import UsageError
from fp8calib.formats.registry import find_dialect
from fp8calib.model.geometry import Attention, Frozen, ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS
from fp8calib.text import Block, Line

if TYPE_CHECKING:
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.formats.dialect import Attachment
    from fp8calib.formats.table import ScaleTable

Numbers = float | tuple[float, ...]
"""One number, or one for each rank or head."""


@request_class
class ExtractRequest:
    """Copy the KV scales of a quantized checkpoint to its unquantized model.

    Example: fp8calib extract-kv-scales --quantized-model llama-fp8 --model llama --save-path out
    """

    quantized_model: str | Path = option(
        "--quantized-model PATH",
        "Checkpoint folder or Hub id, or file (.safetensors .json .npz), with KV scales.",
        reads=Path,
        check=partial(shared.require_input, hint="name a checkpoint folder or a file of scales"),
    )
    model: str | Path = option(
        "--model MODEL",
        "The unquantized model, or a quantized checkpoint of it (an overlay keeps "
        "its quantization): folder or Hub id.",
        reads=str,
        check=find_local_model,
    )
    save_path: str | Path = option(
        "--save-path --out DIR",
        "Output folder: a checkpoint, or the folder of one file, by --format.",
        reads=Path,
    )
    _: KW_ONLY
    formats: str | Sequence[str] | None = option(shared.FORMATS, default=None)
    other_weights: bool = option(shared.OTHER_WEIGHTS, default=False)
    replace_scales: bool = option(shared.REPLACE_SCALES, default=False)
    source_dtype: str | None = option(
        "--source-dtype",
        "FP8 format that the scales were made for, if the files do not state it.",
        choices=tuple(KV_FORMATS),
        default=None,
    )
    fp8_dtype: str | None = option(shared.FP8_DTYPE, default=None)
    tp: list[int] | None = option(
        "--tp N",
        "Tensor-parallel degree of the JSON formats; repeat for more. Default: that of the source.",
        default=None,
    )
    revision: str | None = option(shared.REVISION, default=None)
    trust_remote_code: bool = option(shared.TRUST, default=False)
    check: bool = option(shared.CHECK, default=True)
    force: bool = option(shared.FORCE, default=False)


class ExtractedLayer(Frozen):
    """The scales of a layer as written."""

    layer: int
    module: str
    k: Numbers
    v: Numbers
    q: Numbers | None = None


class ExtractResult(Result):
    """The scales that were written, and who serves them: what `--json` prints."""

    save_path: Path
    files: tuple[str, ...]
    """Relative to `save_path`, sorted."""
    dialect: str
    """Of the source."""
    source_dtype: str
    format: str
    fp8_dtype: str
    tp: int | tuple[int, ...]
    taken_from: tuple[str, ...]
    """The source's files, each as folder and file name."""
    layers: tuple[ExtractedLayer, ...]
    notes: tuple[str, ...]
    compared: str = ""
    """Which linears of a quantized model were compared with the calibrated one, in words."""
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""


def run(request: ExtractRequest, reporter: Reporter) -> ExtractResult:
    """Read the scales, and write them in the requested format.

    Of the weights, few rows of each linear, the norms and the embeddings are read, to compare the
    two models where the scales record none.

    Raises:
        UsageError: an option is invalid, or the source does not state its FP8 format.
        ModelError: the unquantized model cannot be read.
        ExportError: the format cannot hold the scales, or cannot be written.
        ModelError: the source's scales are incomplete, invalid, or of another model.
    """
    with slow_imports():
        from fp8calib.calibration.fingerprint import fingerprint_model
        from fp8calib.checkpoint.checkpoint import Checkpoint
        from fp8calib.checkpoint.hub import find_folder, open_by_range
        from fp8calib.checkpoint.output import list_files, output_folder
        from fp8calib.commands.check_written import finish_checkpoint, require_server
        from fp8calib.formats.convert import fits_heads
        from fp8calib.formats.quantized_model import find_quantized
        from fp8calib.formats.read import read_scales
        from fp8calib.formats.write import list_owned, write_found
    names = shared.split_names(request.formats) or ["kv-overlay"]
    if len(names) > 1:
        raise UsageError(
            f"--format {' '.join(names)}: only one format can be written to --save-path",
            hint="run the command once for each format",
        )
    dialect, out = find_dialect(names[0]), Path(request.save_path)
    with (
        open_by_range(Path(request.quantized_model), say=reporter.say) as path,
        Checkpoint.open(find_folder(str(request.model), request.revision)) as checkpoint,
    ):
        quantized = find_quantized(checkpoint)
        geometry = _find_geometry(request, checkpoint, is_quantized=quantized is not None)
        table = read_scales(
            path,
            geometry,
            source_fmt=None if request.source_dtype is None else KV_FORMATS[request.source_dtype],
            needs_dtype=True,
            drops_bad_query=True,
        )
        fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
        attachment, related = _relate(
            *(request, path, table, checkpoint, fingerprint), is_quantized=quantized is not None
        )
        tps = tuple(dict.fromkeys(request.tp or ())) if dialect.per_tp else ()
        if not tps:
            is_kept = dialect.per_tp and fits_heads(geometry, table.tp)
            tps = (table.tp if is_kept else 1,)
        taken_from = tuple(
            # JSON readers in other languages reject names that are not valid Unicode
            f"{file.parent.name}/{file.name}".encode("utf-8", "replace").decode()
            for file in map(Path.resolve, table.files)
        )
        checked: tuple[WrittenCheck, ...] = ()
        with output_folder(
            out,
            owned=list_owned(dialect, tps, checkpoint),
            force=request.force,
            inputs=[checkpoint.folder, Path(request.quantized_model)],
        ) as folder:
            tables, notes = write_found(
                *(replace(table, files=tuple(map(Path, taken_from))), dialect, folder),
                fmt=KV_FORMATS[request.fp8_dtype or E4M3FN.name],
                tps=tps,
                model=fingerprint,
                source=checkpoint,
                shown=out,
                attachment=attachment,
            )
            if dialect.needs_model:
                if quantized is not None:
                    require_server(folder, geometry, quantized)
                checked = finish_checkpoint(
                    *(folder, out, dialect.name, request.model),
                    revision=request.revision,
                    check=request.check,
                )
            files = list_files(folder)
    notes = (*related, *notes)
    for note in notes:
        reporter.warn(note)
    return ExtractResult(
        save_path=out,
        files=files,
        dialect=table.dialect,
        source_dtype=table.fmt.name,
        format=dialect.name,
        fp8_dtype=tables[0].fmt.name,
        tp=tps[0] if len(tps) == 1 else tuple(tps),
        taken_from=taken_from,
        layers=tuple(
            _describe_layer(tables[0], layer.index, attention, joins_kv=dialect.joins_kv)
            for layer, attention in geometry.attentions()
        ),
        notes=notes,
        compared=attachment.compared,
        kv_bytes_per_token=BeforeAfter.of_kv_cache(geometry),
        checked=checked,
    )


def _relate(
    request: ExtractRequest,
    path: Path,
    table: ScaleTable,
    checkpoint: Checkpoint,
    fingerprint: str,
    *,
    is_quantized: bool,
) -> tuple[Attachment, list[str]]:
    """Refuse a model that the scales are not of; say how they belong to it, with notes."""
    from fp8calib.formats.dialect import Attachment
    from fp8calib.formats.read import check_origin
    from fp8calib.quantization.attachment import compare_source, relate_to_quantized

    if is_quantized:
        return relate_to_quantized(
            *(str(path), table.origin, checkpoint, table.geometry),
            other_weights=request.other_weights,
            replace_scales=request.replace_scales,
        )
    check_origin(str(path), table.origin, fingerprint)
    compared, related = "", list[str]()
    if table.origin is None:
        compared, related = compare_source(path, checkpoint, other_weights=request.other_weights)
    return Attachment(replaces_scales=request.replace_scales, compared=compared), related


def _find_geometry(
    request: ExtractRequest, checkpoint: Checkpoint, *, is_quantized: bool
) -> ModelGeometry:
    from fp8calib.model.geometry_from_config import read_geometry, read_whole_geometry

    config = checkpoint.load_config()
    if is_quantized:
        return read_geometry(checkpoint.folder, config)
    if (found := read_whole_geometry(checkpoint, config)) is not None:
        return found
    from fp8calib.model.load import build_skeleton, open_source
    from fp8calib.model.prepared import prepare

    source = open_source(str(checkpoint.folder), trust_remote_code=request.trust_remote_code)
    return prepare(build_skeleton(source), checkpoint).geometry


def _describe_layer(
    table: ScaleTable, index: int, attention: Attention, *, joins_kv: bool
) -> ExtractedLayer:
    """List the scales of a layer as written: one number, or one per rank or head."""
    if joins_kv:
        joint = [table.kv(attention, rank) for rank in range(table.tp)]
        pair = dict.fromkeys(("k", "v"), joint)
    else:
        sites = (attention.site(role) for role in (Role.K, Role.V, Role.Q))
        pair = {
            str(site.role): table.scales[site].values.flatten().tolist()
            for site in sites
            if site in table.scales
        }
    scales = {role: values[0] if len(values) == 1 else values for role, values in pair.items()}
    return ExtractedLayer(layer=index, module=attention.module, **scales)


def describe(result: ExtractResult, request: ExtractRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe the scales, where they are, and who serves them."""
    yield Line(f"{result.dialect} scales of {len(result.layers)} layers, {result.fp8_dtype}")
    yield Line(result.kv_bytes_per_token.describe_kv_cache())
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    yield from describe_written(result.save_path, result.files, result.checked)


extract_kv_scales = as_function("extract_kv_scales", ExtractRequest, run)
