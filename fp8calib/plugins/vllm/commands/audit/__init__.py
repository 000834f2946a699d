"""fp8calib vllm audit: the scales that a running vLLM holds."""
