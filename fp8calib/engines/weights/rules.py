"""Rules on FP8 weights that an engine does not load as they are, and on names of tensors.

`facts/weight_rules.json` has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from fp8calib.engines.facts.release import FOLDER, Release
from fp8calib.engines.status import Status
from fp8calib.numerics.schemes import Granularity


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
    splits_heads: bool = False
    """Only where the rows of a block do not hold whole heads."""
    ignore: tuple[str, ...] = ()
    """Values of `quantize --ignore` that leave these linears unquantized."""
    fix: str = ""
    lacking: str = ""
    """The rule holds for releases without this fact; empty if it holds for all."""


_WEIGHT_RULES = TypeAdapter(dict[str, list[WeightRule]]).validate_json(
    (FOLDER / "weight_rules.json").read_bytes()
)
"""By engine: those of all its releases."""


def read_weight_rules(release: Release, engine: str) -> tuple[WeightRule, ...]:
    """Read the rules that hold for a release of an engine."""
    rules = _WEIGHT_RULES[engine]
    return tuple(rule for rule in rules if not (rule.lacking and release.has(rule.lacking)))


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
