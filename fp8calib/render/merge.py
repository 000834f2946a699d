"""Print what `fp8calib merge` wrote, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.requests.merge import MergeRequest
from fp8calib.results.merge import MergeResult


def describe(result: MergeResult, request: MergeRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe what was joined, and spell the next commands."""
    yield Line(result.overview().title)
    yield from map(Line, _suggest_commands(result))


def _suggest_commands(result: MergeResult) -> Iterator[str]:
    """Spell the commands that write an overlay and serve it, for the model of the shards."""
    folder = result.out.parent / "scales"
    model = shlex.quote(result.model)
    target = shlex.quote(str(folder))
    stats = shlex.quote(str(result.out))
    export = f"fp8calib export {stats} --format kv-overlay --model {model} --out {target}"
    yield f"write scales:\n    {export}"
    overlay = str(folder / find_dialect("kv-overlay").path())
    for engine in map(find_replayed, list_defaults()):
        if engine.launch is not None:
            yield f"then serve with {engine.title}:\n    {engine.launch.spell(overlay)}"
