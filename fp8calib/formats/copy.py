"""Write scales that were read for another model, in any dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.calibration_origin import CalibrationOrigin
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.convert import convert_table, explain_fit, explain_joint, explain_no_query
from fp8calib.formats.dialect import NO_ATTACHMENT, Attachment, Dialect
from fp8calib.formats.metadata import Provenance
from fp8calib.formats.read import FoundScales
from fp8calib.formats.registry import list_written
from fp8calib.formats.table import ScaleTable
from fp8calib.formats.write import write_table
from fp8calib.numerics.formats import Fp8Format


def convert_scales(
    found: FoundScales, dialect: Dialect, fmt: Fp8Format, tps: Iterable[int], model: str
) -> list[ScaleTable]:
    """Convert scales to what a dialect holds, a table for each number of ranks.

    `model` is the fingerprint of the model where nothing is known of their calibration.

    Raises:
        ExportError: they cannot be converted.
    """
    table = replace(found.table, origin=found.table.origin or CalibrationOrigin(model=model))
    return [convert_table(table, fmt=fmt, tp=tp, per_head=dialect.per_head) for tp in tps]


def write_tables(
    found: FoundScales,
    tables: Sequence[ScaleTable],
    dialect: Dialect,
    folder: Path,
    *,
    files: Sequence[str],
    source: Checkpoint,
    shown: Path,
    attachment: Attachment = NO_ATTACHMENT,
    attached: Iterable[str] = (),
) -> tuple[str, ...]:
    """Write what `convert_scales` made, and say what a user should know.

    Args:
        found: the scales as they were read.
        tables: the same, converted.
        dialect: how they are written.
        folder: it becomes an overlay, or holds the files.
        files: the names of the files that held them.
        source: the model.
        shown: the final path of the folder.
        attachment: how they belong to a model that is quantized already.
        attached: what a user should know about that.

    Raises:
        ExportError: they cannot be written.
    """
    provenance = None  # scales of a quantized source are biased, and are recorded as such
    if found.table.origin is None or not found.table.origin.data:
        provenance = Provenance(
            dialect=found.dialect, files=tuple(files), has_fp8_weights=found.has_weights
        )
    written: list[str] = []
    for table in tables:
        place = folder if dialect.needs_model else folder / dialect.path(table.tp)
        notes = write_table(
            table,
            dialect.name,
            place,
            source=source,
            shown=shown / place.relative_to(folder),
            provenance=provenance,
            attachment=attachment,
        )
        written += map(str, notes)
    told = (
        *([provenance.describe()] if provenance else []),
        *attached,
        *found.notes,
        *(text for table in tables for text in _explain(found.table, table, dialect)),
        *written,
    )
    return tuple(dict.fromkeys(told))


def _explain(found: ScaleTable, table: ScaleTable, dialect: Dialect) -> Iterator[str]:
    yield from explain_fit(found, table)
    if dialect.joins_kv:
        yield from explain_joint(table)
    elif not dialect.has_query:
        yield from explain_no_query(table)
    if found.per_head and not table.per_head:
        kept = " or ".join(each.name for each in list_written() if each.per_head)
        yield f"--format {kept} keeps a scale for each head"
