"""What `--json` prints, as types; `json_schemas.py` makes docs/schemas from them.

Records of the program are used where there are some; a `TypedDict` gives the keys of an object
that a command puts together.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from fp8calib.stats.calibration_stats import Skipped, StatsShard


class Output(TypedDict):
    """What every command prints."""

    schema_version: Literal[1]
    """It rises when a key changes its meaning or goes away."""
    passed: bool
    """False for an error, and where a gate or a check failed."""


class CardOutput(Output):
    """What `card` wrote."""

    path: str
    upload: str
    """The command that uploads the folder."""


class EngineEnvOutput(Output):
    """`engine-env`: the environment of an engine."""

    python: str
    """The path of its Python."""


class StatsHeaderShown(TypedDict):
    """The run that statistics belong to."""

    kind: str
    schema_version: int
    model_fingerprint: str
    data_fingerprint: str
    data_sources: list[str]
    num_sequences: int
    num_tokens: int
    recipe_name: str
    recipe_hash: str
    compute_dtype: str
    histogram_sequences: int
    input_histogram_tokens: int
    skipped: list[Skipped]
    versions: dict[str, str]
    unquantized: NotRequired[dict[str, str]]
    measured_quantized: NotRequired[str]


LayerRow = TypedDict(
    "LayerRow",
    {
        "layer": int,
        "mixer": str,
        "k amax": float | None,
        "k scale": float | None,
        "v amax": float | None,
        "v scale": float | None,
        "q amax": float | None,
        "q scale": float | None,
        "tokens": int | None,
    },
)
LinearRow = TypedDict(
    "LinearRow",
    {
        "linear": str,
        "input amax": float | None,
        "input scale": float | None,
        "weight amax": float | None,
        "weight scale": float | None,
        "tokens": int | None,
    },
)


class Positions(TypedDict):
    """The amax of each site by ranges of positions."""

    first: list[int]
    amax: dict[str, list[float]]


class ShowStatsOutput(Output):
    """`show STATS --json`."""

    header: StatsHeaderShown
    part: StatsShard | None
    layers: list[LayerRow]
    linears: list[LinearRow]
    experts: dict[str, list[int]]
    positions: Positions


class ShowScalesOutput(Output):
    """`show SCALES --json`: NaN, infinities, and large tensors are text."""

    scales: dict[str, list[float | str] | str]


class RecipeKey(TypedDict):
    """A key of a recipe."""

    default: str
    description: str


class RecipeListOutput(Output):
    """`recipes --json`: name and purpose."""

    recipes: dict[str, str]


class RecipeOutput(Output):
    """`recipes NAME --json`."""

    recipe: dict[str, Any]
    schema: dict[str, RecipeKey]


class Error(TypedDict):
    """What failed and where, and what to do."""

    kind: Literal[
        "usage", "recipe", "model", "data", "calibration", "export", "verification", "server", "bug"
    ]
    message: str
    hint: str


class ErrorOutput(Output):
    """Every command with `--json` that fails with an error."""

    error: Error
