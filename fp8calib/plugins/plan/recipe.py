"""A plan as a recipe that `quantize`, `calibrate` and `export` read, and as commands."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.origin import STATS_NAME
from fp8calib.commands.check_planned import replay_settings
from fp8calib.commands.options import FORMATS
from fp8calib.commands.recipe import Quantize
from fp8calib.errors import VerificationError
from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import IN_16_BITS, Plan, Unit, choice_of
from fp8calib.plugins.plan.inputs import OpenedPlan

RECIPE_NAME = "recipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScheme:
    """What `quantize` is asked, and how the KV cache is served."""

    quantize: Quantize | None
    """None where all linears stay in 16 bits."""
    rules: Mapping[str, str]
    """Rules other than amax, by site of K or V."""
    has_kv: bool
    """Whether the KV cache of some layer is quantized."""
    plain_caches: tuple[int, ...]
    """The layers whose cache then stays in 16 bits."""


def make_planned_scheme(units: Sequence[Unit], plan: Plan) -> PlannedScheme:
    """Describe a plan by patterns: the scheme of most linears is the default."""
    chosen = {linear: choice_of(unit, plan) for unit in units for linear in unit.linears}
    counts = Counter(name for name in chosen.values() if name != IN_16_BITS)
    caches = [unit for unit in units if unit.sites]
    plain = [unit for unit in caches if choice_of(unit, plan) == IN_16_BITS]
    sites = {str(site) for unit in caches for site in unit.sites}
    has_kv = len(plain) < len(caches)
    layers = tuple(sorted(layer for unit in plain for layer in unit.layers)) if has_kv else ()
    quantize = None
    if counts:
        default = counts.most_common(1)[0][0]
        folded = dict(_fold(chosen))
        quantize = Quantize(
            scheme=default,
            layer_schemes={p: n for p, n in folded.items() if n not in (default, IN_16_BITS)},
            ignore=tuple(path for path, name in folded.items() if name == IN_16_BITS),
            kv_cache_dtype_skip_layers=layers,
        )
    return PlannedScheme(
        quantize=quantize,
        rules={site: rule for site, rule in plan.items() if site in sites and rule != str(AMAX)},
        has_kv=has_kv,
        plain_caches=layers,
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


def require_loaded(opened: OpenedPlan, planned: PlannedScheme, stats: RunStats) -> None:
    """Refuse a plan that an engine does not load, as `check` judges what would be written."""
    if planned.quantize is None:
        return
    used = stats if planned.has_kv else stats.without_kv()
    settings, folder = planned.quantize.make_settings(), opened.model.source.folder
    _, reports, unchecked = replay_settings(folder, settings, used, opened.engines)
    for engine, report in reports.items():
        if why := report.fault:
            hint = "use one --scheme, or another --engine"
            raise VerificationError(f"{engine} does not load the plan: {why}", hint=hint)
    if unchecked:
        raise VerificationError(unchecked)


def spell_recipe(opened: OpenedPlan, planned: PlannedScheme) -> str:
    """Spell the recipe as YAML."""
    engines = ", ".join(engine.key for engine in opened.engines)
    served = opened.engines[0].spell_skip(planned.plain_caches)
    document: dict[str, Any] = {
        "name": "planned",
        "description": f"A plan for {engines}: {opened.budget.name}. {served}".rstrip(),
        "observe": {"kv": planned.has_kv, "query": False, "inputs": True, "weights": True},
        "data": {"samples": opened.request.samples},
        "scales": {"rules": dict(planned.rules)},
        "formats": [] if planned.quantize else list(FORMATS.key_default),
        "quantize": planned.quantize and planned.quantize.model_dump(mode="json"),
    }
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    command = spell_write(opened, planned)
    return f"# Written by fp8calib plan. This command writes what it says:\n#     {command}\n{text}"


def spell_write(opened: OpenedPlan, planned: PlannedScheme) -> str:
    """Spell the command that writes the checkpoint, or the overlay of a cache; empty for none."""
    model, out = (shlex.quote(str(each)) for each in (opened.request.model, f"{opened.out}-fp8"))
    recipe = shlex.quote(str(opened.out / RECIPE_NAME))
    given = shlex.quote(str(opened.request.stats or opened.out / STATS_NAME))
    if planned.quantize is not None:
        if opened.request.revision is not None:
            model += f" --revision {shlex.quote(opened.request.revision)}"
        return f"fp8calib quantize {model} --scheme {recipe} --stats {given} --out {out}"
    if not planned.has_kv:
        return ""
    return f"fp8calib export {given} --recipe {recipe} --model {model} --out {out}"


def spell_serve(opened: OpenedPlan, planned: PlannedScheme) -> str:
    """Spell the command that serves it with the first engine; empty without one."""
    engine = opened.engines[0]
    if planned.quantize is None and not planned.has_kv:
        return ""
    folder = f"{opened.out}-fp8" if planned.quantize else f"{opened.out}-fp8/kv-overlay"
    return engine.spell_launch(
        folder,
        has_kv=planned.has_kv,
        trusts_code=opened.request.trust_remote_code,
        plain_caches=planned.plain_caches,
    )
