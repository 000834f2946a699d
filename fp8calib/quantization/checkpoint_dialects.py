"""The dialects of FP8 checkpoints: names and shapes of scales, and the quantization config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8calib import __version__
from fp8calib.dialects.fp8.weights import count_blocks
from fp8calib.dialects.kv.config import MODELOPT_CONFIG_NAME
from fp8calib.dialects.kv.kv_scales import name_scales
from fp8calib.errors import UsageError
from fp8calib.fp8.schemes import (
    GROUP_SIZE,
    Granularity,
    InputScaling,
    Scheme,
    list_expressible,
)
from fp8calib.geometry.model_geometry import Attention
from fp8calib.geometry.sites import Role
from fp8calib.selection.select import HEAD, UnquantizedMatrix

Shape = tuple[int, ...]
Config = dict[str, object]

_MakeConfig = Callable[[Scheme, Sequence[UnquantizedMatrix], bool], Config]
"""From the scheme, what is not quantized, and whether there are KV scales."""
_NUMBER: Mapping[str, object] = {"num_bits": 8, "type": "float"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDialect:
    """One way to write an FP8 checkpoint."""

    name: str
    scalar_shape: Shape
    """Of a scale that covers a whole tensor: a weight, an input, K or V."""
    block_scale_name: str = "weight_scale"
    """What the scales of blocks are called beside a linear's weight."""
    make_config: _MakeConfig
    """Make the `quantization_config`."""
    make_extra_files: _MakeConfig = lambda *_: {}
    """Make the JSON files beside config.json, by name."""
    names_kv_by_projection: bool = False
    """The scales of K and V are beside those of k_proj and v_proj, where there are such."""

    @property
    def schemes(self) -> list[str]:
        """List the schemes that it can express, by name."""
        return list_expressible(self.name)

    def name_kv(self, attention: Attention, role: Role, has_projections: bool) -> tuple[str, ...]:
        """Name the scale of K or V, given whether the checkpoint has a tensor for k_proj."""
        if self.names_kv_by_projection and has_projections:
            return (f"{attention.checkpoint_module}.{role}_proj.{role}_scale",)
        return name_scales(attention, role)

    def name_scale(self, module: str, scheme: Scheme) -> str:
        """Name the scale of a linear's weight."""
        has_blocks = scheme.weights is Granularity.BLOCK
        return f"{module}.{self.block_scale_name if has_blocks else 'weight_scale'}"

    def shape_scale(self, shape: tuple[int, int], scheme: Scheme) -> Shape:
        """Give the shape of the scale of a weight [out, in]."""
        if scheme.weights is Granularity.BLOCK:
            return count_blocks(shape, scheme.block)
        if scheme.weights is Granularity.CHANNEL:
            return (shape[0], *self.scalar_shape)
        return self.scalar_shape


def find_checkpoint_dialect(name: str, scheme: Scheme) -> CheckpointDialect:
    """Give the checkpoint dialect called `name`, if it can express `scheme`.

    Raises:
        UsageError: there is none, or it cannot.
    """
    if name not in CHECKPOINT_DIALECTS:
        raise UsageError(
            f"--format {name}: unknown format",
            hint=f"known formats: {', '.join(CHECKPOINT_DIALECTS)}",
        )
    dialect = CHECKPOINT_DIALECTS[name]
    if name not in scheme.dialects:
        raise UsageError(
            f"--format {name} cannot express --scheme {scheme.name}",
            hint=f"{name} writes {', '.join(dialect.schemes)}; {scheme.name} can be written as "
            f"{', '.join(scheme.dialects)}",
        )
    return dialect


def _make_quantizer(strategy: Config, *, dynamic: bool) -> Config:
    """Make the arguments of one quantizer, as compressed-tensors spells them."""
    return {**_NUMBER, **strategy, "symmetric": True, "dynamic": dynamic}


def _make_weight_quantizer(scheme: Scheme) -> Config:
    has_blocks = scheme.weights is Granularity.BLOCK
    sizes: Config = {"block_structure": list(scheme.block)} if has_blocks else {}
    return _make_quantizer({"strategy": scheme.weights.value, **sizes}, dynamic=False)


def _make_input_quantizer(scheme: Scheme) -> Config | None:
    if scheme.inputs is InputScaling.NONE:
        return None
    if scheme.has_static_inputs:
        return _make_quantizer({"strategy": "tensor"}, dynamic=False)
    has_groups = scheme.inputs is InputScaling.GROUP
    sizes: Config = {"group_size": GROUP_SIZE} if has_groups else {}
    return _make_quantizer({"strategy": scheme.inputs.value, **sizes}, dynamic=True)


def _make_compressed_tensors_config(
    scheme: Scheme, unquantized: Sequence[UnquantizedMatrix], has_kv: bool
) -> Config:
    inputs = _make_input_quantizer(scheme)
    codec = "naive-quantized" if inputs is None else "float-quantized"
    config: Config = {
        "quant_method": "compressed-tensors",
        "format": codec,
        "quantization_status": "compressed",
        "ignore": _list_unquantized(unquantized, by_tree=True),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _make_weight_quantizer(scheme),
                "input_activations": inputs,
                "output_activations": None,
                "format": codec,
            }
        },
    }
    if has_kv:
        config["kv_cache_scheme"] = _make_quantizer({"strategy": "tensor"}, dynamic=False)
    return config


def _make_autofp8_config(
    scheme: Scheme, unquantized: Sequence[UnquantizedMatrix], has_kv: bool
) -> Config:
    names = _list_unquantized(unquantized)
    config: Config = {
        "quant_method": "fp8",
        "activation_scheme": scheme.autofp8,
        "ignored_layers": names,
    }
    if scheme.weights is Granularity.BLOCK:
        # transformers reads modules_to_not_convert, and matches ends of paths; vLLM reads both
        config |= {
            "weight_block_size": list(scheme.block),
            "modules_to_not_convert": [*names, *_list_ends(unquantized)],
        }
    if has_kv:
        config["kv_cache_scheme"] = "static"
    return config


_PRODUCER = {"name": "fp8calib", "version": __version__}


def _make_modelopt_config(
    scheme: Scheme, unquantized: Sequence[UnquantizedMatrix], has_kv: bool
) -> Config:
    config: Config = {
        "quant_method": "modelopt",
        "quant_algo": scheme.modelopt,
        "ignore": _list_unquantized(unquantized),
        "producer": _PRODUCER,
    }
    if scheme.has_static_inputs:
        fixed = {"dynamic": False, **_NUMBER}
        group = {"input_activations": fixed, "weights": fixed, "targets": ["Linear"]}
        config["config_groups"] = {"group_0": group}
    if has_kv:
        config["kv_cache_scheme"] = {"dynamic": False, **_NUMBER}
    return config


def _make_modelopt_files(
    scheme: Scheme, unquantized: Sequence[UnquantizedMatrix], has_kv: bool
) -> Config:
    document = {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": scheme.modelopt,
            "kv_cache_quant_algo": "FP8" if has_kv else None,
            "exclude_modules": _list_unquantized(unquantized),
        },
    }
    return {MODELOPT_CONFIG_NAME: document}


def _list_unquantized(
    unquantized: Sequence[UnquantizedMatrix], *, by_tree: bool = False
) -> list[str]:
    """Name the linears that have no scales, and the output head even where it is tied.

    Args:
        unquantized: all matrices that are not quantized.
        by_tree: use one expression for all linears of a tower or projector, and match linears in
            numbered layers by the end of their paths too. These match under any prefix that an
            engine gives the paths. They have no quantifier after a bracket, because `check` does
            not evaluate such expressions.
    """
    names = [HEAD]
    for item in unquantized:
        if by_tree and item.tree:
            names.append(_express_end(item.tree))
            continue
        names += item.linears
        if by_tree:
            names += map(_express_end, item.ends)
    return list(dict.fromkeys(names))


def _express_end(end: str) -> str:
    """Make an expression for the modules whose path ends with `end`, and those inside them."""
    return f"re:(.*[.]|){re.escape(end)}([.].*|)$"


def _list_ends(unquantized: Sequence[UnquantizedMatrix]) -> list[str]:
    """List the ends of their paths, for engines that give them another prefix."""
    return list(dict.fromkeys(end for item in unquantized for end in item.ends))


CHECKPOINT_DIALECTS: Mapping[str, CheckpointDialect] = {
    dialect.name: dialect
    for dialect in (
        CheckpointDialect(
            name="compressed-tensors",
            scalar_shape=(1,),
            make_config=_make_compressed_tensors_config,
        ),
        CheckpointDialect(
            name="autofp8",
            scalar_shape=(),
            block_scale_name="weight_scale_inv",
            make_config=_make_autofp8_config,
        ),
        CheckpointDialect(
            name="modelopt",
            scalar_shape=(),
            make_config=_make_modelopt_config,
            make_extra_files=_make_modelopt_files,
            names_kv_by_projection=True,
        ),
    )
}
