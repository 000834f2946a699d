"""Read the KV scales of a JSON file, in vLLM's schema or the RFC's."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fp8calib.errors import cut_list, refusal
from fp8calib.formats.dialect import ParsedScales, ScaleFiles
from fp8calib.formats.kv.validate import check_model_type, check_scales, join_ranks
from fp8calib.formats.metadata import find_format, parse_origin
from fp8calib.model.geometry import ModelGeometry

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_EXPECTED = 'expected {"model_type": ..., "kv_cache": {"dtype": ..., "scaling_factor": {...}}}'


def read_json(
    files: ScaleFiles, geometry: ModelGeometry, *, rank_prefix: str, requires_model_type: bool
) -> ParsedScales:
    """Read the KV scales of a JSON file; its sections about weights are ignored.

    `rank_prefix` precedes the number in the key of a rank.
    """
    if len(files.documents) > 1:
        names = cut_list([path.name for path in files.documents])
        fault = f"several files hold KV scales: {names}"
        raise refusal(files.place, fault, hint="name one of them")
    ((path, document),) = files.documents.items()
    kv_cache = document.get("kv_cache")
    if not isinstance(kv_cache, dict):
        raise refusal(path, "there is no `kv_cache` object", hint=_EXPECTED)
    is_named = "dtype" in kv_cache
    fmt = find_format(path, "kv_cache.dtype", kv_cache["dtype"]) if is_named else None
    factors = kv_cache.get("scaling_factor")
    if not isinstance(factors, dict) or not factors:
        raise refusal(path, "there is no `scaling_factor` object in `kv_cache`", hint=_EXPECTED)
    starting = [key for key in factors if key.startswith(rank_prefix)]
    numbers = {key: key.removeprefix(rank_prefix) for key in starting}
    if len(numbers) < len(factors) or not all(map(_INDEX.fullmatch, numbers.values())):
        keys = cut_list([ascii(key)[:40] for key in factors])
        hint = 'ranks are "0", "1", ... (vllm-json) or "rank0", "rank1", ... (rfc), never both'
        raise refusal(path, f"the keys of kv_cache.scaling_factor are not ranks: {keys}", hint=hint)
    if requires_model_type and "model_type" not in document:
        raise refusal(path, "there is no `model_type`", hint="engines refuse the file for it")
    check_model_type(path, document.get("model_type"), geometry)
    ranks = {int(numbers[key]): _read_rank(path, key, held) for key, held in factors.items()}
    origin = parse_origin(path, document)
    return join_ranks(path, geometry, ranks, files=[path], fmt=fmt, origin=origin)


def _read_rank(path: Path, rank: str, layers: object) -> dict[int, torch.Tensor]:
    place = f"kv_cache.scaling_factor.{rank}"
    if not isinstance(layers, dict):
        raise refusal(path, f"{place} is not an object of layers: {layers!a:.60}")
    wrong = [ascii(key)[:40] for key in layers if not _INDEX.fullmatch(key)]
    if wrong:
        raise refusal(path, f"{place}: not layer indices: {cut_list(wrong)}")
    name = rank if rank.startswith("rank") else f"rank {rank}"
    return {
        int(key): _read_number(path, f"layer {key} of {name}", value)
        for key, value in layers.items()
    }


def _read_number(path: Path, where: str, value: object) -> torch.Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(path, f"{where}: {value!a:.60} is not a number")
    try:
        number = torch.tensor(float(value), dtype=torch.float64)
    except OverflowError:
        raise refusal(path, f"{where}: the number is too large for a scale") from None
    check_scales(path, where, number)
    scale = number.float()
    check_scales(path, where, scale)
    return scale
