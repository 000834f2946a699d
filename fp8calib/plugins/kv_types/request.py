"""The request of `fp8calib kv-types`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import partial
from typing import Any

from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class
from fp8calib.commands.verify import require_scales


@request_class
class KvTypesRequest(shared.TextOptions):
    """Compare the types of a KV cache with FP8: what each loses, and how many tokens fit.

    Example: fp8calib kv-types MODEL --kv-memory 8
    """

    scales: shared.Stats | None = option(
        "--scales PATH",
        "Statistics or a file of scales, for the types that use some.",
        reads=str,
        check=require_scales,
        default=None,
    )
    data: shared.TextData | None = option(shared.DATA, default=None)
    _: KW_ONLY
    kv_cache_dtype: Sequence[str] | None = option(
        "--kv-cache-dtype NAME,...",
        "Types to compare with FP8, such as int8_per_token_head,nvfp4. "
        "Default: all that the engine offers and that fit the model.",
        reads=str,
        collect=lambda names: tuple(names.split(",")),
        default=None,
    )
    kv_memory: float | None = option(
        "--kv-memory GIB",
        "Memory for the KV cache (8 is 8 GiB, 500M is 500 MiB), to show how many tokens fit.",
        reads=str,
        collect=partial(shared.read_gib, option="--kv-memory"),
        default=None,
    )
    engine: str = option(shared.ENGINE, default="vllm")
    device_map: str | None = option(shared.DEVICE_MAP, default=None)
    tokenizer: Any = option(shared.TOKENIZER, default=None)
