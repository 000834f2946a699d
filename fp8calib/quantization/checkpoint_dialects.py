"""How an FP8 checkpoint is spelled: names and shapes of its scales, and its quantization config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8calib import __version__
from fp8calib.dialects.kv.config import MODELOPT_CONFIG_NAME
from fp8calib.dialects.kv.tensors import name_scales
from fp8calib.errors import UsageError
from fp8calib.fp8.encode import BLOCK
from fp8calib.fp8.schemes import SCHEMES, Dynamic, Scheme
from fp8calib.geometry.model_geometry import Attention
from fp8calib.geometry.sites import Role
from fp8calib.quantization.selection.select import HEAD, Left

Shape = tuple[int, ...]
Config = dict[str, object]

_NUMBER: Mapping[str, object] = {"num_bits": 8, "type": "float"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDialect:
    """One way to write an FP8 checkpoint."""

    name: str
    scale_shapes: Mapping[Dynamic, Callable[[int, int], Shape]]
    """From rows and columns of a weight to the shape of its scale, by what a scale covers."""
    scalar_shape: Shape
    """Of scales of inputs, K and V."""
    schemes: tuple[str, ...]
    make_config: Callable[[Scheme, Sequence[Left], bool], Config]
    """From scheme, what is left, and whether there are KV scales to the `quantization_config`."""
    name_kv: Callable[[Attention, Role, bool], tuple[str, ...]]
    """From attention, K or V, and whether the checkpoint has a k_proj to the names of its scale."""

    def name_scale(self, module: str, scheme: Scheme) -> str:
        """Name the scale of a linear's weight."""
        is_inverse = self.name == "autofp8" and scheme.weights is Dynamic.BLOCK
        return f"{module}.weight_scale_inv" if is_inverse else f"{module}.weight_scale"

    def shape_scale(self, shape: tuple[int, int], scheme: Scheme) -> Shape:
        """Tell the shape of the scale of a weight."""
        return self.scale_shapes[scheme.weights](*shape)

    def make_extra_files(self, scheme: Scheme, left: Sequence[Left], has_kv: bool) -> Config:
        """Make the JSON files that the form has beside config.json."""
        if self.name != "modelopt":
            return {}
        return {MODELOPT_CONFIG_NAME: _make_modelopt_file(scheme, left, has_kv)}


def find_form(name: str, scheme: Scheme) -> CheckpointDialect:
    """Give the form called `name`, if it can say `scheme`.

    Raises:
        UsageError: there is none, or it cannot.
    """
    if name not in FORMS:
        raise UsageError(
            f"--format {name}: unknown format", hint=f"known formats: {', '.join(FORMS)}"
        )
    form = FORMS[name]
    if scheme.name not in form.schemes:
        others = [other.name for other in FORMS.values() if scheme.name in other.schemes]
        raise UsageError(
            f"--format {name} has no form for --scheme {scheme.name}",
            hint=f"{name} writes {', '.join(form.schemes)}; {scheme.name} can be written as "
            f"{', '.join(others)}",
        )
    return form


def _name_plain(attention: Attention, role: Role, _: bool) -> tuple[str, ...]:
    return name_scales(attention, role)


def _name_by_projection(attention: Attention, role: Role, has_projections: bool) -> tuple[str, ...]:
    if not has_projections:
        return name_scales(attention, role)
    return (f"{attention.checkpoint_module}.{role}_proj.{role}_scale",)


def _shape_blocks(rows: int, columns: int) -> Shape:
    return -(-rows // BLOCK), -(-columns // BLOCK)


_WEIGHT_STRATEGIES: Mapping[Dynamic, Config] = {
    Dynamic.TENSOR: {"strategy": "tensor"},
    Dynamic.TOKEN: {"strategy": "channel"},
    Dynamic.BLOCK: {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
}
_INPUT_STRATEGIES: Mapping[Dynamic, Config] = {
    Dynamic.TOKEN: {"strategy": "token"},
    Dynamic.GROUP: {"strategy": "group", "group_size": BLOCK},
}


def _describe(strategy: Config, *, dynamic: bool) -> Config:
    return {**_NUMBER, **strategy, "symmetric": True, "dynamic": dynamic}


def _describe_inputs(scheme: Scheme) -> Config | None:
    if scheme.has_static_inputs:
        return _describe({"strategy": "tensor"}, dynamic=False)
    if scheme.inputs is None:
        return None
    return _describe(_INPUT_STRATEGIES[scheme.inputs], dynamic=True)


def _make_compressed_tensors_config(scheme: Scheme, left: Sequence[Left], has_kv: bool) -> Config:
    inputs = _describe_inputs(scheme)
    codec = "naive-quantized" if inputs is None else "float-quantized"
    config: Config = {
        "quant_method": "compressed-tensors",
        "format": codec,
        "quantization_status": "compressed",
        "ignore": _list_left(left, by_tree=True),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _describe(_WEIGHT_STRATEGIES[scheme.weights], dynamic=False),
                "input_activations": inputs,
                "output_activations": None,
                "format": codec,
            }
        },
    }
    if has_kv:
        config["kv_cache_scheme"] = _describe({"strategy": "tensor"}, dynamic=False)
    return config


def _make_autofp8_config(scheme: Scheme, left: Sequence[Left], has_kv: bool) -> Config:
    names = _list_left(left)
    config: Config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.has_static_inputs else "dynamic",
        "ignored_layers": names,
    }
    if scheme.weights is Dynamic.BLOCK:
        # transformers reads the second name of the list, and takes ends; vLLM reads either
        config |= {
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*names, *_list_ends(left)],
        }
    if has_kv:
        config["kv_cache_scheme"] = "static"
    return config


_MODELOPT_ALGORITHMS = {"fp8-static": "FP8", "fp8-dynamic": "FP8_PER_CHANNEL_PER_TOKEN"}
_PRODUCER = {"name": "fp8calib", "version": __version__}


def _make_modelopt_config(scheme: Scheme, left: Sequence[Left], has_kv: bool) -> Config:
    config: Config = {
        "quant_method": "modelopt",
        "quant_algo": _MODELOPT_ALGORITHMS[scheme.name],
        "ignore": _list_left(left),
        "producer": _PRODUCER,
    }
    if scheme.has_static_inputs:
        fixed = {"dynamic": False, **_NUMBER}
        group = {"input_activations": fixed, "weights": fixed, "targets": ["Linear"]}
        config["config_groups"] = {"group_0": group}
    if has_kv:
        config["kv_cache_scheme"] = {"dynamic": False, **_NUMBER}
    return config


def _make_modelopt_file(scheme: Scheme, left: Sequence[Left], has_kv: bool) -> Config:
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": _MODELOPT_ALGORITHMS[scheme.name],
            "kv_cache_quant_algo": "FP8" if has_kv else None,
            "exclude_modules": _list_left(left),
        },
    }


def _list_left(left: Sequence[Left], *, by_tree: bool = False) -> list[str]:
    """Name the linears an engine must not look for scales of; the head even where it is tied.

    Args:
        left: all that is not quantized.
        by_tree: name towers and projectors by an expression for all that is in them, and what is
            in the layers of a part by one for the end of its path. These hold wherever an engine
            hangs them, and have no quantifier behind a bracket, which `check` would not try.
    """
    names = [HEAD]
    for item in left:
        if by_tree and item.tree:
            names.append(_express_end(item.tree))
            continue
        names += item.linears
        if by_tree:
            names += map(_express_end, item.ends)
    return list(dict.fromkeys(names))


def _express_end(end: str) -> str:
    """Write an expression for the modules whose path ends so, and all that is in them."""
    return f"re:(.*[.]|){re.escape(end)}([.].*|)$"


def _list_ends(left: Sequence[Left]) -> list[str]:
    """Name the same by the ends of their paths, where engines may begin these otherwise."""
    return list(dict.fromkeys(end for item in left for end in item.ends))


FORMS: Mapping[str, CheckpointDialect] = {
    form.name: form
    for form in (
        CheckpointDialect(
            name="compressed-tensors",
            scale_shapes={
                Dynamic.TENSOR: lambda _rows, _columns: (1,),
                Dynamic.TOKEN: lambda rows, _columns: (rows, 1),
                Dynamic.BLOCK: _shape_blocks,
            },
            scalar_shape=(1,),
            schemes=tuple(SCHEMES),
            make_config=_make_compressed_tensors_config,
            name_kv=_name_plain,
        ),
        CheckpointDialect(
            name="autofp8",
            scale_shapes={
                Dynamic.TENSOR: lambda _rows, _columns: (),
                Dynamic.BLOCK: _shape_blocks,
            },
            scalar_shape=(),
            schemes=("fp8-static", "fp8-block"),
            make_config=_make_autofp8_config,
            name_kv=_name_plain,
        ),
        CheckpointDialect(
            name="modelopt",
            scale_shapes={
                Dynamic.TENSOR: lambda _rows, _columns: (),
                Dynamic.TOKEN: lambda rows, _columns: (rows,),
            },
            scalar_shape=(),
            schemes=("fp8-static", "fp8-dynamic"),
            make_config=_make_modelopt_config,
            name_kv=_name_by_projection,
        ),
    )
}
