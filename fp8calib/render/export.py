"""The files that `export` wrote, and who reads them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.render.serving import describe_serving, list_top_level
from fp8calib.requests.export import ExportRequest
from fp8calib.results.export import ExportResult


def describe(result: ExportResult, request: ExportRequest) -> Iterator[Block]:
    """Describe where the files are, and who serves them."""
    yield Line(f"written to {result.out}: {list_top_level(result.files)}")
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    if result.serving is None:
        file, model = str(result.out / result.files[0]), str(request.model or "MODEL")
        check = f"fp8calib check {shlex.quote(file)} --model {shlex.quote(model)}"
        yield Line(f"who reads it: {check}")
    else:
        yield from map(Line, describe_serving(result.model_dump(mode="json")))
