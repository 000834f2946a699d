"""The options that are keys of recipes too: each with its bounds, its default and its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fp8calib.data.specs import ACCEPTED_SUFFIXES, Specs, parse_spec
from fp8calib.errors import UsageError
from fp8calib.formats.registry import (
    find_dialect,
    list_format_names,
    list_query_format_names,
)
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS
from fp8calib.numerics.rules import AMAX, Fallback, parse_rule
from fp8calib.options.option import Option

DEFAULT_SEQ_LEN = 2048
_DEFAULT_SAMPLES = 512


def split_names(values: Sequence[str] | None) -> list[str] | None:
    """Split `a,b` into two names and drop repetitions; None stays None (not given)."""
    if values is None:
        return None
    names = [name.strip() for value in values for name in value.split(",")]
    if not any(names):
        raise UsageError("--format: no name given")
    return list(dict.fromkeys(name for name in names if name))


def _check_rule(text: str) -> None:
    try:
        parse_rule(text)
    except UsageError as error:
        raise UsageError(f"--rule: {error.message}", hint=error.hint) from error


DATA = Option(
    "--data",
    metavar="SPEC",
    reads=list[str],
    collect=Specs,
    check=parse_spec,
    key="data.sources",
    default=(),
    help=f"File ({' '.join(ACCEPTED_SUFFIXES)}), folder of files or of save_to_disk, "
    "hub:NAME[:CONFIG][:SPLIT] or builtin; SPEC@WEIGHT mixes several. Default: builtin.",
)
TEXT_COLUMN = Option(
    "--text-column",
    metavar="NAME",
    key="data.text_column",
    help="Column of the rows to read: text, messages or token ids. Default: the first of text, "
    "messages, ... that there is.",
)
SAMPLES = Option(
    "--samples",
    metavar="N",
    least=1,
    key="data.samples",
    default=_DEFAULT_SAMPLES,
    help=f"Number of sequences; default {_DEFAULT_SAMPLES}.",
)
SEQ_LEN = Option(
    "--seq-len",
    metavar="L",
    least=2,
    key="data.seq_len",
    help=f"Tokens per sequence; default {DEFAULT_SEQ_LEN}, or the model's maximum if smaller.",
)
BATCH_SIZE = Option(
    "--batch-size",
    metavar="B",
    least=1,
    key="data.batch_size",
    default=1,
    help="Sequences per batch; default 1.",
)
PACK = Option(
    "--no-pack",
    negates=True,
    key="data.pack",
    default=True,
    help="One text per sequence, truncated or padded; padding is masked.",
)
SEED = Option(
    "--seed",
    metavar="S",
    key="data.seed",
    default=0,
    help="Seed for mixing weighted data specs.",
)
RULE = Option(
    "--rule",
    metavar="amax|percentile:P|mse|headroom:H|1.0",
    check=_check_rule,
    key="scales.rule",
    default=AMAX,
    help="Rule for the scales of K, V and inputs: amax (default), percentile:P, mse (least "
    "squared error), headroom:H (H times amax) or 1.0. Weights always use amax.",
)
FALLBACK = Option(
    "--fallback",
    choices=tuple(Fallback),
    key="scales.fallback",
    help="Scale of a site for which none can be computed: layer-max, the largest of the same role "
    "in its layer, else 1.0 (default for tensors of zeros); one; or refuse.",
)
FP8_DTYPE = Option(
    "--fp8-dtype",
    choices=tuple(KV_FORMATS),
    key="scales.fp8_dtype",
    default=E4M3FN.name,
    help=f"FP8 format; default {E4M3FN.name}.",
)
FORMATS = Option(
    "--format",
    metavar="|".join(list_format_names()),
    reads=list[str],
    collect=split_names,
    check=find_dialect,
    key="formats",
    default=("kv-overlay",),
    help="What to write; several names, or repeat for more.",
)
TP = Option(
    "--tp",
    metavar="N",
    reads=list[int],
    key="tp",
    default=(1,),
    help="Tensor-parallel degree of the JSON formats; repeat for more.",
)
QUERY_SCALE = Option(
    "--query-scale",
    metavar="auto|yes|no",
    key="query_scale",
    default="auto",
    help=f"Write q_scale too, in {', '.join(list_query_format_names())}; default auto: where q "
    "needs it in some layer.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """What a calibration can be asked beside its recipe; None leaves the value of the recipe.

    A field here is an option of the command line, an argument in Python, and a key of recipes.
    """

    text_column: Annotated[str | None, TEXT_COLUMN] = None
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    tp: Annotated[int | Sequence[int] | None, TP] = None
    samples: Annotated[int | None, SAMPLES] = None
    seq_len: Annotated[int | None, SEQ_LEN] = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    pack: Annotated[bool | None, PACK] = None
    seed: Annotated[int | None, SEED] = None
    rule: Annotated[str | None, RULE] = None
    fallback: Annotated[str | None, FALLBACK] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    query_scale: Annotated[str | None, QUERY_SCALE] = None
