"""Emulate FP8 and say what it costs."""
