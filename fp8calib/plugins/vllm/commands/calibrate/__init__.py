"""fp8calib vllm calibrate: vLLM runs the text of a calibration."""
