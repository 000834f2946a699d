"""Rules on FP8 weights that an engine does not load as they are, and what they say of a checkpoint.

`facts/weight_rules.json` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from fp8calib.engines.facts.release import FOLDER, Release
from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.numerics.schemes import Granularity, find_nearest

if TYPE_CHECKING:
    from fp8calib.engines.replay.verdicts import Finding
    from fp8calib.engines.weights.blocks import QuantizedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """FP8 weights that an engine does not load as they are; empty fields match everything."""

    status: Status
    """USED for a condition."""
    why: str
    source: str
    """The engine's version and the file that shows it."""
    dialect: str = ""
    """The name of an FP8 dialect."""
    schemes: tuple[str, ...] = ()
    not_mixed: tuple[str, ...] = ()
    """The schemes that are loaded after all under ModelOpt's MIXED_PRECISION."""
    model_types: tuple[str, ...] = ()
    except_model_types: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    """How the paths of the linears end."""
    has_experts: bool = False
    """Only experts."""
    beside: str = ""
    """Only weights that have this tensor, by the last part of its name."""
    granularity: Granularity | None = None
    """Only weights with a scale for each of these."""
    ignore: tuple[str, ...] = ()
    """Values of `quantize --ignore` that leave these linears unquantized."""
    fix: str = ""
    lacking: str = ""
    """The rule holds for releases of which this fact is not true; empty for all."""


def read_weight_rules(release: Release, engine: str) -> tuple[WeightRule, ...]:
    """Read the rules that hold for a release of an engine."""
    rules = _read_rules()[engine]
    return tuple(rule for rule in rules if not (rule.lacking and release.has(rule.lacking)))


@cache
def _read_rules() -> Mapping[str, Sequence[WeightRule]]:
    written = (FOLDER / "weight_rules.json").read_bytes()
    return TypeAdapter(dict[str, list[WeightRule]]).validate_json(written)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRules:
    """How an engine treats parameters beside linears, by model type."""

    bare_types: tuple[str, ...] = ()
    """Types whose tensors it also finds without the first part of their names."""
    headless_types: tuple[str, ...] = ()
    """Types without an output layer: it takes the embedding, and stops at a stored, untied one."""
    untied_types: tuple[str, ...] = ()
    """Types whose output layer may not be tied to the embedding."""
    unties_stored: bool = False
    """It loads a stored `lm_head.weight`, though the config ties it to the embedding."""
    tied_types: tuple[str, ...] = ()
    """Types and classes whose output layer it may make of the embedding."""
    skipped_experts: tuple[str, ...] = ()
    """Types for which it leaves out experts under other names without an error."""
    is_silent: bool = False
    """It compares nothing: it raises no error for a parameter that no tensor fills."""
    is_silent_if_quantized: bool = False
    """The same, where the checkpoint has a quantization config."""


def apply_rules(rules: Iterable[WeightRule], weights: QuantizedWeights) -> Iterator[Finding]:
    """List what the rules of an engine's record say about FP8 weights."""
    from fp8calib.engines.replay.verdicts import Finding  # noqa: PLC0415 -- `--help` has the rules

    model_type = weights.config.get("model_type")
    experts = {
        each.module for group in weights.groups if group.is_experts for each in group.members
    }
    held = {each.module: each.tensors for group in weights.groups for each in group.members}
    names = {each: find_nearest(each).name for each in set(weights.schemes.values())}
    for rule in rules:
        if (
            rule.dialect not in ("", weights.dialect)
            or (rule.model_types and model_type not in rule.model_types)
            or model_type in rule.except_model_types
        ):
            continue
        excepted = rule.not_mixed if weights.is_mixed else ()
        for module, scheme in weights.schemes.items():
            if (
                (not rule.schemes or names[scheme] in rule.schemes)
                and names[scheme] not in excepted
                and (not rule.endings or module.endswith(rule.endings))
                and (not rule.has_experts or module in experts)
                and (not rule.beside or rule.beside in held.get(module, ()))
                and rule.granularity in (None, scheme.weights)
            ):
                why = f"{model_type}: {rule.why}" if rule.model_types else rule.why
                if rule.has_experts or rule.endings:
                    why = f"{why} ({shorten(module)})"
                if options := " ".join(f"--ignore '{pattern}'" for pattern in rule.ignore):
                    why = f"{why}; {options} leaves them unquantized"
                yield Finding(status=rule.status, why=why, fix=rule.fix)
                break
