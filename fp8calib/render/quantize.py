"""The FP8 checkpoint that `quantize` wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8calib.blocks import Block, Line
from fp8calib.errors import cut_list
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.results.quantize import QuantizeResult, UnquantizedLinear
from fp8calib.results.written import describe_checks, list_top_level

_SHOWN = 5
_BY_PATTERN = "--ignore "
"""How the reason of a linear begins that a pattern leaves out."""


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
