"""Run `fp8calib export`: write, print."""

from __future__ import annotations

import shlex

from fp8calib.api.export import export
from fp8calib.cli.console import list_top_level, print_json, print_text, prints_json, warn
from fp8calib.cli.serving import describe_serving
from fp8calib.cli.setup import quiet_libraries
from fp8calib.requests.export import ExportRequest
from fp8calib.requests.shared import split_names


def run_export(settings: ExportRequest) -> None:
    """Write every requested format from statistics alone."""
    if settings.with_weights:
        quiet_libraries()
    written = export(
        settings.stats,
        split_names(settings.formats) or (),
        settings.out,
        tp=settings.tp or 1,
        model=settings.model,
        base=settings.base,
        other_weights=settings.other_weights,
        replace_scales=settings.replace_scales,
        rule=settings.rule,
        fallback=settings.fallback,
        fp8_dtype=settings.fp8_dtype,
        query_scale=settings.query_scale,
        with_weights=settings.with_weights,
        force=settings.force,
    )
    for note in written.warnings:
        warn(note)
    files = list(written.files)
    if prints_json():
        report = {"out": str(settings.out), "files": files, "warnings": list(written.warnings)}
        print_json({**report, **written.served})
        return
    print_text(f"written to {settings.out}: {list_top_level(files)}")
    if not written.served:
        file, model = (
            shlex.quote(str(settings.out / files[0])),
            shlex.quote(settings.model or "MODEL"),
        )
        print_text(f"who reads it: fp8calib check {file} --model {model}")
        return
    for text in describe_serving(written.served):
        print_text(text)
