"""auto-round's own format (`quant_method: auto-round`) where its weights are FP8.

auto-round 0.16 writes it with `--format auto_round`; its other formats are the dialects of other
tools. `extra_config` gives single layers other bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fp8calib.errors import refusal
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    make_scheme,
    read_block,
    weight_contradiction,
)
from fp8calib.model.module_paths import matches_expression

_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""A key of extra_config with one of these is an expression (vLLM 0.32.0 inc/config_parser.py)."""
_STRATEGIES = {-1: "channel", 0: "tensor"}
_UNQUANTIZED_BITS = 16


def is_mx(config: Fields) -> bool:
    """Tell whether the config's weights are MXFP8."""
    return str(config.get("data_type")).startswith("mx_fp") and config.get("bits") == 8


def _find_layer(config: Fields, module: str) -> tuple[Fields, str]:
    """Give what the config says of a linear, and the key that says it; empty for the whole config.

    Names come before ends of paths, and these before expressions, as in vLLM 0.32.0
    (inc/config_parser.py, read).

    Raises:
        ValueError: an expression is malformed or too costly.
    """
    extra = config.get("extra_config")
    layers: Mapping[str, object] = extra if isinstance(extra, dict) else {}
    ends = (key for key in layers if module.endswith(f".{key}"))
    expressions = (
        key
        for key in layers
        if not _SPECIAL.isdisjoint(key) and matches_expression(f".*(?:{key})", module)  # a search
    )
    for keys in ((key for key in layers if key == module), ends, expressions):
        key = next(keys, None)
        if key is not None and isinstance(own := layers[key], dict):
            return {**config, **own}, key
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
    names = blocks.split(",") if isinstance(blocks, str) else blocks
    if isinstance(names, list) and not module.startswith(tuple(map(str, names))):
        return {**config, "bits": _UNQUANTIZED_BITS}, "block_name_to_quantize"
    return config, ""


def _make_finder(path: Path, config: Fields) -> FindScheme:
    kind, bits = config.get("data_type", "int"), config.get("bits")
    if not is_mx(config) and (kind, bits) not in (("fp", 8), ("fp8", 8)):
        fault = f"the weights of quant_method 'auto-round' are {kind!a:.40} of {bits!a:.40} bits"
        raise refusal(path, fault, hint="FP8 and MXFP8 weights are read")

    def find(module: str) -> StoredScheme:
        try:
            layer, key = _find_layer(config, module)
        except ValueError as error:
            fault = f"extra_config: {error}"
            raise refusal(path, fault, hint="correct the quantization config") from error
        if type(size := layer.get("bits")) is not int or size >= _UNQUANTIZED_BITS:
            raise weight_contradiction(path, module, f"the config excludes {key!a:.80}")
        return make_scheme(path, module, _read_weights(path, layer), _read_inputs(path, layer))

    return find


def _read_weights(path: Path, layer: Fields) -> Arguments:
    size = layer.get("group_size")
    if is_mx(layer):
        length = size if type(size) is int else None
        return Arguments(strategy="group", dynamic=False, group_size=length, has_exponents=True)
    if isinstance(size, list):
        block = read_block(path, "group_size", size)
        return Arguments(strategy="block", dynamic=False, block=block)
    return Arguments(strategy=_name_strategy(size), dynamic=False)


def _read_inputs(path: Path, layer: Fields) -> Arguments | None:
    bits, size = layer.get("act_bits", _UNQUANTIZED_BITS), layer.get("act_group_size")
    if type(bits) is int and bits >= _UNQUANTIZED_BITS:
        return None
    if bits != 8:
        raise refusal(path, f"act_bits is {bits!a:.40}", hint="FP8 inputs have 8")
    is_dynamic = layer.get("act_dynamic", True) is not False
    if type(size) is int and size > 0:
        return Arguments(
            strategy="group",
            dynamic=is_dynamic,
            group_size=size,
            has_exponents=is_mx({"data_type": layer.get("act_data_type"), "bits": bits}),
        )
    strategy = _name_strategy(size)
    return Arguments(
        strategy="token" if is_dynamic and strategy == "channel" else strategy, dynamic=is_dynamic
    )


def _name_strategy(size: object) -> str:
    known = _STRATEGIES.get(size) if type(size) is int else None
    return known or f"group_size {size!a:.40}"


AUTO_ROUND = Fp8Dialect(
    name="auto-round",
    description="auto-round's own format, with FP8 weights",
    method="auto-round",
    make_finder=_make_finder,
    own_file="quantization_config.json",
    block_scale_name="weight_scale_inv",
)
AUTO_ROUND_MX = replace(
    AUTO_ROUND,
    name="auto-round-mx",
    description="auto-round's own format, with MXFP8 weights",
    block_scale_name="weight_scale",
)
