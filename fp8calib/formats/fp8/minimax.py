"""`quant_method: mxfp8`: as MiniMax releases models, and transformers 5.23 reads them."""

from __future__ import annotations

from pathlib import Path

from fp8calib.formats.fp8.dialect import Config, ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Fields,
    FindScheme,
    StoredScheme,
    is_below,
    read_block,
    read_list,
    refuse_ignored,
)
from fp8calib.formats.refusals import refusal
from fp8calib.numerics.schemes import MX_BLOCK, SCHEMES

_BLOCK_KEY = "weight_block_size"
_KV = {"kv_cache_quant_algo": "FP8"}
"""What vLLM 0.32.0 reads of the KV cache (`modelopt.py`, ModelOptMxFp8Config.from_config)."""


def _make_finder(path: Path, config: Fields) -> FindScheme:
    block = config.get(_BLOCK_KEY)
    if block is not None and read_block(path, _BLOCK_KEY, block) != MX_BLOCK:
        fault = f"{_BLOCK_KEY} is {block!a:.60}"
        raise refusal(path, fault, hint=f"blocks of MXFP8 are {list(MX_BLOCK)}")
    ignored = read_list(path, config, "ignored_layers", "modules_to_not_convert")
    scheme = SCHEMES["mxfp8"]

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, is_below)
        return StoredScheme(weights=scheme.weights, block=scheme.block, inputs=scheme.inputs)

    return find


def _make_config(job: ConfigJob) -> Config:
    names = job.excluded
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        _BLOCK_KEY: list(MX_BLOCK),
        # transformers 5.23 takes the bytes for exponents on GPUs only where the config says so
        "scale_fmt": "ue8m0",
        "ignored_layers": names,
        # transformers matches ends of paths
        "modules_to_not_convert": [*names, *job.excluded_ends],
        **(_KV if job.has_kv else {}),
    }


MXFP8 = Fp8Dialect(
    name="mxfp8",
    description="MXFP8 as models are released in it",
    method="mxfp8",
    make_finder=_make_finder,
    make_config=_make_config,
    add_kv=lambda _path, config, _strategy: {**config, **_KV},
    expressible=("mxfp8",),
    scale_name="weight_scale_inv",
    block_scale_name="weight_scale_inv",
)
