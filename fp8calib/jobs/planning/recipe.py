"""A plan as a recipe that `quantize` and `calibrate` take, and as the commands that use it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.options.recipe_keys import FORMATS
from fp8calib.recipe import Quantize
from fp8calib.verification.planning.arrays import Plan
from fp8calib.verification.planning.choices import IN_16_BITS, Group

RECIPE_NAME = "recipe.yaml"
_HEAD = """\
# Written by fp8calib plan. This command writes what it says:
#     {command}
"""
_OVERLAY = "kv-overlay"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScheme:
    """What `quantize` is asked, and how the KV cache is served."""

    quantize: Quantize | None
    """None where all linears stay in 16 bits."""
    caches: tuple[int, ...] = ()
    """The layers whose KV cache is quantized."""
    plain_caches: tuple[int, ...] = ()
    """Those whose cache stays in 16 bits."""


def make_planned_scheme(groups: Sequence[Group], plan: Plan) -> PlannedScheme:
    """Describe a plan by patterns: the scheme of most linears is the default."""
    pairs = [(g, g.choices[c].name) for g, c in zip(groups, plan, strict=True)]
    chosen = {linear: name for group, name in pairs for linear in group.linears}
    counts = Counter(name for name in chosen.values() if name != IN_16_BITS)
    made = None
    if counts:
        default = counts.most_common(1)[0][0]
        folded = dict(_fold(chosen))
        others = {p: name for p, name in folded.items() if name not in (default, IN_16_BITS)}
        made = Quantize(
            scheme=default,
            layer_schemes=others,
            ignore=tuple(p for p, name in folded.items() if name == IN_16_BITS),
        )
    layers: dict[bool, list[int]] = {True: [], False: []}
    for group, name in pairs:
        layers[name == IN_16_BITS] += group.layers if group.is_cache else ()
    return PlannedScheme(
        quantize=made, caches=tuple(layers[False]), plain_caches=tuple(sorted(layers[True]))
    )


def _fold(chosen: Mapping[str, str], parent: str = "") -> Iterator[tuple[str, str]]:
    """Name a module in place of all linears in it that have one scheme."""
    below: dict[str, dict[str, str]] = {}
    for linear, name in chosen.items():
        rest = linear.removeprefix(f"{parent}.") if parent else linear
        path = f"{parent}.{rest.partition('.')[0]}" if parent else rest.partition(".")[0]
        below.setdefault(path, {})[linear] = name
    for path, inside in below.items():
        if len(set(inside.values())) == 1 and any(part.isdecimal() for part in path.split(".")):
            yield path, next(iter(inside.values()))
        elif len(inside) == 1:
            yield next(iter(inside.items()))
        else:
            yield from _fold(inside, path)


def spell_recipe(opened: OpenedPlan, planned: PlannedScheme, command: str, budget: str) -> str:
    """Spell the recipe as YAML."""
    request = opened.request
    document = {
        "name": "planned",
        "description": f"A plan for {', '.join(e.key for e in opened.engines)}: {budget}.",
        "observe": {
            "kv": bool(planned.caches),
            "query": False,
            "inputs": True,
            "weights": True,
        },
        "data": {"samples": request.samples},
        "formats": [] if planned.quantize else list(FORMATS.default),
        "quantize": None if planned.quantize is None else _spell_quantize(planned),
    }
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return _HEAD.format(command=command) + text


def _spell_quantize(planned: PlannedScheme) -> dict[str, Any]:
    """Spell the section of the schemes, with the cache to serve with."""
    assert planned.quantize is not None  # noqa: S101 -- the caller looked
    served: dict[str, Any] = {}
    if planned.caches:
        served["kv_cache_dtype_skip_layers"] = list(planned.plain_caches)
    return planned.quantize.model_dump(mode="json") | served


def spell_write(opened: OpenedPlan, planned: PlannedScheme, stats: str) -> str:
    """Spell the command that writes the checkpoint, or the overlay of a cache; empty for none."""
    model, out = (shlex.quote(str(each)) for each in (opened.request.model, f"{opened.out}-fp8"))
    recipe, given = shlex.quote(str(opened.out / RECIPE_NAME)), shlex.quote(stats)
    if planned.quantize is not None:
        return f"fp8calib quantize {model} --scheme {recipe} --stats {given} --out {out}"
    if not planned.caches:
        return ""
    return f"fp8calib export {given} --format {_OVERLAY} --model {model} --out {out}"


def spell_serve(opened: OpenedPlan, planned: PlannedScheme) -> str:
    """Spell the command that serves it with the first engine; empty without one."""
    engine = opened.engines[0]
    if engine.launch is None or (planned.quantize is None and not planned.caches):
        return ""
    folder = f"{opened.out}-fp8" if planned.quantize else f"{opened.out}-fp8/{_OVERLAY}"
    command = engine.launch.spell(folder, has_kv=bool(planned.caches))
    left = planned.plain_caches if planned.caches else ()
    return f"{command} {opened.numerics.spell_skip(left)}".rstrip()
