"""FP8 calibration of Hugging Face language models."""

__version__ = "0.2.0"
