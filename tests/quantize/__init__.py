"""FP8 checkpoints: what is quantized, every byte of it, and whether engines read it."""
