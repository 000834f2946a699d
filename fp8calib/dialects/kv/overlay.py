"""`kv-overlay` and `kv-overlay-head`: a whole checkpoint that vLLM and transformers load.

The weights stay as they are. The `quantization_config` names one group that matches no module: an
empty one makes transformers fail on MoE models, and without `ignore` TGI looks for a target. TGI
knows no float group in the format `dense` either (`layers/compressed_tensors/loader.py`), hence
`naive-quantized`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.overlay import write_overlay
from fp8calib.checkpoint.tensor_file import save_tensors
from fp8calib.dialects.kv.metadata import Provenance, make_metadata
from fp8calib.dialects.kv.tensors import make_scale_tensors
from fp8calib.fp8.formats import E4M3FN
from fp8calib.scales.compute import ScaleTable

Strategy = Literal["tensor", "attn_head"]

SCALAR_SHAPE = (1,)
"""The parameter of compressed-tensors 0.20, which transformers 5.23 refuses to fill from shape []
(`core_model_loading.py:set_param_for_module`: mismatched sizes). llm-compressor stores it too."""
UNLISTED_NAME = "kv_scales.safetensors"
"""A file beside the index, for TGI, which reads every file; vLLM reads those the index names."""
STRICT_TYPES = ("gpt2",)
"""Model types that vLLM loads without ignoring scales it has no place for: beside
`attn.attn.k_scale`, a listed `attn.k_scale` is a ValueError (vLLM 0.32.0 `models/gpt2.py`, whose
inner model has no `quant_config`; gptj and gpt_bigcode load both)."""


def write_kv_overlay(
    table: ScaleTable, source: Checkpoint, folder: Path, *, provenance: Provenance | None = None
) -> Mapping[str, str]:
    """Write `source` with the table's scales beside its weights, per tensor or per head.

    compressed-tensors means e4m3fn; another format is named in the metadata of the scales' file.

    Returns:
        The entries of the source that were left out, each with the reason.

    Raises:
        ModelError: the source's config.json is missing or broken.
        ExportError: the source already has such tensors, or the folder cannot be written.
    """
    strategy: Strategy = "attn_head" if table.per_head else "tensor"
    scales = make_scale_tensors(table, scalar_shape=SCALAR_SHAPE)
    unlisted = _list_refused_by_vllm(table, scales)
    fmt = None if table.fmt is E4M3FN else table.fmt
    metadata = make_metadata(fmt=fmt, origin=table.origin, provenance=provenance)
    skipped = write_overlay(
        source,
        folder,
        scales={name: scale for name, scale in scales.items() if name not in unlisted},
        config_updates={"quantization_config": make_quantization_config(strategy)},
        metadata=metadata,
    )
    if unlisted:
        tensors = {name: scales[name] for name in unlisted}
        save_tensors(folder / UNLISTED_NAME, tensors, metadata={"format": "pt", **metadata})
    return skipped


def _list_refused_by_vllm(table: ScaleTable, names: Iterable[str]) -> list[str]:
    if table.geometry.model_type not in STRICT_TYPES:
        return []
    return [name for name in names if not name.rpartition(".")[0].endswith(".attn.attn")]


def make_quantization_config(strategy: Strategy) -> dict[str, object]:
    """Make the `quantization_config` under which only the KV cache is quantized."""
    number = {"num_bits": 8, "type": "float"}
    fixed = {"symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "quantization_status": "compressed",
        "ignore": ["re:.*"],
        "config_groups": {
            "group_0": {
                "targets": ["re:^no-module$"],
                "weights": {**number, "strategy": "tensor", **fixed},
            }
        },
        "kv_cache_scheme": {**number, "strategy": strategy, **fixed},
    }
