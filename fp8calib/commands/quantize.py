"""Write an FP8 checkpoint shard by shard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.disk import format_size
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.option import Option
from fp8calib.commands.result import (
    BeforeAfter,
    LayerScheme,
    Overview,
    Record,
    Result,
    WrittenCheck,
    describe_checks,
    list_top_level,
)
from fp8calib.errors import UsageError, cut_list
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.registry import find_written, list_written
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.numerics.schemes import SCHEMES, find_scheme
from fp8calib.quantization.all_zero import AllZeroWeight
from fp8calib.text import Block, Line

_SHOWN = 5
_BY_PATTERN = "--ignore "
"""How the reason of a linear begins that a pattern leaves out."""


def _list_schemes() -> Iterator[str]:
    return (f"{scheme.name}: {scheme.description}" for scheme in SCHEMES.values())


def _list_dialects() -> Iterator[str]:
    """Name the dialects that can be written, and the schemes of those that cannot express all."""
    for dialect in list_written():
        only = "" if len(dialect.schemes) == len(SCHEMES) else f" ({', '.join(dialect.schemes)})"
        yield f"{dialect.name}{only}"


def _read_layer_schemes(texts: Sequence[str]) -> dict[str, str]:
    """Read the names of schemes by pattern.

    Raises:
        UsageError: a scheme or a pattern is missing, or a pattern is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        pattern, _, scheme = text.rpartition("=")
        if not pattern or not scheme:
            raise UsageError(f"--layer-scheme {text}: must be PATTERN=SCHEME")
        if pattern in found:
            raise UsageError(f"--layer-scheme {pattern}: is given twice")
        found[pattern] = scheme
    return found


def _check_layer_schemes(by_pattern: Mapping[str, str]) -> None:
    for name in by_pattern.values():
        find_scheme(name, option=f"--layer-scheme {name}")


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Write an FP8 checkpoint shard by shard, without loading the model.

    Example: fp8calib quantize meta-llama/Llama-3.1-8B-Instruct --scheme fp8-dynamic --out llama-fp8
    """

    model: shared.UnquantizedModel
    scheme: Annotated[
        str,
        Option(
            "--scheme",
            metavar="|".join([*SCHEMES, "RECIPE"]),
            help=f"{'. '.join(_list_schemes())}. Static inputs need --stats. "
            "Or a recipe, such as plan writes: a file with a section quantize.",
        ),
    ]
    out: Annotated[
        str | Path,
        Option("--out", metavar="DIR", reads=Path, help="Output folder of the FP8 checkpoint."),
    ]
    _: KW_ONLY
    stats: shared.StatsOption = None
    dialect: Annotated[
        str,
        Option(
            "--format",
            metavar="|".join(dialect.name for dialect in list_written()),
            help=f"{', '.join(_list_dialects())}.",
        ),
    ] = COMPRESSED_TENSORS.name
    layer_schemes: Annotated[
        Mapping[str, str] | None,
        Option(
            "--layer-scheme",
            metavar="PATTERN=SCHEME",
            reads=list[str],
            collect=_read_layer_schemes,
            check=_check_layer_schemes,
            help="Another scheme for the linears that a pattern like those of --ignore matches; "
            "repeat for more: the first pattern that matches counts.",
        ),
    ] = None
    ignore: Annotated[
        Sequence[str] | None,
        Option(
            "--ignore",
            metavar="PATTERN",
            reads=list[str],
            help="Leave a module and its submodules unquantized: a path, a glob, or re: and a "
            "regular expression that matches the whole path; repeat for more. Heads, embeddings, "
            "norms, routers, towers and projectors are never quantized.",
        ),
    ] = None
    allow_unservable: Annotated[
        bool,
        Option(
            "--allow-unservable",
            help="Write the checkpoint even if vLLM and SGLang cannot load it.",
        ),
    ] = False
    dequantize: Annotated[
        bool,
        Option(
            "--dequantize",
            help="Accept a MODEL with FP8 weights: dequantize them first.",
        ),
    ] = False
    device: Annotated[
        str,
        Option(
            "--device",
            metavar="auto|cpu|cuda[:i]",
            help="Device to compute on; auto is the CPU, which is faster than the disk.",
        ),
    ] = "auto"
    resume: Annotated[
        bool,
        Option("--resume", help="Continue an interrupted run after its last finished shard."),
    ] = False
    revision: shared.RevisionOption = None
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None
    progress: shared.ProgressArgument = None

    def on_command_line(self) -> QuantizeRequest:
        """Refuse a scheme that the format cannot express."""
        if not self.names_recipe:
            find_written(self.dialect, find_scheme(self.scheme))
        return self

    @property
    def names_recipe(self) -> bool:
        """Whether the scheme is a recipe's."""
        return self.scheme.endswith((".yaml", ".yml"))


class UnquantizedLinear(Record):
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

    def describe_bytes(self) -> str:
        """Describe the size of the weights before and after."""
        return f"{format_size(self.bytes.before)} -> {format_size(self.bytes.after)}"

    def describe_dead(self) -> tuple[str, ...]:
        """Describe the weights with scales that cover zeros alone."""
        return tuple(
            f"{each.tensor}: all zeros in {each.count} of {each.total} of its scales"
            for each in self.dead
        )

    def overview(self) -> Overview:
        """Summarize what was written."""
        return Overview(
            title=f"{self.scheme} in {self.out}: {len(self.quantized)} linears, "
            f"{self.describe_bytes()}",
            notes=[
                *self.notes,
                *map(str, self.checked),
            ],
        )


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
        from fp8calib.commands.recipe import ScaleOptions
        from fp8calib.commands.written import check_written
        from fp8calib.jobs import stats as given
        from fp8calib.jobs.card import CardJob, add_card
        from fp8calib.jobs.quantization import planned
        from fp8calib.jobs.recipe_options import apply_quantize_recipe
        from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
    recipe = None
    if request.names_recipe:
        request, recipe = apply_quantize_recipe(request)
    asked = planned.resolve_request(request)
    stats, inputs = (None, []) if request.stats is None else given.read_stats(request.stats)
    if stats is not None and recipe is not None and not recipe.observe.kv:
        stats = given.drop_kv(stats)
    served = None if recipe is None else recipe.quantize
    with saved_model(request.model, Path(request.out), request.tokenizer) as model:
        task = planned.QuantizeTask(
            request=request,
            model=model,
            asked=asked,
            scales=ScaleOptions() if recipe is None else recipe.scales,
            stats=stats,
            inputs=inputs,
            reporter=reporter,
        )
        with planned.open_planned(task) as plan:
            started = time.monotonic()
            written = planned.write_planned(task, plan, plan.kept_codes, device=request.device)
            result = plan.describe(
                written, out=task.out, started=started, stats=stats, served=served
            )
        if request.check:
            plain = () if served is None else served.kv_cache_dtype_skip_layers
            checked = check_written(task.out, task.out, plain_caches=plain)
            result = result.model_copy(update={"checked": checked})
        job = CardJob(
            written=task.out,
            target=task.out,
            model=request.model,
            revision=request.revision,
            checked=result.checked,
        )
        result = add_card(job, result)
    files = warn_of_tokenizer(request.model, request.tokenizer, result.files)
    for text in (*result.notes, *result.describe_dead(), *files):
        reporter.warn(text)
    return result


def describe(result: QuantizeResult, request: QuantizeRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe the checkpoint and what engines do with it."""
    yield from map(Line, _describe(result))


def _describe(result: QuantizeResult) -> Iterator[str]:
    yield (
        f"{len(result.quantized)} linears quantized ({_describe_schemes(result)}, "
        f"{result.format}), weights {result.describe_bytes()}, {result.duration_s:.1f} s"
    )
    yield from _describe_unquantized(result.left)
    if (sizes := result.kv_bytes_per_token) is not None:
        scales = "with its scales" if result.has_kv_scales else "without scales: 1.0"
        yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8 ({scales})"
    yield f"written to {result.out}: {_list_files(result.files)}"
    yield from describe_checks(result.checked)


def _describe_schemes(result: QuantizeResult) -> str:
    """Name the scheme, and how many linears have another."""
    counts: Counter[str] = Counter()
    for each in result.layer_schemes:
        counts[each.scheme] += each.linears
    return ", ".join([result.scheme, *(f"{number} {name}" for name, number in counts.items())])


def _describe_unquantized(left: Sequence[UnquantizedLinear]) -> Iterator[str]:
    """Describe what stays unquantized for each reason, with a few names."""
    named: dict[str, list[str]] = {}
    for item in left:
        named.setdefault(item.why, []).append(item.module)
    ignored = [reason for reason in named if reason.startswith(_BY_PATTERN)]
    if len(ignored) > _SHOWN:  # as a plan's recipe has them: one for each linear
        named[_BY_PATTERN.strip()] = [name for reason in ignored for name in named.pop(reason)]
    for reason, names in named.items():
        yield f"  not quantized ({reason}): {cut_list(names, _SHOWN)}"


def _list_files(files: Sequence[str]) -> str:
    """List files, all shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    others = [name for name in files if name not in shards]
    return f"{len(shards)} shards, {list_top_level(others)}"


quantize = as_function("quantize", QuantizeRequest, run)
