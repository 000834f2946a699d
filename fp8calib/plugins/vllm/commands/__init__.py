"""The commands `fp8calib vllm ...`."""
