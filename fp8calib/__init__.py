"""FP8 calibration of Hugging Face language models."""

__version__ = "0.1.0"
