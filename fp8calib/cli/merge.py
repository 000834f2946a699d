"""Print what `fp8calib merge` wrote, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.cli.console import ConsoleReporter, print_json, print_text, prints_json
from fp8calib.commands.merge import run
from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.errors import ModelError
from fp8calib.requests.merge import MergeRequest
from fp8calib.results.merge import MergeResult
from fp8calib.stats.calibration_stats import REPORT_NAME


def run_merge(request: MergeRequest) -> None:
    """Join the shards, and print what was joined."""
    result = run(request, ConsoleReporter())
    if prints_json():
        print_json(result.to_json())
        return
    print_text(result.overview().title)
    for text in _suggest_commands(result):
        print_text(text)


def _suggest_commands(result: MergeResult) -> Iterator[str]:
    """Spell the commands that write an overlay and serve it, for the model of the shards."""
    folder = result.out.parent / "scales"
    model = shlex.quote(_find_model(result))
    target = shlex.quote(str(folder))
    stats = shlex.quote(str(result.out))
    export = f"fp8calib export {stats} --format kv-overlay --model {model} --out {target}"
    yield f"write scales:\n    {export}"
    overlay = str(folder / find_dialect("kv-overlay").path())
    for engine in map(find_replayed, list_defaults()):
        if engine.launch is not None:
            yield f"then serve with {engine.title}:\n    {engine.launch.spell(overlay)}"


def _find_model(result: MergeResult) -> str:
    """Find the model in the reports beside the shards; MODEL where they have none."""
    for file in result.parts:
        try:
            report = load_json_object(file.parent / REPORT_NAME)
        except ModelError:
            continue
        model = report.get("model")
        if isinstance(model, str):
            return model
    return "MODEL"
