"""What FP8 costs a model: emulation, numbers, verdicts, the page."""
