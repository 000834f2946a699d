"""The model types that vLLM 0.32.0 treats unlike all others."""

UNSUPPORTED_TYPES = ("bamba", "diffllama", "minimax", "mpt", "xglm")
"""Model types that vLLM 0.32 does not start (run); of some an earlier release did."""
TYPES_WITHOUT_KV_SCALES = ("jamba", "lfm2", "lfm2_moe", "zamba2")
"""Model types whose `Attention` vLLM 0.32 makes without a `quant_config`: there is no parameter for
a scale, and the loader fails on one (jamba, lfm2 and lfm2_moe: run; zamba2: read)."""
EXPANDED_TYPES = ("minicpm3", "youtu")
"""Model types with latents whose K and V vLLM 0.32 caches expanded to heads: their class is of its
own (minicpm3, read), or transformers' (youtu, run)."""
