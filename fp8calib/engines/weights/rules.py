"""Rules on FP8 weights that an engine does not load as they are.

`facts/weight_rules.json` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

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


@cache
def read_weight_rules(release: Release) -> Sequence[WeightRule]:
    """Read the rules that hold for a release of an engine; none where nothing is known of it."""
    if not release.key:
        return ()
    written = (FOLDER / "weight_rules.json").read_bytes()
    rules = TypeAdapter(dict[str, list[WeightRule]]).validate_json(written)[release.key]
    return [rule for rule in rules if not (rule.lacking and release.has(rule.lacking))]
