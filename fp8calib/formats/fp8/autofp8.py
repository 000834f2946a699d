"""The dialects with `quant_method: fp8`."""

from __future__ import annotations

from pathlib import Path

from fp8calib.formats.fp8.dialect import Config, ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    is_below,
    make_scheme,
    read_block,
    read_list,
    refuse_ignored,
)
from fp8calib.formats.refusals import refusal
from fp8calib.numerics.schemes import Granularity

_ACTIVATION_SCHEMES = {"fp8-static": "static", "fp8-block": "dynamic"}


def _make_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of AutoFP8 and of transformers' fine-grained FP8 (`quant_method: fp8`)."""
    scheme = config.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        fault = f"activation_scheme is {scheme!a:.40}"
        raise refusal(path, fault, hint="it must be static or dynamic")
    block = config.get("weight_block_size")
    size = None if block is None else read_block(path, "weight_block_size", block)
    if size is not None and scheme == "static":
        raise refusal(path, "activation_scheme is static, but there is a weight_block_size")
    ignored = read_list(path, config, "ignored_layers", "modules_to_not_convert")
    weights = Arguments(strategy="tensor" if size is None else "block", dynamic=False, block=size)
    inputs = Arguments(
        strategy="tensor" if size is None else "group",
        dynamic=scheme == "dynamic",
        group_size=None if size is None else size[1],
    )

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, is_below)
        return make_scheme(path, module, weights, inputs)

    return find


def _make_config(job: ConfigJob) -> Config:
    scheme, names = job.scheme, job.excluded
    config: Config = {
        "quant_method": "fp8",
        "activation_scheme": _ACTIVATION_SCHEMES[scheme.name],
        "ignored_layers": names,
    }
    if scheme.weights is Granularity.BLOCK:
        # transformers reads modules_to_not_convert, and matches ends of paths; vLLM reads both
        config |= {
            "weight_block_size": list(scheme.block),
            "modules_to_not_convert": [*names, *job.excluded_ends],
        }
    if job.has_kv:
        config["kv_cache_scheme"] = "static"
    return config


AUTOFP8 = Fp8Dialect(
    name="autofp8",
    description="what AutoFP8 writes; with blocks, DeepSeek's and transformers' fine-grained FP8",
    method="fp8",
    make_finder=_make_finder,
    make_config=_make_config,
    # as AutoFP8 does; engines read the scales of `quant_method: fp8` without it
    add_kv=lambda _path, config, _strategy: {**config, "kv_cache_scheme": "static"},
    expressible=tuple(_ACTIVATION_SCHEMES),
    block_scale_name="weight_scale_inv",
)

FINEGRAINED = Fp8Dialect(
    name="finegrained",
    description="what transformers' fine-grained FP8 writes without blocks",
    method="fp8",
    make_finder=_make_finder,
    scale_name="weight_scale_inv",
    block_scale_name="weight_scale_inv",
    input_scale_name="activation_scale",
)
