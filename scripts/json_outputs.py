"""What `--json` prints, as types; `json_schemas.py` makes docs/schemas from them.

Records of the program are used where there are some; a `TypedDict` gives the keys of an object
that a command puts together.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from fp8calib.engines.serving import BriefServing, Limitation, ServingCommand
from fp8calib.quantization.rounded_codes import RoundedLinear
from fp8calib.quantization.weight_scales import AllZeroWeight
from fp8calib.run.forward.observed_batches import BackOff
from fp8calib.stats.calibration_stats import Skipped, StatsShard
from fp8calib.stats.saturation import PositionSaturation, Saturation


class Output(TypedDict):
    """What every command prints."""

    schema_version: Literal[1]
    """It rises when a key changes its meaning or goes away."""
    passed: bool
    """False for an error, and where a gate or a check failed."""


class BeforeAfter(TypedDict):
    """Sizes in bytes without and with FP8."""

    before: int
    after: int


# --- who serves it -----------------------------------------------------------------------------


class FormatServing(TypedDict):
    """The command line that serves a format with an engine."""

    format: str
    engine: str
    command: str


class FormatLimitation(TypedDict):
    """Why an engine cannot use a format, or a condition under which it does."""

    format: str
    engine: str
    why: str
    is_blocking: bool


class FormatBriefServing(TypedDict):
    """Whether an engine that is only listed by name serves a format."""

    format: str
    engine: str
    name: str
    command: str


# --- plans and memory --------------------------------------------------------------------------


class MemoryPlan(TypedDict):
    """How a run uses memory; only `streamed` is known where no plan was needed."""

    streamed: bool
    why: NotRequired[str]
    layers: NotRequired[int]
    read_bytes: NotRequired[int]
    peak_bytes: NotRequired[int]
    peak_parts: NotRequired[dict[str, int]]
    memory_limit_bytes: NotRequired[int]
    device_peak_bytes: NotRequired[int | None]
    scratch_bytes: NotRequired[int]
    scratch_folder: NotRequired[str | None]
    expected_s: NotRequired[float | None]


class MeasuredMemory(MemoryPlan):
    """The plan, and the peak that was measured."""

    peak_measured_bytes: int | None


class ShardIndex(TypedDict):
    """Which shard of a run, from 1."""

    index: int
    count: int


class LayerScheme(TypedDict):
    """A pattern that gives linears another scheme, and the number of these linears."""

    pattern: str
    scheme: str
    linears: int


class TextRows(TypedDict):
    """The rows of a text that were used; `examples` are the first ones, as the model sees them."""

    read: int
    used: int
    too_short: int
    cut: int
    conversations: int
    chat_template: str | None
    """sha256 (hex) of the template that was applied."""
    examples: list[str]


class Plan(MemoryPlan):
    """A planned run."""

    model: str
    architecture: NotRequired[str]
    weights_size_bytes: int
    dtype: str
    dtype_why: str
    device: str
    sequences: int
    tokens: int
    shard: NotRequired[ShardIndex]
    data: list[str]
    rows: NotRequired[TextRows | None]
    tasks: NotRequired[list[str]]
    out: NotRequired[str]
    writes: NotRequired[list[str]]
    engine: NotRequired[str]
    candidates: NotRequired[list[str]]
    scheme: NotRequired[str]
    layer_schemes: NotRequired[list[LayerScheme]]
    rounding: NotRequired[str]
    linears: NotRequired[int]
    output_size_bytes: NotRequired[int]
    work_disk_bytes: NotRequired[int]
    expected_fitted_s: NotRequired[float | None]
    """`verify`: the time of a comparison with scales that fit, which runs where scale 1.0 loses
    values and no given scales fit."""


class PlanOutput(Output):
    """`calibrate`, `verify` and `quantize` with `--dry-run --json`."""

    plan: Plan


# --- commands ----------------------------------------------------------------------------------


class Unquantized(TypedDict):
    """A module that was left unquantized."""

    module: str
    why: str


class QuantizeReport(TypedDict):
    """A written FP8 checkpoint."""

    out: str
    files: list[str]
    scheme: str
    layer_schemes: list[LayerScheme]
    format: str
    bytes: BeforeAfter
    duration_s: float
    resumed: list[str]
    quantized: list[str]
    left: list[Unquantized]
    dead: list[AllZeroWeight]
    rounded: list[RoundedLinear]
    has_kv_scales: bool
    notes: list[str]
    kv_bytes_per_token: BeforeAfter | None
    serving: list[ServingCommand]
    limitations: list[Limitation]
    other_engines: list[BriefServing]


class QuantizeOutput(Output, QuantizeReport):
    """`quantize --json`."""


class NotQuantized(TypedDict):
    """Why the recipe's FP8 checkpoint was not written."""

    scheme: str
    why: str


class Coverage(TypedDict):
    """What was observed, and what was not."""

    observed: int
    skipped: list[Skipped]


class ExpertLayer(TypedDict):
    """The tokens that reached the experts of a layer."""

    module: str
    min: int
    median: float
    max: int
    never_reached: list[int]


class Experts(TypedDict):
    """The tokens that reached experts, and the scale of those that none reached."""

    fallback: str
    layers: list[ExpertLayer]


class CalibrateOutput(Output):
    """`calibrate --json`, and report.json."""

    model: str
    command: str
    recipe: str
    data: list[str]
    seq_len: int | None
    rows: TextRows | None
    measured_quantized: str
    architecture: str
    out: str
    files: list[str]
    tokens: int
    sequences: int
    shard: NotRequired[ShardIndex]
    duration_s: float
    tokens_per_s: float
    dtype: str
    dtype_why: str
    device: str
    memory: MeasuredMemory
    batch_size: int
    batch_back_off: list[BackOff]
    resumed_sequences: int
    ranks: int
    rule: str
    coverage: Coverage
    saturation: Saturation | None
    positions: PositionSaturation | None
    expert_tokens: dict[str, list[int]]
    experts: Experts | None
    kv_bytes_per_token: BeforeAfter
    serving: list[FormatServing]
    limitations: list[FormatLimitation]
    other_engines: list[FormatBriefServing]
    warnings: list[str]
    versions: dict[str, str]
    quantize: NotRequired[QuantizeReport | NotQuantized]


class CardOutput(Output):
    """What `card` wrote."""

    path: str
    upload: str
    """The command that uploads the folder."""


class EngineEnvOutput(Output):
    """`engine-env`: the environment of an engine."""

    python: str
    """The path of its Python."""


class ExportOutput(Output):
    """`export --json`; who serves the files is known with --model."""

    out: str
    files: list[str]
    warnings: list[str]
    serving: NotRequired[list[FormatServing]]
    limitations: NotRequired[list[FormatLimitation]]
    other_engines: NotRequired[list[FormatBriefServing]]


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
