"""fp8calib vllm check: the verdict of vLLM's own loader."""
