"""Write an FP8 checkpoint shard by shard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import ProgressCallback, Reporter, as_function, option, request_class
from fp8calib.commands.result import BeforeAfter, Result, WrittenCheck, describe_written
from fp8calib.errors import RecipeError, UsageError, cut_list
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.registry import find_written, list_written_fp8
from fp8calib.model.geometry import Frozen, ModelGeometry
from fp8calib.numerics.rules import PLAIN_RULES
from fp8calib.numerics.schemes import SCHEMES, find_scheme
from fp8calib.quantization.matrices import AllZeroWeight
from fp8calib.text import Block, Line

if TYPE_CHECKING:
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.commands.calibrate import CalibrateRequest
    from fp8calib.commands.recipe import Recipe
    from fp8calib.quantization.plan import QuantizePlan
    from fp8calib.quantization.settings import PlanSettings
    from fp8calib.quantization.write import Written

_SHOWN = 5
_BY_PATTERN = "--ignore "
"""How the reason of a linear begins that a pattern leaves out."""


def _list_dialects() -> Iterator[str]:
    """Name the dialects that can be written, and the schemes of those that cannot express all."""
    for dialect in list_written_fp8():
        only = "" if len(dialect.schemes) == len(SCHEMES) else f" ({', '.join(dialect.schemes)})"
        yield f"{dialect.name}{only}"


def _read_layer_schemes(texts: Sequence[str]) -> dict[str, str]:
    """Read the names of schemes by pattern; the last one of a pattern counts."""
    found: dict[str, str] = {}
    for text in texts:
        pattern, _, scheme = text.rpartition("=")
        if not pattern or not scheme:
            raise UsageError(f"--layer-scheme {text}: must be PATTERN=SCHEME")
        found[pattern] = find_scheme(scheme, option=f"--layer-scheme {scheme}").name
    return found


@request_class
class QuantizeRequest:
    """Write an FP8 checkpoint shard by shard, without loading the model.

    Example: fp8calib quantize meta-llama/Llama-3.1-8B-Instruct --scheme fp8-dynamic --out llama-fp8
    """

    model: shared.Model = option(shared.UNQUANTIZED)
    scheme: str = option(
        "--scheme",
        "".join(f"{each.name}: {each.description}. " for each in SCHEMES.values())
        + "Or a recipe: a file with a section quantize.",
        metavar="|".join([*SCHEMES, "RECIPE"]),
    )
    out: str | Path = option("--out DIR", "Output folder of the FP8 checkpoint.", reads=Path)
    _: KW_ONLY
    stats: shared.Stats | None = option(shared.STATS, default=None)
    dialect: str = option(
        "--format",
        f"{', '.join(_list_dialects())}; default: the first.",
        metavar="|".join(dialect.name for dialect in list_written_fp8()),
        default=COMPRESSED_TENSORS.name,
    )
    layer_schemes: Mapping[str, str] | None = option(
        "--layer-scheme PATTERN=SCHEME",
        "Another scheme by patterns as of --ignore; repeat: the first match counts.",
        reads=list[str],
        collect=_read_layer_schemes,
        default=None,
    )
    ignore: Sequence[str] | None = option(
        "--ignore PATTERN",
        "Leave modules in 16 bits: a path, a glob, or re:REGEX of the whole path; repeat for more. "
        "Heads, embeddings, norms, routers, towers and projectors always stay so.",
        reads=list[str],
        default=None,
    )
    drafters: bool = option(
        "--drafters", "Quantize drafters (multi-token prediction) too.", default=False
    )
    allow_unservable: bool = option(
        "--allow-unservable",
        "Write it even if vLLM and SGLang cannot load it.",
        default=False,
    )
    device: str = option(
        "--device auto|cpu|cuda[:i]",
        "Device to compute on; default: auto, the CPU.",
        default="auto",
    )
    resume: bool = option("--resume", "Continue after the last finished shard.", default=False)
    revision: str | None = option(shared.REVISION, default=None)
    check: bool = option(shared.CHECK, default=True)
    force: bool = option(shared.FORCE, default=False)
    tokenizer: Any = option(shared.TOKENIZER, default=None)
    progress: ProgressCallback | None = option(shared.PROGRESS, default=None)

    def on_command_line(self) -> QuantizeRequest:
        """Refuse a scheme that the format cannot express."""
        if not self.names_recipe:
            find_written(self.dialect, find_scheme(self.scheme))
        return self

    @property
    def names_recipe(self) -> bool:
        """Whether the scheme is a recipe's."""
        return self.scheme.endswith((".yaml", ".yml"))


# --- the result ---------------------------------------------------------------------------------


class LayerScheme(Frozen):
    """A pattern that gives linears another scheme, and the number of these linears."""

    pattern: str
    scheme: str
    linears: int

    def __str__(self) -> str:
        return f"{self.pattern}={self.scheme} ({self.linears} linears)"


class UnquantizedLinear(Frozen):
    """A module that was left unquantized."""

    module: str
    why: str


class QuantizeResult(Result):
    """A written FP8 checkpoint: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`."""
    scheme: str
    layer_schemes: tuple[LayerScheme, ...]
    format: str
    bytes: BeforeAfter
    duration_s: float
    resumed: tuple[str, ...]
    quantized: tuple[str, ...]
    left: tuple[UnquantizedLinear, ...]
    dead: tuple[AllZeroWeight, ...]
    has_kv_scales: bool
    notes: tuple[str, ...]
    kv_bytes_per_token: BeforeAfter | None
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""


# --- the run --------------------------------------------------------------------------------------


def run(request: QuantizeRequest, reporter: Reporter) -> QuantizeResult:
    """Quantize a checkpoint.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        RecipeError: the recipe that the scheme names is invalid.
        ExportError: the statistics do not fit, no engine can load the checkpoint, or the disk
            cannot hold it.
    """
    with slow_imports():
        import torch

        from fp8calib.checkpoint.checkpoint import Checkpoint
        from fp8calib.checkpoint.hub import find_folder
        from fp8calib.commands.check_planned import plan_checkpoint, require_servable
        from fp8calib.commands.model_folder import saved_model
        from fp8calib.model.device import choose_device
        from fp8calib.quantization.write import find_finished, write_checkpoint
    out = Path(request.out)
    settings, recipe = open_settings(request, measures_inputs=request.stats is not None)
    stats, inputs = None, list[Path]()
    if request.stats is not None:
        from fp8calib.commands.stats import read_stats

        stats, inputs = read_stats(request.stats)
        if recipe and not recipe.observe.kv:
            stats = stats.without_kv()
    rules = recipe.scales.choice if recipe else PLAIN_RULES
    with saved_model(request.model, out, request.tokenizer, warn=reporter.warn) as model:
        folder = find_folder(model, request.revision)
        with Checkpoint.open(folder) as checkpoint:
            plan = plan_checkpoint(checkpoint, settings, stats, rules)
            geometry = None
            if not request.allow_unservable:
                note, geometry = require_servable(plan, folder)
                if note:
                    reporter.warn(note)
            started = time.monotonic()
            written = find_finished(out, plan) if request.resume else None
            if written is not None:
                reporter.say(f"{out} is finished already")
            else:
                reporter.stage("quantizing", plan.data_bytes, unit="bytes")
                device = "cpu" if request.device == "auto" else choose_device(request.device)
                written = write_checkpoint(
                    *(checkpoint, plan, out),
                    device=torch.device(device),
                    advance=reporter.advance,
                    resume=request.resume,
                    force=request.force,
                    inputs=inputs,
                )
            result = finish_quantized(
                *(request, checkpoint, plan, written),
                folder=out,
                started=started,
                geometry=geometry,
            )
    for text in (*result.notes, *map(str, result.dead)):
        reporter.warn(text)
    return result


def open_settings(
    request: QuantizeRequest, *, measures_inputs: bool = True
) -> tuple[PlanSettings, Recipe | None]:
    """Make the settings of a request, which leaves the rest to the recipe that it names, if any.

    `measures_inputs` tells whether the scales of static inputs are known, or will be.
    """
    from fp8calib.quantization.settings import make_settings

    recipe, asked = None, None
    if request.names_recipe:
        from fp8calib.commands.recipe import load_recipe

        recipe = load_recipe(request.scheme)
        if (asked := recipe.quantize) is None:
            raise RecipeError(
                f"{request.scheme}: it has no section quantize",
                hint="name a scheme, or a recipe that writes a checkpoint",
            )
    settings = make_settings(
        asked.scheme if asked else request.scheme,
        request.layer_schemes or (asked.layer_schemes if asked else None),
        request.ignore or (asked.ignore if asked else None),
        dialect=request.dialect,
        drafters=request.drafters,
        plain_caches=asked.kv_cache_dtype_skip_layers if asked else (),
        measures_inputs=measures_inputs,
    )
    return settings, recipe


def list_layer_schemes(plan: QuantizePlan) -> tuple[LayerScheme, ...]:
    """List the patterns that give linears another scheme, with the number of these linears."""
    settings = plan.settings
    counts = Counter(settings.pattern_of(matrix.module) for matrix in plan.selection.quantized)
    return tuple(
        LayerScheme(pattern=pattern, scheme=name, linears=counts[pattern])
        for pattern, name in settings.layer_schemes.items()
    )


def finish_quantized(
    request: QuantizeRequest | CalibrateRequest,
    checkpoint: Checkpoint,
    plan: QuantizePlan,
    written: Written,
    *,
    folder: Path,
    target: Path | None = None,
    path: str = ".",
    started: float,
    geometry: ModelGeometry | None,
    notes: Sequence[str] = (),
) -> QuantizeResult:
    """Look at a written checkpoint as `check` does, write its card, and make the result.

    It is at `path` in the output folder, which is `folder` now and will be `target` (None: it is
    there). `started` is what time.monotonic() gave at the start, `geometry` the shape of the model
    if it is known.
    """
    from fp8calib.checkpoint.output import list_files
    from fp8calib.commands.check_written import finish_checkpoint

    scheme, plain_caches = plan.settings.scheme.name, plan.settings.plain_caches
    others = list_layer_schemes(plan) if plan.settings.by_pattern else ()
    names = dict.fromkeys([scheme, *(each.scheme for each in others)])
    checked = finish_checkpoint(
        *(folder, target or folder, ", ".join(names), request.model),
        path=path,
        revision=request.revision,
        check=request.check,
        plain_caches=plain_caches,
    )
    return QuantizeResult(
        out=(target or folder) / path,
        files=list_files(folder / path),
        scheme=scheme,
        layer_schemes=others,
        format=plan.settings.dialect.name,
        bytes=BeforeAfter(before=checkpoint.total_size_bytes, after=plan.data_bytes),
        duration_s=time.monotonic() - started,
        resumed=written.resumed,
        quantized=tuple(matrix.module for matrix in plan.selection.quantized),
        left=tuple(
            UnquantizedLinear(module=item.module, why=item.why)
            for item in plan.selection.unquantized
        ),
        dead=written.all_zero,
        has_kv_scales=plan.has_kv,
        notes=(
            *plan.notes,
            *notes,
            *(f"{name}: not copied: {why}" for name, why in plan.skipped.items()),
        ),
        kv_bytes_per_token=(
            None if geometry is None or plain_caches else BeforeAfter.of_kv_cache(geometry)
        ),
        checked=checked,
    )


def describe(result: QuantizeResult, request: QuantizeRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe the checkpoint and what engines do with it."""
    others: Counter[str] = Counter()
    for each in result.layer_schemes:
        others[each.scheme] += each.linears
    schemes = ", ".join([result.scheme, *(f"{number} {name}" for name, number in others.items())])
    yield Line(
        f"{len(result.quantized)} linears quantized ({schemes}, {result.format}), weights "
        f"{result.bytes}, {result.duration_s:.1f} s"
    )
    reasons: dict[str, list[str]] = {}
    for item in result.left:
        reasons.setdefault(item.why, []).append(item.module)
    ignored = [reason for reason in reasons if reason.startswith(_BY_PATTERN)]
    if len(ignored) > _SHOWN:  # as a plan's recipe has them: one for each linear
        reasons[_BY_PATTERN.strip()] = [n for reason in ignored for n in reasons.pop(reason)]
    for reason, names in reasons.items():
        yield Line(f"  not quantized ({reason}): {cut_list(names, _SHOWN)}")
    if (sizes := result.kv_bytes_per_token) is not None:
        scales = "its own scales" if result.has_kv_scales else "scale 1.0"
        yield Line(f"{sizes.describe_kv_cache()}, which uses {scales}")
    yield from describe_written(result.out, result.files, result.checked)


quantize = as_function("quantize", QuantizeRequest, run)
