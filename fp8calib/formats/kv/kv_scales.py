"""KV scales as tensors: their names in overlays, and the dialects that are read from tensors.

`kv-scales` is a file of them alone. Those of other tools are only read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, Spelling, WriteJob
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK
from fp8calib.model.geometry import Role
from fp8calib.numerics.formats import E4M3FN

if TYPE_CHECKING:
    import torch

    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.geometry import Attention, ModelGeometry

_EXPANDED_NOTE = (
    "ModelOpt measures K and V of latent attention expanded to heads; where an engine caches the "
    "latents instead, calibrate them"
)


_INNER_TOO = frozenset(
    {
        *("AfmoeForCausalLM", "Cohere2MoeForCausalLM", "Glm4ForCausalLM", "LagunaForCausalLM"),
        *("Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration"),
        *("GraniteMoeForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM"),
        *("MixtralForCausalLM", "OPTForCausalLM", "PersimmonForCausalLM", "PhiForCausalLM"),
        *("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "Starcoder2ForCausalLM",
    }
)
"""Classes for which SGLang loads `self_attn.attn.k_scale` and ignores `self_attn.k_scale` (their
loaders run, GraniteMoe's read); for Qwen3_5 before 0.5.19."""
_INNER_ONLY = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")
"""Classes for which SGLang stops at `attn.k_scale`, as vLLM does for gpt2 (`load_weights` in
`srt/models/` of SGLang 0.5.16 to 0.5.23, and in `models/gpt2.py` of vLLM 0.32.0). It stops for
gemma, granite, olmo2 and others too, but transformers, whose attention of gpt2 has no scales,
computes with memory that nothing set where theirs are missing."""


def name_scales(geometry: ModelGeometry, attention: Attention, role: Role) -> tuple[str, ...]:
    """Name the scale tensors of `role`, which all hold the same number.

    Engines keep a scale in a layer `attn` inside the attention. vLLM maps `self_attn.k_scale` to
    it, and loads `self_attn.attn.k_scale` too; SGLang's classes differ. If the attention module
    itself is called `attn` (gptj, mpt), vLLM does not map it (0.32.0
    `quantization/base_config.py:get_cache_scale_mapper`). transformers knows `self_attn.k_scale`.
    """
    module = attention.checkpoint_module
    outer, inner = f"{module}.{role}_scale", f"{module}.attn.{role}_scale"
    if attention.kind == "latent":
        return (outer,)
    if geometry.architecture in _INNER_ONLY:
        return (inner,)
    is_attn = module.rpartition(".")[2] == "attn"
    return (outer, inner) if is_attn or geometry.architecture in _INNER_TOO else (outer,)


def make_scale_tensors(
    table: ScaleTable,
    *,
    scalar_shape: tuple[int, ...] = (),
    all_ranks: bool = False,
    name: Callable[[ModelGeometry, Attention, Role], tuple[str, ...]] = name_scales,
) -> dict[str, torch.Tensor]:
    """Make the scale tensors of every layer that reads a KV cache, and of q if the table has it.

    A per-tensor scale is the scale of the first rank and has the shape `scalar_shape`; per-head
    scales are [heads, 1, 1]; those of all ranks are [ranks]. `name` gives the names of the tensors
    of a layer.
    """
    shape = (-1, 1, 1) if table.per_head else scalar_shape
    tensors: dict[str, torch.Tensor] = {}
    for _, attention in table.geometry.attentions():
        for role in (Role.K, Role.V, Role.Q):
            scale = table.scales.get(attention.site(role))
            if scale is not None:
                values = scale.values if all_ranks else scale.values[0].reshape(shape)
                tensors |= dict.fromkeys(name(table.geometry, attention, role), values)
    return tensors


def _write(job: WriteJob, path: Path) -> None:
    """Write the scales under the names an overlay gives them, fp32 0-dim."""
    job.save_tensors(path, make_scale_tensors(job.table), fmt=job.table.fmt)


def read_kv_scales(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    """Read the scale tensors of a file or checkpoint, in any tool's spelling."""
    from fp8calib.formats.kv.read_tensors import read_tensors  # noqa: PLC0415 -- imports torch

    return read_tensors(files, geometry)


def _read_modelopt(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    parsed = read_kv_scales(files, geometry)
    if parsed.origin is None and geometry.has_latent_attention:
        return replace(parsed, notes=(*parsed.notes, _EXPANDED_NOTE))
    return parsed


def _read_trtllm(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.formats.kv.read_ranks import read_rank_files  # noqa: PLC0415 -- imports numpy

    return read_rank_files(files, geometry)


def _has_rank_files(files: ScaleFiles) -> bool:
    names = (name for listed in files.tensor_names.values() for name in listed)
    return any(RANK_FILE_MARK in name for name in names)


def _recognise(files: ScaleFiles) -> bool:
    is_tgi = files.config is not None or files.spellings == {Spelling.SINGLE}
    return bool(files.spellings) and not is_tgi


def _is_of_tool(quant_method: str, spelling: Spelling | None, files: ScaleFiles) -> bool:
    """Recognise a tool by a spelling that only it uses; without such a spelling, by the config."""
    if files.spellings & {Spelling.PROJECTION, Spelling.OUTPUT}:
        return spelling in files.spellings
    if files.spellings == {Spelling.SINGLE}:  # of these tools, only AutoFP8 wrote it
        return quant_method == files.quant_method == "fp8"
    return files.quant_method.partition("_")[0] == quant_method


KV_SCALES = Dialect(
    name="kv-scales",
    description="only the scale tensors",
    path_pattern="kv_scales.safetensors",
    write=_write,
    recognise=_recognise,
    read=read_kv_scales,
    has_query=True,
)
COMPRESSED_TENSORS_KV = Dialect(
    name="compressed-tensors",
    description="llm-compressor's checkpoint, k_scale and v_scale per layer or per head",
    recognise=partial(_is_of_tool, "compressed-tensors", None),
    read=read_kv_scales,
    formats=(E4M3FN,),
)
AUTOFP8_KV = Dialect(
    name="autofp8",
    description="AutoFP8's checkpoint, k_scale and v_scale or the older kv_scale",
    recognise=partial(_is_of_tool, "fp8", None),
    read=read_kv_scales,
    formats=(E4M3FN,),
)
QUARK_KV = Dialect(
    name="quark",
    description="Quark's checkpoint, output_scale of k_proj and v_proj",
    recognise=partial(_is_of_tool, "quark", Spelling.OUTPUT),
    read=read_kv_scales,
    formats=(E4M3FN,),
)
MODELOPT_KV = Dialect(
    name="modelopt",
    description="ModelOpt's checkpoint, k_scale of k_proj and v_scale of v_proj",
    recognise=partial(_is_of_tool, "modelopt", Spelling.PROJECTION),
    read=_read_modelopt,
    formats=(E4M3FN,),
)
TRTLLM = Dialect(
    name="trtllm",
    description="rank files of TensorRT-LLM and AMMO, one kv_cache_scaling_factor per layer",
    recognise=_has_rank_files,
    read=_read_trtllm,
    scale_suffixes=(RANK_FILE_MARK,),
)
