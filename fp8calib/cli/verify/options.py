"""Check the options of `fp8calib verify` and resolve their names, before a model is read."""

from __future__ import annotations

from pathlib import Path

from fp8calib.api.verify.dump import is_dump
from fp8calib.api.verify.job import VerifyOptions
from fp8calib.api.verify.run import require_server, resolve_options
from fp8calib.checkpoint.atomic import check_output_file
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.locations import require_path
from fp8calib.checkpoint.output_files import probe_output_files
from fp8calib.cli.console import warn
from fp8calib.errors import UsageError
from fp8calib.requests.verify import VerifyRequest
from fp8calib.render.page.page import is_page


def resolve_settings(settings: VerifyRequest) -> VerifyOptions:
    """Check the options that need no model, and resolve their names.

    Raises:
        UsageError: an option is invalid, or names something unknown.
        ModelError: a candidate's folder links to files outside of it.
    """
    outputs = [path for path in (settings.dump, settings.report) if path is not None]
    if settings.strict and settings.gate is None:
        raise UsageError("--strict has no effect without --gate", hint="add --gate kv or w8a8")
    _check_outputs(settings)
    _check_server_options(settings)
    return resolve_options(
        settings.scales,
        engine=settings.engine,
        scheme=settings.scheme,
        rules=settings.rules,
        sensitivity=settings.sensitivity,
        fp8_dtype=settings.fp8_dtype,
        batch_size=settings.batch_size,
        gate=settings.gate,
        tasks=settings.tasks,
        limit=settings.limit,
        with_faults=settings.server is not None,
        writes_text=settings.sampled and settings.reference_server is None,
        with_histograms=settings.report is not None,
        scratch=outputs[0].absolute().parent if outputs else None,
    )


def _check_server_options(settings: VerifyRequest) -> None:
    named = {
        "--server-model": settings.server_model,
        "--server-kind": settings.server_kind,
        "--sampled": settings.sampled,
        "--reference-server": settings.reference_server,
        "--reference-dump": settings.reference_dump,
    }
    require_server(settings.server, named)
    of_reference = {"--reference-server-model": settings.reference_server_model}
    require_server(settings.reference_server, of_reference, "--reference-server")
    if settings.reference_dump is None:
        return
    require_path(settings.reference_dump, option="--reference-dump")
    read_header(settings.reference_dump)  # before the server is asked
    ignored = {
        "--scales": settings.scales,
        "--scheme": settings.scheme,
        "--tasks": settings.tasks,
        "--sensitivity": settings.sensitivity,
        "--rules": settings.rules,
        "--dry-run": settings.dry_run,
        "--sampled": settings.sampled,
    }
    if found := [option for option, value in ignored.items() if value]:
        raise UsageError(
            f"{found[0]} has no effect with --reference-dump: nothing is computed here",
            hint=f"give {found[0]} to the run that wrote the dump",
        )


def _check_outputs(settings: VerifyRequest) -> None:
    """Refuse outputs that cannot be written or would replace an input, before hours of work.

    Raises:
        UsageError: naming the path.
    """
    kinds = ((settings.report, is_page, "no page"), (settings.dump, is_dump, "no dump"))
    outputs = [path for path, _, _ in kinds if path is not None]
    if settings.force and not outputs:
        warn("--force has no effect without --report or --dump")
    for path in outputs:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder: {path.parent}")
        check_output_file(path, force=settings.force)
        for name in (settings.model, *settings.scales, *(settings.data or ())):
            _refuse_input(path, Path(name))
    for output, is_ours, other in kinds:
        if output is not None and output.exists() and output.stat().st_size and not is_ours(output):
            raise UsageError(
                f"{output}: exists, and is {other} of verify", hint="name another file"
            )
    if len(outputs) > 1 and outputs[0].resolve() == outputs[1].resolve():
        raise UsageError(f"--report and --dump are both {outputs[0]}")
    probe_output_files(outputs)


def _refuse_input(path: Path, source: Path) -> None:
    try:
        is_inside = source.exists() and path.resolve().is_relative_to(source.resolve())
    except (OSError, ValueError):
        return
    if is_inside and (path.exists() or source.is_file()):
        raise UsageError(f"{path} would replace an input", hint="name another file")
