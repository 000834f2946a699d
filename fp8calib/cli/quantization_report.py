"""The report of a quantization as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from fp8calib.checkpoint.atomic import format_size
from fp8calib.cli.console import list_top_level, print_json, print_text, warn
from fp8calib.cli.serving import describe_serving
from fp8calib.errors import cut_list, shorten
from fp8calib.fp8.schemes import GPTQ
from fp8calib.quantization.gptq.core import DAMPING

_SHOWN = 5


def show_quantization_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a report, as JSON or as text."""
    for note in report["notes"]:
        warn(note)
    for item in report["dead"]:
        name, count, total = shorten(item["tensor"]), item["count"], item["total"]
        warn(f"{name}: all zeros in {count} of {total} of its scales")
    if as_json:
        print_json(report)
        return
    for text in _describe_checkpoint(report):
        print_text(text)


def _describe_checkpoint(report: Mapping[str, Any]) -> Iterator[str]:
    before, after = (format_size(size) for size in report["bytes"].values())
    yield (
        f"{len(report['quantized'])} linears quantized ({_describe_schemes(report)}, "
        f"{report['format']}), weights {before} -> {after}, {report['duration_s']:.1f} s"
    )
    yield from _describe_unquantized(report["left"])
    yield from _describe_rounding(report["rounded"])
    if report["kv_bytes_per_token"]:
        plain, quantized = report["kv_bytes_per_token"].values()
        scales = "with its scales" if report["has_kv_scales"] else "without scales: 1.0"
        yield f"KV cache: {plain:,} bytes per token now, {quantized:,} with FP8 ({scales})"
    yield f"written to {report['out']}: {_list_files(report['files'])}"
    yield from describe_serving(report)


def _describe_schemes(report: Mapping[str, Any]) -> str:
    """Name the scheme, and how many linears have another."""
    counts: Counter[str] = Counter()
    for each in report["layer_schemes"]:
        counts[each["scheme"]] += each["linears"]
    return ", ".join([report["scheme"], *(f"{number} {name}" for name, number in counts.items())])


def _describe_unquantized(left: list[dict[str, str]]) -> Iterator[str]:
    """Describe what stays unquantized for each reason, with a few names."""
    for reason in dict.fromkeys(item["why"] for item in left):
        names = [item["module"] for item in left if item["why"] == reason]
        yield f"  not quantized ({reason}): {cut_list(names, _SHOWN)}"


def _describe_rounding(rounded: list[dict[str, Any]]) -> Iterator[str]:
    """Describe how many linears GPTQ rounded, how much it gained, and which it did not round."""
    if not rounded:
        return
    chosen = [item for item in rounded if item["rounding"] == GPTQ]
    gains = [
        item["gptq_db"] - item["nearest_db"]
        for item in chosen
        if None not in (item["gptq_db"], item["nearest_db"])
    ]
    gained = f": {median(gains):.1f} dB less output error in the median" if gains else ""
    yield f"{len(chosen)} of {len(rounded)} linears rounded by GPTQ{gained}"
    for why in dict.fromkeys(item["why"] for item in rounded if item["why"]):
        names = [item["module"] for item in rounded if item["why"] == why]
        yield f"  rounded to nearest ({why}): {cut_list(names, _SHOWN)}"
    raised = [item["module"] for item in rounded if (item["damping"] or 0) > DAMPING]
    if raised:
        yield f"  more damping, for a Hessian that was not positive: {cut_list(raised, _SHOWN)}"


def _list_files(files: list[str]) -> str:
    """List files, all shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    others = [name for name in files if name not in shards]
    return f"{len(shards)} shards, {list_top_level(others)}"
