"""`kv-overlay`, `kv-overlay-head` and `tgi`: a whole checkpoint, with its weights unchanged.

vLLM and transformers load the first two. If the model is quantized already, its config is merged
(`quantized_model.py`). Otherwise the `quantization_config` has one group that matches no module:
without any group, transformers fails on MoE models; without `ignore`, TGI looks for a target. The
format is `naive-quantized` because TGI knows no float group in the format `dense`
(`layers/compressed_tensors/loader.py`). `ignore` matches no attention layer of vLLM, because vLLM
on TPUs gives an ignored layer no scales (`IGNORED`).

`tgi` is the checkpoint of TGI's pull request #2028, one `kv_scale` a layer. Merged TGI reads it if
a layer has no `k_scale` and `v_scale`; only the branch of the pull request reads the config key.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp8calib.formats.dialect import Dialect, WriteJob
from fp8calib.formats.kv.kv_scales import make_scale_tensors, read_kv_scales
from fp8calib.numerics.formats import E4M3FN

_SCALAR_SHAPE = (1,)
"""The parameter of compressed-tensors 0.20, which transformers 5.23 refuses to fill from shape []
(`core_model_loading.py:set_param_for_module`: mismatched sizes). llm-compressor stores it too."""
IGNORED = r"re:.*(?<!\.attn)$"
"""Every module but the attention layers of vLLM, whose paths end in `.attn`: tpu-inference b8692ff
asks `ignore` before it gives a layer scales (`layers/vllm/quantization/compressed_tensors/
compressed_tensors.py` get_quant_method). No linear has that ending."""


def _write(job: WriteJob, folder: Path) -> None:
    """Write the model with the scales beside its weights, per tensor or per head.

    The methods of quantization imply e4m3fn; another format is recorded in the scales' file.
    """
    strategy = "attn_head" if job.table.per_head else "tensor"
    fmt = None if job.table.fmt is E4M3FN else job.table.fmt
    documents: dict[str, object] = {}
    updates: dict[str, object] = {"quantization_config": make_quantization_config(strategy)}
    if job.quantized is None:
        scales = make_scale_tensors(job.table, scalar_shape=_SCALAR_SHAPE)
    else:
        scales = job.quantized.make_tensors(job.table)
        updates, documents = job.quantized.merge(strategy)
    job.save_checkpoint(folder, scales, config_updates=updates, fmt=fmt, documents=documents)


def make_quantization_config(strategy: str) -> dict[str, object]:
    """Make the `quantization_config` of a model whose KV cache alone is quantized.

    `strategy` is that of the scales: `tensor` or `attn_head`.
    """
    number = {"num_bits": 8, "type": "float"}
    fixed = {"symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "quantization_status": "compressed",
        "ignore": [IGNORED],
        "config_groups": {
            "group_0": {
                "targets": ["re:^no-module$"],
                "weights": {**number, "strategy": "tensor", **fixed},
            }
        },
        "kv_cache_scheme": {**number, "strategy": strategy, **fixed},
    }


def _write_tgi(job: WriteJob, folder: Path) -> None:
    """Write the model with one scale for k and v of every layer, fp32 0-dim."""
    import torch  # noqa: PLC0415 -- the names of dialects must cost nothing

    scales = {
        f"{attention.checkpoint_module}.kv_scale": torch.tensor(job.table.kv(attention))
        for _, attention in job.table.geometry.attentions()
    }
    updates = {"kv_cache_torch_dtype": job.table.fmt.dtype_name}
    job.save_checkpoint(folder, scales, config_updates=updates, fmt=None)


KV_OVERLAY = Dialect(
    name="kv-overlay",
    description="a complete checkpoint: weights hard-linked, `k_scale` / `v_scale`, "
    "`kv_cache_scheme` in the config",
    path_pattern="kv-overlay",
    write=_write,
    needs_model=True,
    configures_quantization=True,
    has_query=True,
)
"""Read as `compressed-tensors`, like `KV_OVERLAY_HEAD`."""

KV_OVERLAY_HEAD = replace(
    KV_OVERLAY,
    name="kv-overlay-head",
    description="the same with one scale per KV head (`attn_head`)",
    path_pattern="kv-overlay-head",
    per_head=True,
)
TGI_CHECKPOINT = Dialect(
    name="tgi",
    description="an overlay with `kv_scale` and `kv_cache_torch_dtype`, the format of TGI's pull "
    "request 2028",
    path_pattern="tgi",
    write=_write_tgi,
    recognise=lambda files: bool(files.spellings),
    read=read_kv_scales,
    needs_model=True,
    joins_kv=True,
)
