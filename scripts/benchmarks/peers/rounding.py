"""Round weights with llm-compressor's GPTQ and write the checkpoint, in the peers' environment.

python -m scripts.benchmarks.peers.rounding MODEL SCHEME TOKENS DTYPE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmcompressor.modifiers.gptq import GPTQModifier

from scripts.benchmarks.peers.checkpoints import run_oneshot
from scripts.benchmarks.peers.modelopt_calibration import load_model
from scripts.benchmarks.workers.timing import load_batches

_PRESETS = {"fp8-static": "FP8", "fp8-dynamic": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK"}
_CHANNELS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}


def main(name: str, scheme: str, tokens: Path, dtype: str, out: Path) -> None:
    """Load the model, round it with the settings that llm-compressor has by default, write it."""
    model = load_model(name, dtype, "cpu")
    modifier = make_modifier(scheme)
    batches = load_batches(tokens, "cpu")
    run_oneshot(model, batches, modifier, shuffle_calibration_samples=False)
    model.save_pretrained(out, save_compressed=True)


def make_modifier(scheme: str) -> GPTQModifier:
    """Make the modifier of a scheme; there is no preset for weights alone."""
    if scheme in _PRESETS:
        return GPTQModifier(targets="Linear", scheme=_PRESETS[scheme], ignore=["lm_head"])
    group = {"targets": ["Linear"], "weights": _CHANNELS}
    return GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
