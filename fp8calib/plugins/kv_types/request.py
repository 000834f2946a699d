"""The request of `fp8calib kv-types`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated

from fp8calib.commands import options as shared
from fp8calib.commands.option import Option
from fp8calib.commands.options import TextOptions
from fp8calib.commands.verify import check_scales


@dataclass(frozen=True)
class KvTypesRequest(TextOptions):
    """Compare the types of a KV cache with FP8: what each loses, and how many tokens fit.

    Example: fp8calib kv-types MODEL --kv-memory 8
    """

    scales: Annotated[
        shared.Stats | None,
        Option(
            "--scales",
            metavar="PATH",
            reads=str,
            check=check_scales,
            help="Statistics or a file of scales, for the types that use some.",
        ),
    ] = None
    data: shared.DataOption = None
    _: KW_ONLY
    kv_cache_dtype: Annotated[
        Sequence[str] | None,
        Option(
            "--kv-cache-dtype",
            metavar="NAME,...",
            reads=str,
            collect=lambda names: tuple(names.split(",")),
            help="Types to compare with FP8, such as int8_per_token_head,nvfp4. "
            "Default: all that the engine offers and that fit the model.",
        ),
    ] = None
    kv_memory: Annotated[
        float | None,
        Option(
            "--kv-memory",
            metavar="GIB",
            parser=partial(shared.read_gib, option="--kv-memory"),
            help="Memory for the KV cache (8 is 8 GiB, 500M is 500 MiB), to show how many tokens "
            "fit.",
        ),
    ] = None
    engine: shared.EngineOption = "vllm"
    device_map: shared.DeviceMapOption = None
    tokenizer: shared.TokenizerArgument = None
