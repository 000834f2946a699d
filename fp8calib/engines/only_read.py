"""Engines whose source was read once, that are neither replayed nor emulated: a text for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyRead:
    """What the source of an engine says."""

    title: str
    version: str
    """The releases or the commit that was read."""
    kv_scales: str
    weights: str
    source: str

    @property
    def text(self) -> str:
        """Everything in one line."""
        return (
            f"{self.title} {self.version}: KV scales: {self.kv_scales}; FP8 weights: "
            f"{self.weights} ({self.source})"
        )


ONLY_READ = {
    "tgi": OnlyRead(
        title="TGI",
        version="db931fc",
        kv_scales="it uses `kv-overlay` and `kv_scale` (`tgi`), refuses scales per head, and reads "
        "no file of scales",
        weights="it loads compressed-tensors but for `fp8-block`, for which it needs `autofp8`; it "
        "quantizes the inputs of `w8a16`, and ignores static input scales on Hopper",
        source="server/text_generation_server/layers: attention/kv_cache.py, compressed_tensors, "
        "fp8.py",
    ),
    "vllm-0.6": OnlyRead(
        title="vLLM",
        version="0.4 to 0.6",
        kv_scales="it reads `vllm-json` with --quantization-param-path, which its documentation "
        "promises for Llama 2 alone",
        weights="not read",
        source="model_executor/model_loader/weight_utils.py kv_cache_scales_loader",
    ),
    "tensorrt-llm": OnlyRead(
        title="TensorRT-LLM",
        version="008e0af",
        kv_scales="it uses those of a checkpoint for an NVFP4 cache alone, and 1.0 for FP8",
        weights="it loads ModelOpt, and of compressed-tensors `fp8-dynamic` and blocks of 128; it "
        "copies `fp8-dynamic` of `autofp8`, and Quark, without their scales",
        source="tensorrt_llm/_torch: model_config.py, modules/attention.py",
    ),
    "vllm-tpu": OnlyRead(
        title="vLLM on TPU",
        version="tpu-inference b8692ff",
        kv_scales="with MODEL_IMPL_TYPE=vllm it uses `kv-overlay`, per layer or per head; its own "
        "classes in JAX, and other methods than compressed-tensors, use 1.0",
        weights="it has no `w8a16`, `modelopt` or `quark`, and loads experts of `autofp8` in "
        "blocks alone",
        source="tpu_inference/layers/vllm/quantization",
    ),
    "vllm-gaudi": OnlyRead(
        title="vLLM on Gaudi",
        version="091bbad",
        kv_scales="it uses `kv-overlay` (per head: not read), on Gaudi2 times 448/240, so that the "
        "range stays; other methods use 1.0",
        weights="it loads `modelopt` with one scale per tensor alone, and has no `quark`",
        source="vllm_gaudi: platform.py, ops/hpu_modelopt.py",
    ),
    "lmdeploy": OnlyRead(
        title="LMDeploy",
        version="0.16.0",
        kv_scales="its FP8 cache uses 1.0",
        weights="it loads `autofp8` with static inputs or in blocks, and no other FP8 checkpoint",
        source="lmdeploy/pytorch: config.py, nn/attention.py, nn/linear",
    ),
    "atom": OnlyRead(
        title="ATOM",
        version="ffdf3bb",
        kv_scales="it makes the scales of its FP8 cache itself",
        weights="it quantizes all inputs dynamically, also those of `w8a16` and static ones",
        source="atom: quant_spec.py, model_ops/attention_mha.py",
    ),
}
"""By the name that `--engine` had for it."""
