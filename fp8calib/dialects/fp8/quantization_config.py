"""What the quantization config of an FP8 checkpoint says of each linear: its weight and its input.

Every method has its own config; here each becomes a function from a linear's path to a `Scheme`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.dialects.refusals import refusal
from fp8calib.errors import VerificationError
from fp8calib.fp8.schemes import BLOCK, GROUP_SIZE, Granularity, InputScaling

Fields = Mapping[str, object]
"""What config.json calls a quantization config."""
_WEIGHT_GRANULARITIES = (Granularity.TENSOR, Granularity.CHANNEL, Granularity.BLOCK)
_MAX_BOUND = 1e38
_OLD_BLOCK = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How the input of one linear is quantized."""

    kind: InputScaling
    scale: float | None = None
    """Multiplies to dequantize; there if and only if the kind is `STATIC`."""
    upper_bound: float | None = None
    """What fbgemm caps the amax of a token at (`activation_scale_ub`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScheme:
    """What a config says of one linear."""

    granularity: Granularity
    block: tuple[int, int] = BLOCK
    input: InputScaling
    upper_bound: float | None = None


FindScheme = Callable[[str], StoredScheme]
"""From a linear's path to its scheme; raises VerificationError where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """One quantizer of a config, in the words of compressed-tensors."""

    strategy: str
    dynamic: bool
    group_size: int | None
    block: tuple[int, int] | None


class ContradictionError(VerificationError):
    """Config and tensors do not fit."""


def contradiction(path: Path, fault: str) -> ContradictionError:
    """Say that config and tensors do not fit."""
    hint = "the config is of another checkpoint, or was edited; engines misread such a pair"
    return ContradictionError(refusal(path, fault).message, hint=hint)


def matches_expression(path: Path, module: str, expression: str) -> bool:
    """Tell whether a module begins with what an expression of the config at `path` describes.

    Raises:
        VerificationError: it is not a regular expression.
    """
    try:
        return re.match(expression, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        fault = f"re:{expression!a:.80} is not a regular expression: {error}"
        raise refusal(path, fault, hint="it stands in the quantization config") from error


def take_list(path: Path, config: Fields, key: str) -> list[object]:
    """Take a list from a config; absent or null is an empty one."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise refusal(path, f"{key} is {value!a:.60}", hint="it is a list")
    return value or []


def take_block(path: Path, key: str, value: object) -> tuple[int, int]:
    """Read rows and columns of a block from a config, old ones as "128x128"."""
    pair = _OLD_BLOCK.fullmatch(value) if isinstance(value, str) else None
    sizes = [int(size) for size in pair.groups()] if pair else value
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise refusal(path, f"{key} is {value!a:.60}", hint="it is two sizes, as [128, 128]")
    return sizes[0], sizes[1]


def make_scheme(
    path: Path, module: str, weights: Arguments, inputs: Arguments | None
) -> StoredScheme:
    """Put the scheme of a linear together from what a config says of its weight and input.

    Raises:
        VerificationError: it is none that FP8 weights are served with.
    """
    if weights.dynamic or weights.strategy not in _WEIGHT_GRANULARITIES:
        how = "dynamic weights" if weights.dynamic else "weights"
        raise refusal(path, f"{module}: {how} per {weights.strategy!a:.40} are not read")
    granularity = Granularity(weights.strategy)
    if granularity is Granularity.BLOCK and weights.block is None:
        raise refusal(path, f"{module}: weights in blocks without a size of the blocks")
    kind = InputScaling.NONE if inputs is None else _find_kind(path, module, inputs)
    return StoredScheme(granularity=granularity, block=weights.block or BLOCK, input=kind)


def make_fp8_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of AutoFP8 and of transformers' fine-grained FP8 (`quant_method: fp8`)."""
    scheme = config.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        fault = f"activation_scheme is {scheme!a:.40}"
        raise refusal(path, fault, hint="it is static or dynamic")
    block = config.get("weight_block_size")
    size = None if block is None else take_block(path, "weight_block_size", block)
    if size is not None and scheme == "static":
        raise refusal(path, "activation_scheme is static beside weight_block_size")
    ignored = [
        *take_list(path, config, "ignored_layers"),
        *take_list(path, config, "modules_to_not_convert"),
    ]
    weights = Arguments(
        strategy="tensor" if size is None else "block", dynamic=False, group_size=None, block=size
    )
    inputs = Arguments(
        strategy="tensor" if size is None else "group",
        dynamic=scheme == "dynamic",
        group_size=None if size is None else size[1],
        block=None,
    )

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, _is_below)
        return make_scheme(path, module, weights, inputs)

    return find


def make_fbgemm_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of fbgemm: rows have scales, tokens too, their amax capped."""
    bound = config.get("activation_scale_ub")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < _MAX_BOUND:
        raise refusal(path, f"activation_scale_ub is {bound!a:.40}", hint="it is a number above 0")
    ignored = take_list(path, config, "modules_to_not_convert")
    upper_bound = float(bound)

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, _is_below)
        return StoredScheme(
            granularity=Granularity.CHANNEL, input=InputScaling.TOKEN, upper_bound=upper_bound
        )

    return find


def refuse_ignored(
    path: Path, module: str, ignored: Iterable[object], is_covered: Callable[[str, str], bool]
) -> None:
    """Refuse an FP8 weight that the config leaves unquantized.

    Args:
        path: the config.
        module: the weight's linear.
        ignored: what the config lists: paths, expressions after `re:`, others.
        is_covered: tells of module and list entry whether the method takes these for a match too.

    Raises:
        VerificationError: `module` is listed.
    """
    for pattern in ignored:
        if isinstance(pattern, str) and _is_named(path, module, pattern, is_covered):
            fault = f"{module}: its weight is FP8, though the config leaves {pattern!a:.80} out"
            raise contradiction(path, fault)


def _is_named(
    path: Path, module: str, pattern: str, is_covered: Callable[[str, str], bool]
) -> bool:
    if pattern.startswith("re:"):
        return matches_expression(path, module, pattern.removeprefix("re:"))
    return module == pattern or is_covered(module, pattern)


def _is_below(module: str, pattern: str) -> bool:
    """Tell whether the entry is a module that holds this one, as transformers takes it."""
    return bool(pattern) and module.startswith(f"{pattern}.")


def _find_kind(path: Path, module: str, inputs: Arguments) -> InputScaling:
    if not inputs.dynamic:
        if inputs.strategy == "tensor":
            return InputScaling.STATIC
        raise refusal(path, f"{module}: static inputs per {inputs.strategy!a:.40} are not read")
    if inputs.strategy in ("tensor", "token"):
        return InputScaling.TOKEN
    if inputs.strategy == "group" and inputs.group_size == GROUP_SIZE:
        return InputScaling.GROUP
    fault = f"{module}: dynamic inputs per {inputs.strategy!a:.40} of {inputs.group_size!a:.40}"
    raise refusal(path, fault, hint="known are tensor, token, and groups of 128 channels")
