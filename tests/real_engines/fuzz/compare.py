"""Compare what `check` says of a checkpoint with what an engine did."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

_BLOCK = 128
_MX = 32
_NAN_EXPONENT = 255
_CLOSE = 0.1
"""Larger than what rounding to e4m3 does to a matrix (0.03), smaller than what a damage does."""
_CLOSE_ROW = 0.5
"""The same of a single row, which has few numbers, and may have a scale of its own."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPair:
    """The scales that one attention layer multiplies by; empty where it has none."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    is_fp8: bool = True
    """Whether its cache is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an engine did: an error, or what it holds."""

    error: str = ""
    """The exception's type and text, and the engine's file and line; empty where it loads."""
    layers: Mapping[int, HeldPair] = field(default_factory=dict)
    """By index; without an entry where nothing can be said of a layer."""
    weights_fault: str = ""
    """How the weights it computes with differ from the model's; empty where they do not."""


def is_scale(value: float) -> bool:
    """Whether a number can be a scale."""
    return math.isfinite(value) and value > 0


def compare_matrices(held: torch.Tensor, meant: torch.Tensor) -> float:
    """Give the norm of the difference over the norm; either matrix may be transposed.

    That of the worst row is given where it is too large and that of the matrix is not.
    """
    meant = meant.float()
    ways = (held.float(), held.float().transpose(-1, -2)) if held.dim() > 1 else (held.float(),)
    return min(
        (_find_error(way, meant) for way in ways if way.shape == meant.shape), default=math.inf
    )


def _find_error(held: torch.Tensor, meant: torch.Tensor) -> float:
    if torch.equal(held, meant):
        return 0.0
    differences, norms = (held - meant).norm(dim=-1), meant.norm(dim=-1)
    whole, rows = float(differences.norm() / norms.norm()), (differences / norms).nan_to_num(nan=0)
    if math.isnan(whole):
        return math.inf
    worst = float(rows.max())
    return worst if whole < _CLOSE and worst > _CLOSE_ROW else whole


def describe_difference(held: Tensors, meant: Tensors) -> str:
    """Say how tensors differ from those that are meant; empty where rounding explains it.

    A weight that the model does not have, such as one of a layer too many, is one that nothing set.
    """
    for name, matrix in meant.items():
        if not matrix.dim() or matrix.isnan().any():  # NaN: the engine does not load it at all
            continue
        if name not in held:
            return f"{name} is not there"
        error = compare_matrices(held[name], matrix)
        if not error < _CLOSE:
            return f"{name} differs by {error:.2g} of its norm"
    more = (name for name in held if name.endswith(".weight") and name not in meant)
    return next((f"{name} is of no tensor of the model" for name in more), "")


def dequantize(tensors: Tensors, *, is_transposed: bool = False) -> dict[str, torch.Tensor]:
    """Multiply the FP8 matrices of an engine by their scales; give the others as they are.

    Args:
        tensors: by name.
        is_transposed: square matrices are [in, out].
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        scale = next((tensors[n] for n in _name_scales(name) if n in tensors), None)
        if tensor.dtype in FP8_DTYPES and scale is not None:
            if scale.dtype is torch.uint8:  # MXFP8, whose kernels want no other layout
                powers = torch.exp2(scale.float() - 127)
                powers[scale == _NAN_EXPONENT] = torch.nan
                spread = powers.repeat_interleave(_MX, -1)
                spread = spread if spread.shape == tensor.shape else None
            else:
                spread = _spread(scale.float(), tensor.shape, is_transposed=is_transposed)
            found[name] = tensor.float() if spread is None else tensor.float() * spread
    return found


def _name_scales(name: str) -> tuple[str, str]:
    return f"{name}_scale_inv", f"{name}_scale"


def _spread(scale: torch.Tensor, shape: torch.Size, *, is_transposed: bool) -> torch.Tensor | None:
    """Give every element of a weight its scale; None where a scale has another shape.

    The scale is one number, or by output, by part of a stack of experts, or by block.
    """
    *experts, rows, columns = shape
    blocks = (*experts, -(-rows // _BLOCK), -(-columns // _BLOCK))
    if scale.numel() == 1:
        found = scale.reshape(())
    elif not experts and scale.numel() in {rows, columns} and 1 in {*scale.shape, scale.dim()}:
        by_column = is_transposed if rows == columns else scale.numel() == columns
        found = scale.reshape(1, -1) if by_column else scale.reshape(-1, 1)
    elif experts and scale.shape == (*experts,):
        found = scale.reshape(-1, 1, 1)
    elif experts and scale.shape == (*experts, 2):
        found = scale.repeat_interleave(rows // 2, 1)[..., None]
    elif scale.shape == blocks:
        row, column = (torch.arange(size) // _BLOCK for size in (rows, columns))
        found = scale[..., row, :][..., column]
    else:
        found = scale if scale.shape == (*experts, rows, 1) else None
    return found


_USED, _REFUSED = "used", "refused"
_EITHER = "the engine stops, or"
"""What `check` says of weights that an engine either refuses or misreads."""
_ROUNDED = 0.01
"""A scale that is rounded to the model's dtype is still the one in the file."""


class Kind(StrEnum):
    """How `check` and an engine disagree, the worst first."""

    CRASH = "check ends in an error of its own"
    FALSE_OK = "check says fine, the engine does something else"
    FALSE_ALARM = "check refuses or warns, the engine does it right"
    OTHER_FAULT = "neither is fine, but check names something else than happens"


_ORDER = list(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A disagreement."""

    kind: Kind
    check: str
    engine: str


def compare(
    report: Mapping[str, Any],
    seen: Observation,
    stored: Mapping[int, Collection[float]],
    *,
    has_kv: bool,
) -> Finding | None:
    """Find the worst disagreement about one engine; None where there is none.

    Args:
        report: what `check --json` says of the engine.
        seen: what the engine did.
        stored: the small scales that the files hold, by layer.
        has_kv: whether the checkpoint is meant to have KV scales.
    """
    refused = find_refusal(report)
    if seen.error:
        if refused or _EITHER in str(report["weights"]):
            return None
        kind = Kind.FALSE_OK if _is_fine(report, has_kv=has_kv) else Kind.OTHER_FAULT
        return Finding(kind=kind, check=_describe(report), engine=seen.error)
    if refused:
        held = _find_fault(report, seen, stored)
        kind = Kind.OTHER_FAULT if held else Kind.FALSE_ALARM
        return Finding(
            kind=kind, check=refused, engine=held or "it loads, and holds the file's numbers"
        )
    findings = [*_compare_layers(report, seen, stored), *_compare_weights(report, seen)]
    return min(findings, key=lambda finding: _ORDER.index(finding.kind), default=None)


def find_refusal(report: Mapping[str, Any]) -> str:
    """Give why `check` says that the engine does not start; empty where it starts."""
    verdicts = [layer[role] for layer in report["layers"] for role in "kv"]
    verdicts += [report["weights"]] if report["weights"] else []
    return next((f"refused: {each['why']}" for each in verdicts if each["status"] == _REFUSED), "")


def _is_fine(report: Mapping[str, Any], *, has_kv: bool) -> bool:
    fine = {_USED} if has_kv else {_USED, "defaulted"}
    statuses = {layer[role]["status"] for layer in report["layers"] for role in "kv"}
    return report["weights"] is None and statuses <= fine


def _describe(report: Mapping[str, Any]) -> str:
    """Say in short what `check` says of an engine that it does not call refused."""
    if report["ok"]:
        notes = [text for text in report["problems"] if text.startswith("weights:")]
        return "; ".join(("ok", *notes[:1]))
    if weights := report["weights"]:
        return f"weights {weights['status']}: {weights['why']}"
    faults = [
        f"layer {layer['layer']} {role} {layer[role]['status']}: {layer[role]['why']}"
        for layer in report["layers"]
        for role in "kv"
        if layer[role]["status"] != _USED
    ]
    return next(iter(faults), "no layer has a cache")


def _find_fault(
    report: Mapping[str, Any], seen: Observation, stored: Mapping[int, Collection[float]]
) -> str:
    """Say why what the engine holds is not what the file means; empty where it is."""
    if seen.weights_fault:
        return f"it loads: {seen.weights_fault}"
    for layer in report["layers"]:
        index = layer["layer"]
        pair = seen.layers.get(index)
        if pair is None:
            return f"it loads: layer {index} has no scales"
        for role, values in (("k", pair.k), ("v", pair.v)):
            if not _is_meant(pair, values, stored.get(index, ())):
                return f"it loads: layer {index} {_show(role, pair, values)}"
    return ""


def _is_meant(pair: HeldPair, values: tuple[float, ...], stored: Collection[float]) -> bool:
    return pair.is_fp8 and all(
        is_scale(value) and any(math.isclose(value, one, rel_tol=_ROUNDED) for one in stored)
        for value in values
    )


def _show(role: str, pair: HeldPair, values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:.7g}" for value in values[:4]) or "no scale"
    return f"{role} {shown}{'' if pair.is_fp8 else ', in a cache of 16 bits'}"


def _compare_layers(
    report: Mapping[str, Any], seen: Observation, stored: Mapping[int, Collection[float]]
) -> list[Finding]:
    findings = []
    for layer in report["layers"]:
        index = layer["layer"]
        pair = seen.layers.get(index, HeldPair(k=(), v=(), is_fp8=False))
        for role, values in (("k", pair.k), ("v", pair.v)):
            verdict = layer[role]
            is_used = verdict["status"] == _USED
            is_meant = bool(values) and _is_meant(pair, values, stored.get(index, ()))
            if _is_foreseen(verdict["value"], values, is_meant=is_meant) and (
                pair.is_fp8 or not is_used
            ):
                continue
            other = Kind.FALSE_ALARM if is_meant else Kind.OTHER_FAULT
            said = f"layer {index} {role} {verdict['status']} {verdict['value']}: {verdict['why']}"
            findings.append(
                Finding(
                    kind=Kind.FALSE_OK if is_used else other,
                    check=said,
                    engine=_show(role, pair, values),
                )
            )
    return findings


def _is_foreseen(value: float | None, held: tuple[float, ...], *, is_meant: bool) -> bool:
    """Whether a layer holds the number that `check` gives, which is the largest of its heads.

    Without a number, it says that there is none, or that it is uninitialised memory.
    """
    if value is None:
        return not is_meant
    return bool(held) and (max(held) == value or (value <= 0 and value in held))


def _compare_weights(report: Mapping[str, Any], seen: Observation) -> list[Finding]:
    if bool(report["weights"]) == bool(seen.weights_fault):
        return []
    if report["weights"]:
        said = f"weights {report['weights']['status']}: {report['weights']['why']}"
        held = "it computes with the model's weights"
        return [Finding(kind=Kind.FALSE_ALARM, check=said, engine=held)]
    notes = [text for text in report["problems"] if text.startswith("weights:")]
    said = notes[0] if notes else "nothing of the weights"
    return [Finding(kind=Kind.FALSE_OK, check=said, engine=seen.weights_fault)]


EXCLUDED: dict[str, Mapping[str, str]] = {
    "vllm": {
        r"Found unknown kwargs=\{'_name_or_path'": "dbrx: a config of transformers 5.23, which "
        "the 5.19 beside vLLM does not read",
        r"No MXFP4 MoE backend supports": "deepseek_v4: a kernel that a CPU does not have",
        r"--mamba-block-size can only be set": "kimi_linear: its blocks are longer than the 64 "
        "tokens for which models are loaded",
        r"\nmodel_executor/(kernels|layers/fused_moe/oracle)/": "a kernel that a CPU does not have",
    },
    "transformers": {
        r"got: c10::BFloat16 != c10::Float8_e4m3fn": "autofp8 with a scale per tensor: without a "
        "GPU transformers dequantizes FP8 weights, and has no code for these",
    },
    "sglang": {},
}
EXCLUDED["vllm-run"] = EXCLUDED["vllm"]
"""By engine: what an error's text matches, and why it is not compared."""


def find_exclusion(engine: str, error: str) -> str:
    """Give the reason for which an error is not compared; empty where it is."""
    found = (why for pattern, why in EXCLUDED[engine].items() if re.search(pattern, error))
    return next(found, "") if error else ""
