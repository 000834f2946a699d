"""The same job as `fp8calib calibrate` through llm-compressor, in the peers' environment.

python -m scripts.benchmarks.peers.llmcompressor_calibration MODEL TOKENS DTYPE DEVICE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.benchmarks.peers.checkpoints import make_modifier, run_oneshot
from scripts.benchmarks.peers.modelopt_calibration import load_model
from scripts.benchmarks.peers.passes import KV_CACHE
from scripts.benchmarks.workers.timing import load_batches


def main(name: str, tokens: Path, dtype: str, device: str, out: str) -> None:
    """Load, calibrate, save."""
    model = load_model(name, dtype, device)
    run_oneshot(model, load_batches(tokens, device), make_modifier(KV_CACHE))
    model.save_pretrained(out, save_compressed=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
