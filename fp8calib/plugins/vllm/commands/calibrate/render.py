"""What `fp8calib vllm calibrate` prints: what `fp8calib calibrate` prints."""

from fp8calib.commands.calibrate import describe

__all__ = ["describe"]
