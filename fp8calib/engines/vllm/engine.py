"""vLLM on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, Launch, Storage
from fp8calib.engines.facts.classes import list_read_fields
from fp8calib.engines.facts.release import VLLM_RELEASES, VLLM_RUN, Release, explain_type
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.model_types import ADDED_ROOTS, HEADLESS_TYPES, RENAMING_TYPES
from fp8calib.engines.vllm.numerics import make_numerics
from fp8calib.engines.weights.weight_rule import NameRules, WeightRule
from fp8calib.numerics.schemes import Granularity

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.model.shapes import ModelGeometry


_WHOLE_RANGE = "inputs of MXFP8 use the whole range of e4m3 without FlashInfer"
_REPEATS_SCALES = "the scales of experts are repeated for smaller blocks"


def read_storage(release: Release) -> tuple[Storage, ...]:
    """Read which backend stores which type of the KV cache on which GPUs."""
    orders = [each.split(": ") for each in release.list_values("order of the backends on")]
    ranks = {
        (generation, backend): rank
        for order, generations in orders
        for generation in generations.split(", ")
        for rank, backend in enumerate(order.split(", "))
    }
    return tuple(
        Storage(
            cache_type=cache_type,
            backend=backend,
            generation=generation,
            rank=ranks[generation, backend],
            refused_head_sizes=tuple(map(int, sizes.split())),
        )
        for value in release.list_values("backend stores a cache type on")
        for backend, cache_type, places in [value.split(": ")]
        for part in places.split("; ")
        for generations, _, sizes in [part.partition(" but heads of ")]
        for generation in generations.split(", ")
    )


def read_multiplied(release: Release) -> Mapping[str, frozenset[str]]:
    """Read on which GPUs linears multiply quantized inputs, by `fp8` and `mxfp8`."""
    values = release.list_values("GPU multiplies quantized inputs in")
    split = (value.partition(": ") for value in values)
    return {name: frozenset(generations.split(", ")) for name, _, generations in split}


def _view(folder: ScaleFolder) -> ScaleFolder:
    from fp8calib.engines.vllm.files import open_as_vllm  # noqa: PLC0415

    return open_as_vllm(folder)


def _replay_folder(
    release: Release, folder: ScaleFolder, geometry: ModelGeometry, tp: int
) -> EngineReport:
    from fp8calib.engines.vllm.replay import replay_vllm  # noqa: PLC0415

    return replay_vllm(folder, geometry, tp, release)


def _make_reader(release: Release, folder: ScaleFolder, geometry: ModelGeometry) -> LinearReader:
    from fp8calib.engines.vllm.linears import VllmReader  # noqa: PLC0415

    return VllmReader.open(folder, geometry, release)


_BLOOM_RESHAPES = WeightRule(
    schemes=("fp8-static", "fp8-block"),
    model_types=("bloom",),
    endings=("query_key_value",),
    status=Status.REFUSED,
    why="it reshapes scales as it does the rows of query_key_value, and stops (RuntimeError)",
    ignore=("*.query_key_value",),
    fix="quantize with one scale per channel",
    source="vLLM 0.32.0 models/bloom.py (_repack_qkv), tried",
)
_WEIGHT_RULES = (
    _BLOOM_RESHAPES,
    replace(
        _BLOOM_RESHAPES,
        schemes=("fp8-block",),
        model_types=("falcon",),
        fix="quantize with one scale per tensor or per channel",
        source="vLLM 0.32.0 models/falcon.py (load_weights), tried",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        has_experts=True,
        status=Status.REFUSED,
        why="it runs no FP8 experts whose inputs are not quantized",
        source="vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe.py (get_moe_method)",
    ),
    WeightRule(
        dialect="compressed-tensors",
        schemes=("w8a16",),
        has_blocks=True,
        status=Status.REFUSED,
        why="it runs no FP8 blocks whose inputs are not quantized (AssertionError)",
        source="vLLM 0.32.0 compressed_tensors/schemes/compressed_tensors_w8a16_fp8.py "
        "(process_weights_after_loading: None is not False), run",
    ),
    *(
        WeightRule(
            dialect="compressed-tensors",
            schemes=(scheme,),
            granularity=granularity,
            has_experts=True,
            status=Status.REFUSED,
            why="it runs FP8 experts with a scale per tensor and static inputs, per channel and "
            "inputs per token, or in blocks (AssertionError)",
            source="vLLM 0.32.0 compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py, run",
        )
        for scheme, granularity in (
            ("fp8-static", Granularity.CHANNEL),
            ("fp8-dynamic", Granularity.TENSOR),
        )
    ),
    WeightRule(
        dialect="modelopt",
        schemes=("fp8-dynamic", "fp8-block"),
        not_mixed=("fp8-block",),
        has_experts=True,
        status=Status.REFUSED,
        why="it loads ModelOpt's FP8 experts only with one scale per tensor",
        source="vLLM 0.32.0 quantization/modelopt.py (ModelOptFp8MoEMethod)",
    ),
    WeightRule(
        has_blocks=True,
        model_types=("llama4", "llama4_text"),
        endings=("self_attn.q_proj", "self_attn.k_proj"),
        status=Status.REFUSED,
        why="it reorders the rows of q and k, across the borders of blocks",
        ignore=("*.self_attn.[qkv]_proj",),
        source="vLLM 0.32.0 models/llama4.py (permute_qk_weight_for_rotary)",
    ),
    WeightRule(
        dialect="mxfp8",
        except_model_types=(*RENAMING_TYPES, "minimax_m3_vl", "minimax_m3_vl_text"),
        status=Status.REFUSED,
        why="only its MiniMax M3 and Mistral 3 rename weight_scale_inv, which its MXFP8 linears "
        "call weight_scale (ValueError)",
        fix="write it as modelopt or compressed-tensors: the bytes of the tensors are the same",
        source="vLLM 0.32.0 quantization/modelopt.py (ModelOptMxFp8Config), run; "
        "models/minimax_m3, read",
    ),
    WeightRule(
        schemes=("mxfp8-a16",),
        status=Status.USED,
        why="it quantizes the inputs of MXFP8 weights although the config leaves them in 16 bits, "
        "where the GPU multiplies MXFP8 (Blackwell, gfx95x)",
        source="vLLM 0.32.0 compressed_tensors/compressed_tensors.py (_is_mxfp8)",
    ),
    WeightRule(
        schemes=("mxfp8",),
        status=Status.USED,
        why="only Blackwell and gfx95x multiply MXFP8; on other GPUs inputs stay in 16 bits",
        source="vLLM 0.32.0 kernels/linear/mxfp8 (is_supported)",
    ),
    WeightRule(
        dialect="finegrained",
        except_model_types=RENAMING_TYPES,
        status=Status.REFUSED,
        why="it looks for per-tensor scales named weight_scale and input_scale; here they are "
        "named weight_scale_inv and activation_scale (ValueError)",
        fix="rename the scales: the numbers are the same",
        source="vLLM 0.32.0 models/utils.py (AutoWeightsLoader), tried; models/mistral3.py",
    ),
)
_NARROW_INPUTS = WeightRule(
    schemes=("mxfp8", "mxfp8-a16"),
    status=Status.USED,
    why="on gfx95x it scales the largest input of a block to less than 2, so that inputs below a "
    "thousandth of it are lost; vLLM 0.27 scales it to up to 448",
    source="vLLM 0.26.0 quantization/utils/mxfp8_utils.py (_mxfp8_e4m3_quantize_torch), run",
)
_NAME_RULES = NameRules(
    is_silent_if_quantized=True,
    bare_types=tuple(ADDED_ROOTS),
    skipped_experts=("glm4_moe", "qwen3_moe"),
    headless_types=HEADLESS_TYPES,
    tied_types=("Gemma3ForConditionalGeneration",),  # its text_config decides, not run
)


def _make_engine(release: Release) -> Engine:
    return Engine(
        key="vllm",
        minor_parts=2,
        title="vLLM",
        version=release.version,
        evidence=release.evidence,
        launch=Launch(
            command="vllm serve",
            kv_flag="--kv-cache-dtype fp8",
            ranks_flag="--tensor-parallel-size",
        ),
        numerics=make_numerics(release),
        cache_types=release.list_values("--kv-cache-dtype"),
        storage=read_storage(release),
        multiplied=read_multiplied(release),
        view=_view,
        replay_folder=partial(_replay_folder, release),
        no_json="vLLM reads no JSON of scales since 0.7 (--quantization-param-path is gone)",
        explain_type=partial(explain_type, release),
        list_read_fields=partial(list_read_fields, "vllm", release.version),
        splits_heads=True,
        make_reader=partial(_make_reader, release),
        weight_rules=_WEIGHT_RULES
        if release.has(_WHOLE_RANGE)
        else (*_WEIGHT_RULES, _NARROW_INPUTS),
        repeats_expert_scales=release.has(_REPEATS_SCALES),
        name_rules=_NAME_RULES,
    )


_NEWEST_FIRST = tuple(map(_make_engine, reversed(VLLM_RELEASES)))
VLLM_THAT_RAN = next(each for each in _NEWEST_FIRST if each.version == VLLM_RUN.version)
VLLM = replace(
    _NEWEST_FIRST[0],
    is_default=True,
    releases=tuple(
        replace(engine, key=f"vllm=={release.name}", loads_like="vllm")
        for engine, release in zip(_NEWEST_FIRST, reversed(VLLM_RELEASES), strict=True)
        if engine is not _NEWEST_FIRST[0]
    ),
)
