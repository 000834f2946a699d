"""Print what `fp8calib export` wrote, and who reads it."""

from __future__ import annotations

import shlex

from fp8calib.cli.console import (
    ConsoleReporter,
    list_top_level,
    print_json,
    print_text,
    prints_json,
)
from fp8calib.cli.serving import describe_serving
from fp8calib.cli.setup import quiet_libraries
from fp8calib.commands.export import run
from fp8calib.requests.export import ExportRequest


def run_export(request: ExportRequest) -> None:
    """Write every requested format from statistics alone, and print where the files are."""
    if request.with_weights:
        quiet_libraries()
    with ConsoleReporter() as reporter:
        result = run(request, reporter)
    if prints_json():
        print_json(result.to_json())
        return
    print_text(f"written to {result.out}: {list_top_level(result.files)}")
    if result.serving is None:
        file, model = str(result.out / result.files[0]), str(request.model or "MODEL")
        print_text(f"who reads it: fp8calib check {shlex.quote(file)} --model {shlex.quote(model)}")
        return
    for text in describe_serving(result.model_dump(mode="json")):
        print_text(text)
