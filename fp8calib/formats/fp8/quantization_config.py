"""How an FP8 checkpoint's quantization config describes each linear: its weight and its input.

Every quantization method has its own config; here each becomes a function from a linear's path to
a `StoredScheme`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.errors import ModelError, refusal
from fp8calib.model.module_paths import matches_expression
from fp8calib.numerics.schemes import BLOCK, GROUP_SIZE, MX_BLOCK, Granularity, InputScaling, Scheme

Fields = Mapping[str, object]
_WEIGHT_GRANULARITIES = (Granularity.TENSOR, Granularity.CHANNEL, Granularity.BLOCK)
_OLD_BLOCK = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScheme(Scheme):
    """The scheme of one linear, as its checkpoint's config describes it."""

    upper_bound: float | None = None
    """The limit that fbgemm puts on the amax of a token (`activation_scale_ub`)."""
    input_scale: float | None = None
    """Multiplies to dequantize the input; None unless it is static, and where only the config is
    known."""

    @classmethod
    def of(cls, scheme: Scheme) -> StoredScheme:
        """Make that of a linear with a scheme that is written too."""
        return cls(weights=scheme.weights, block=scheme.block, inputs=scheme.inputs)


FindScheme = Callable[[str], StoredScheme]
"""Gives a linear's scheme by its path; raises ModelError if the config has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one quantizer in a config, in the words of compressed-tensors."""

    strategy: str
    dynamic: bool
    group_size: int | None = None
    block: tuple[int, int] | None = None
    has_exponents: bool = False
    """Scales are stored as exponents of two (`scale_dtype` uint8)."""

    @property
    def is_mx(self) -> bool:
        """Tell whether this is MXFP8: groups of 32 channels, each with an exponent."""
        return (self.strategy, self.group_size) == ("group", MX_BLOCK[1]) and self.has_exponents

    def __str__(self) -> str:
        size = "" if self.group_size is None else f" of {self.group_size}"
        return f"{'dynamic' if self.dynamic else 'static'} per {self.strategy!a:.40}{size}"


class ContradictionError(ModelError):
    """The config and the tensors of a checkpoint contradict each other."""


def contradiction(path: Path, fault: str) -> ContradictionError:
    """Make the error for a config that contradicts the tensors."""
    hint = "the config belongs to another checkpoint, or was edited; engines misread such a pair"
    return ContradictionError(refusal(path, fault).message, hint=hint)


def weight_contradiction(path: Path, module: str, says: str) -> ContradictionError:
    """Make the error for a config that says otherwise of the FP8 weight of `module`."""
    return contradiction(path, f"{module}: its weight is FP8, but {says}")


def matches_entry(path: Path, module: str, expression: str) -> bool:
    """Tell whether an expression in the config at `path` matches the start of a module's path."""
    try:
        return matches_expression(expression, module)
    except ValueError as error:
        fault = f"re:{expression!a:.80}: {error}"
        raise refusal(path, fault, hint="name modules by their paths") from error


def read_list(path: Path, config: Fields, *keys: str) -> list[object]:
    """Read the items of lists from a config; a list that is missing or null is empty."""
    items: list[object] = []
    for key in keys:
        value = config.get(key)
        if value is not None and not isinstance(value, list):
            raise refusal(path, f"{key} is {value!a:.60}", hint="it must be a list")
        items += value or []
    return items


def read_names(path: Path, config: Fields, key: str) -> list[str]:
    """Read a list of modules from a config; engines refuse a list of anything but strings."""
    value = config.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refusal(path, f"{key} is {value!a:.60}", hint="it must be a list of names")
    return value


def read_block(path: Path, key: str, value: object) -> tuple[int, int]:
    """Read the rows and columns of a block from a config; old configs have "128x128"."""
    pair = _OLD_BLOCK.fullmatch(value) if isinstance(value, str) else None
    sizes = [int(size) for size in pair.groups()] if pair else value
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise refusal(
            path, f"{key} is {value!a:.60}", hint="it must be two sizes, as in [128, 128]"
        )
    return sizes[0], sizes[1]


def make_scheme(
    path: Path, module: str, weights: Arguments, inputs: Arguments | None
) -> StoredScheme:
    """Make the scheme of a linear from the quantizers of its weight and input.

    Raises:
        ModelError: FP8 weights are not served with these quantizers.
    """
    strategy, block = weights.strategy, weights.block
    if weights.is_mx:
        strategy, block = Granularity.BLOCK.value, MX_BLOCK
    lacks_size = strategy == Granularity.BLOCK and block is None
    scaling = _find_scaling(weights, inputs)
    if weights.dynamic or strategy not in _WEIGHT_GRANULARITIES or lacks_size or scaling is None:
        how = " whose block size is missing" if lacks_size else ""
        fault = f"{module}: weights {weights}{how} with inputs {inputs} are not supported"
        hint = "supported are weights per tensor, channel and block, MXFP8, and inputs per tensor, "
        raise refusal(path, fault, hint=f"{hint}token and groups of 128 channels")
    return StoredScheme(weights=Granularity(strategy), block=block or BLOCK, inputs=scaling)


def _find_scaling(weights: Arguments, inputs: Arguments | None) -> InputScaling | None:
    """Find how inputs are scaled; None if they are not served in this way."""
    if inputs is None:
        return InputScaling.NONE
    if weights.is_mx:
        return InputScaling.GROUP if inputs.is_mx and inputs.dynamic else None
    if not inputs.dynamic:
        return InputScaling.STATIC if inputs.strategy == "tensor" else None
    if inputs.strategy in ("tensor", "token"):
        return InputScaling.TOKEN
    is_group = (inputs.strategy, inputs.group_size) == ("group", GROUP_SIZE)
    return InputScaling.GROUP if is_group else None


def unless_ignored(
    path: Path, ignored: Iterable[object], is_covered: Callable[[str, str], bool], find: FindScheme
) -> FindScheme:
    """Make a finder that refuses the FP8 weight of a linear that the config leaves unquantized.

    `ignored` has paths, or `re:` and an expression; `is_covered` tells whether the method also
    matches a module with an entry. `find` finds the scheme of other linears.
    """
    patterns = [pattern for pattern in ignored if isinstance(pattern, str)]

    def find_scheme(module: str) -> StoredScheme:
        for pattern in patterns:
            if pattern.startswith("re:"):
                is_named = matches_entry(path, module, pattern.removeprefix("re:"))
            else:
                is_named = module == pattern or is_covered(module, pattern)
            if is_named:
                raise weight_contradiction(path, module, f"the config excludes {pattern!a:.80}")
        return find(module)

    return find_scheme
