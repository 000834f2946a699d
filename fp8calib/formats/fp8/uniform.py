"""Dialects with one scheme for all linears, and lists of the modules that are left out."""

from __future__ import annotations

from pathlib import Path

from fp8calib.errors import refusal
from fp8calib.formats.fp8.dialect import Config, ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    make_scheme,
    read_block,
    read_list,
    unless_ignored,
)
from fp8calib.numerics.schemes import MX_BLOCK, SCHEMES, Granularity, InputScaling

_IGNORED = ("ignored_layers", "modules_to_not_convert")
_ACTIVATION_SCHEMES = {"fp8-static": "static", "fp8-block": "dynamic"}
BLOCK_KEY = "weight_block_size"
_MAX_BOUND = 1e38
_MINIMAX_KV = {"kv_cache_quant_algo": "FP8"}
"""What vLLM 0.32.0 reads of the KV cache (`modelopt.py`, ModelOptMxFp8Config.from_config)."""


def _is_below(module: str, pattern: str) -> bool:
    """Tell whether the entry names a module that contains this one, as transformers matches it."""
    return bool(pattern) and module.startswith(f"{pattern}.")


def _read_fp8(path: Path, config: Fields) -> FindScheme:
    """Read the config of AutoFP8 and of transformers' fine-grained FP8 (`quant_method: fp8`)."""
    scheme = config.get("activation_scheme")
    block = config.get(BLOCK_KEY)
    size = None if block is None else read_block(path, BLOCK_KEY, block)
    if scheme != "dynamic" and (scheme != "static" or size is not None):
        fault = f"activation_scheme is {scheme!a:.40}"
        raise refusal(path, fault, hint=f"it must be dynamic, or static without {BLOCK_KEY}")
    weights = Arguments(strategy="tensor" if size is None else "block", dynamic=False, block=size)
    inputs = Arguments(
        strategy="tensor" if size is None else "group",
        dynamic=scheme == "dynamic",
        group_size=None if size is None else size[1],
    )
    ignored = read_list(path, config, *_IGNORED)
    return unless_ignored(
        path, ignored, _is_below, lambda module: make_scheme(path, module, weights, inputs)
    )


def _write_fp8(job: ConfigJob) -> Config:
    scheme, names = job.scheme, job.excluded
    config: Config = {
        "quant_method": "fp8",
        "activation_scheme": _ACTIVATION_SCHEMES[scheme.name],
        "ignored_layers": names,
    }
    if scheme.weights is Granularity.BLOCK:
        # transformers reads modules_to_not_convert, and matches ends of paths; vLLM reads both
        config |= {
            BLOCK_KEY: list(scheme.block),
            "modules_to_not_convert": [*names, *job.excluded_ends],
        }
    if job.has_kv:
        config["kv_cache_scheme"] = "static"
    return config


def _read_minimax(path: Path, config: Fields) -> FindScheme:
    block = config.get(BLOCK_KEY)
    if block is not None and read_block(path, BLOCK_KEY, block) != MX_BLOCK:
        fault = f"{BLOCK_KEY} is {block!a:.60}"
        raise refusal(path, fault, hint=f"blocks of MXFP8 are {list(MX_BLOCK)}")
    scheme = StoredScheme.of(SCHEMES["mxfp8"])
    ignored = read_list(path, config, *_IGNORED)
    return unless_ignored(path, ignored, _is_below, lambda _: scheme)


def _write_minimax(job: ConfigJob) -> Config:
    names = job.excluded
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        BLOCK_KEY: list(MX_BLOCK),
        # transformers 5.23 takes the bytes for exponents on GPUs only where the config says so
        "scale_fmt": "ue8m0",
        "ignored_layers": names,
        # transformers matches ends of paths
        "modules_to_not_convert": [*names, *job.excluded_ends],
        **(_MINIMAX_KV if job.has_kv else {}),
    }


def _read_fbgemm(path: Path, config: Fields) -> FindScheme:
    """Read the config of fbgemm: scales per output channel and per token, whose amax is limited."""
    bound = config.get("activation_scale_ub")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < _MAX_BOUND:
        raise refusal(
            path, f"activation_scale_ub is {bound!a:.40}", hint="it must be a number above 0"
        )
    scheme = StoredScheme(
        weights=Granularity.CHANNEL, inputs=InputScaling.TOKEN, upper_bound=float(bound)
    )
    ignored = read_list(path, config, "modules_to_not_convert")
    return unless_ignored(path, ignored, _is_below, lambda _: scheme)


AUTOFP8 = Fp8Dialect(
    name="autofp8",
    description="what AutoFP8 writes; with blocks, DeepSeek's and transformers' fine-grained FP8",
    method="fp8",
    make_finder=_read_fp8,
    make_config=_write_fp8,
    # as AutoFP8 does; engines read the scales of `quant_method: fp8` without it
    add_kv=lambda _path, config, _strategy: {**config, "kv_cache_scheme": "static"},
    expressible=tuple(_ACTIVATION_SCHEMES),
    block_scale_name="weight_scale_inv",
)
FINEGRAINED = Fp8Dialect(
    name="finegrained",
    description="what transformers' fine-grained FP8 writes without blocks",
    method="fp8",
    make_finder=_read_fp8,
    scale_name="weight_scale_inv",
    block_scale_name="weight_scale_inv",
    input_scale_name="activation_scale",
)
MXFP8 = Fp8Dialect(  # as MiniMax releases models, and transformers 5.23 reads them
    name="mxfp8",
    description="MXFP8 as models are released in it",
    method="mxfp8",
    make_finder=_read_minimax,
    make_config=_write_minimax,
    add_kv=lambda _path, config, _strategy: {**config, **_MINIMAX_KV},
    expressible=("mxfp8",),
    scale_name="weight_scale_inv",
    block_scale_name="weight_scale_inv",
)
FBGEMM = Fp8Dialect(
    name="fbgemm_fp8",
    description="what transformers writes with fbgemm",
    method="fbgemm_fp8",
    make_finder=_read_fbgemm,
)
