"""The version of vLLM."""

__version__ = "0.32.0"
