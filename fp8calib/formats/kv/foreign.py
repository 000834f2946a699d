"""The dialects of other tools, which are only read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, Spelling
from fp8calib.formats.kv.kv_scales import read_kv_scales
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK
from fp8calib.numerics.formats import E4M3FN

if TYPE_CHECKING:
    from fp8calib.model.shapes import ModelGeometry

_EXPANDED_NOTE = (
    "ModelOpt measures K and V of latent attention expanded to heads; where an engine caches the "
    "latents instead, calibrate them"
)


def _find_rank_files(files: ScaleFiles) -> list[Path]:
    """List the rank files of TensorRT-LLM or AMMO."""
    named = files.tensor_names.items()
    return [path for path, names in named if any(RANK_FILE_MARK in name for name in names)]


def _recognise(quant_method: str, spelling: Spelling | None = None) -> Callable[[ScaleFiles], bool]:
    """Recognise a tool by a spelling that only it uses; without such a spelling, by the config."""

    def recognise(files: ScaleFiles) -> bool:
        if files.spellings & {Spelling.PROJECTION, Spelling.OUTPUT}:
            return spelling in files.spellings
        if files.spellings == {Spelling.SINGLE}:  # of these tools, only AutoFP8 wrote it
            return quant_method == files.quant_method == "fp8"
        return (files.quant_method or "").partition("_")[0] == quant_method

    return recognise


def _read_modelopt(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    parsed = read_kv_scales(files, geometry)
    if parsed.origin is None and geometry.has_latent_attention:
        return replace(parsed, notes=(*parsed.notes, _EXPANDED_NOTE))
    return parsed


def _read_trtllm(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.formats.kv.rank_files import read_ranks  # noqa: PLC0415 -- imports torch

    return read_ranks(files, _find_rank_files(files), geometry)


COMPRESSED_TENSORS = Dialect(
    name="compressed-tensors",
    description="llm-compressor's checkpoint, k_scale and v_scale per layer or per head",
    recognise=_recognise("compressed-tensors"),
    read=read_kv_scales,
    formats=(E4M3FN,),
    scale_suffixes=("_scale", ".scale"),
)
AUTOFP8 = Dialect(
    name="autofp8",
    description="AutoFP8's checkpoint, k_scale and v_scale or the older kv_scale",
    recognise=_recognise("fp8"),
    read=read_kv_scales,
    formats=(E4M3FN,),
    scale_suffixes=("_scale", "_scale_inv"),
)
QUARK = Dialect(
    name="quark",
    description="Quark's checkpoint, output_scale of k_proj and v_proj",
    recognise=_recognise("quark", Spelling.OUTPUT),
    read=read_kv_scales,
    formats=(E4M3FN,),
)
MODELOPT = Dialect(
    name="modelopt",
    description="ModelOpt's checkpoint, k_scale of k_proj and v_scale of v_proj",
    recognise=_recognise("modelopt", Spelling.PROJECTION),
    read=_read_modelopt,
    formats=(E4M3FN,),
)
TRTLLM = Dialect(
    name="trtllm",
    description="rank files of TensorRT-LLM and AMMO, one kv_cache_scaling_factor per layer",
    recognise=lambda files: bool(_find_rank_files(files)),
    read=_read_trtllm,
    scale_suffixes=(RANK_FILE_MARK,),
)
