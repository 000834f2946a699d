"""The model types for which vLLM, 0.32.0 and 0.33.0, loads KV scales in another way, or not."""

UNSUPPORTED_TYPES = ("bamba", "diffllama", "minimax", "mpt", "xglm")
"""Model types that vLLM does not start (run); an earlier release started some of them."""
TYPES_WITHOUT_KV_SCALES = ("jamba", "lfm2", "lfm2_moe", "zamba2")
"""Model types whose `Attention` vLLM creates without a `quant_config`: it has no parameter for
a scale, and the loader fails on one (jamba, lfm2 and lfm2_moe: run in 0.32.0; zamba2: read)."""
EXPANDED_TYPES = ("minicpm3", "youtu")
"""Model types with latent attention whose K and V vLLM caches expanded to heads: vLLM's class
does so itself (minicpm3, read), or runs transformers' (youtu, run)."""
