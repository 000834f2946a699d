"""The `quantization_config` of compressed-tensors, validated as transformers does when it loads.

These models accept and refuse what compressed-tensors 0.20 does (`quantization/quant_args.py`,
`quant_scheme.py`, `quant_config.py`; run side by side in the tests), which is no dependency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.weights.group_schemes import Section, list_strings

CONFIG_FIX = "write a kv-overlay: compressed-tensors with kv_cache_scheme, scales of shape [1]"
_GROUPED = ("group", "tensor_group")
_DYNAMIC = ("token", "tensor", *_GROUPED)
_ACTIVATION_STRATEGIES = (*_DYNAMIC, "attn_head")
_FLOAT_BITS = (4, 6, 8)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _check_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"no such torch dtype {name!a:.40}")
    return name


_Lower = BeforeValidator(_lower)
_Dtype = Annotated[str, AfterValidator(_check_dtype)]


class _Arguments(BaseModel):
    """`QuantizationArgs`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bits: int = 8
    type: Annotated[Literal["int", "float"], _Lower] = "int"
    symmetric: bool = True
    group_size: int | None = Field(default=None, ge=-1)
    strategy: Annotated[
        Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"] | None,
        _Lower,
    ] = None
    block_structure: list[int] | str | None = None
    dynamic: Annotated[bool | Literal["local"], _Lower] = False
    actorder: Literal["weight", "static"] | Literal[False] | None = None
    scale_dtype: _Dtype | None = None
    zp_dtype: _Dtype | None = None
    observer: str | None = None
    observer_kwargs: dict[str, object] = Field(default_factory=dict)

    @property
    def granularity(self) -> str:
        """The strategy, which follows from the group size where none is named."""
        if self.strategy is not None:
            return self.strategy
        if self.group_size is None:
            return "tensor"
        return "group" if self.group_size > 0 else "channel"

    @model_validator(mode="after")
    def _check(self) -> Self:
        granularity, size = self.granularity, self.group_size
        faults = {
            "group_size is 0": self.strategy is None and size == 0,
            "static scales per token": granularity == "token" and not self.dynamic,
            "strategy group needs a group_size": granularity in _GROUPED and (size or 0) <= 0,
            "group_size needs strategy group": granularity not in _GROUPED and (size or 0) > 0,
            "strategy block needs a block_structure, and no other has one": (
                (granularity == "block") != (self.block_structure is not None)
            ),
            f"dynamic scales per {granularity}": self.dynamic and granularity not in _DYNAMIC,
            "local scales need strategy tensor_group": (
                self.dynamic == "local" and granularity != "tensor_group"
            ),
            f"float of {self.num_bits} bits": (
                self.zp_dtype is None and self.type == "float" and self.num_bits not in _FLOAT_BITS
            ),
        }
        for fault, is_found in faults.items():
            if is_found:
                raise ValueError(fault)
        return self


class CacheScheme(_Arguments):
    """`kv_cache_scheme`, which is also checked as the scheme of an activation."""

    @model_validator(mode="after")
    def _check_activation(self) -> Self:
        if self.granularity not in _ACTIVATION_STRATEGIES or self.actorder:
            what = f"strategy {self.granularity}" if not self.actorder else "actorder"
            raise ValueError(f"{what} is not for activations")
        return self

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are rounded to values of an 8-bit float."""
        return (self.type, self.num_bits) == ("float", 8)


class _Group(BaseModel):
    """`QuantizationScheme`."""

    model_config = ConfigDict(extra="forbid")

    targets: list[str]
    weights: _Arguments | None = None
    input_activations: CacheScheme | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _Config(BaseModel):
    """`QuantizationConfig`."""

    config_groups: dict[str, _Group | list[str]]
    kv_cache_scheme: CacheScheme | None = None
    quantization_status: Literal[
        "initialized", "calibration", "frozen", "compressed", "decompressed"
    ] = "initialized"
    ignore: list[str] | None = None


def read_cache_scheme(quantization: Mapping[str, object]) -> CacheScheme | None:
    """Validate a config and return its `kv_cache_scheme`; None where it has none.

    Raises:
        Refusal: transformers does not load a model with this config.
    """
    try:
        return _Config.model_validate(quantization).kv_cache_scheme
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(ascii(str(part))[1:-1][:40] for part in first["loc"])
        why = f"quantization_config.{where}: {first['msg'].removeprefix('Value error, ')}"
        raise Refusal(f"{why} (ValidationError)", fix=CONFIG_FIX) from error


def choose_experts_group(groups: object) -> Section:
    """Choose the group that names experts, else one that names a class, else the first.

    transformers 5.23 integrations/compressed_tensors.py (get_experts_scheme), run.
    """
    fields = groups.values() if isinstance(groups, dict) else ()
    every = [each for each in fields if isinstance(each, dict)]
    targets = [list_strings(each, "targets") for each in every]
    kinds = (
        lambda target: target.startswith("re:") and "experts" in target,
        lambda target: not target.startswith("re:"),
        lambda _: True,
    )
    ranked = (g for kind in kinds for g, t in zip(every, targets, strict=True) if any(map(kind, t)))
    return next(ranked, {})
