"""What `fp8calib vllm audit` prints: what `fp8calib check` prints."""

from fp8calib.commands.check import describe

__all__ = ["describe"]
