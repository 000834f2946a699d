"""The demo: four questions about a real model, each answered by commands that are printed first.

    python -m scripts.demonstrate

The commands run in this process, which imports torch once.
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path

from fp8calib.cli import main as run_program

MODEL = Path("demo/SmolLM2-135M-Instruct")
OUT = Path("demo/output")
LOUD = OUT / "loud-keys"
LAYERS = (1, 2)
FACTOR = 512
"""A power of two: products with it are exact, so the model stays the same function."""
TEXT = ("--samples", "8", "--seq-len", "256", "--dtype", "float32")
LOUD_SCALES, SCALES = OUT / "loud-keys-calibrated", OUT / "calibrated"
STATIC, DYNAMIC = OUT / "fp8-static", OUT / "fp8-dynamic"
PAGE = OUT / "weights.html"


def main() -> None:
    """Run the demo."""
    OUT.mkdir(parents=True, exist_ok=True)
    tell("1. Does SmolLM2-135M need KV scales? What does an FP8 cache cost it?")
    run("verify", MODEL, *TEXT)

    tell(
        f"2. The same function with loud keys: k_proj of layers {LAYERS[0]} and {LAYERS[1]} is "
        f"{FACTOR} times as large, and q_proj undoes it. Models with such layers exist: FP8 caches "
        "without scales were switched off for Qwen2.5-7B (HabanaAI/vllm-fork#1598), Qwen3.5 and "
        "GLM-5 (sgl-project/sgl-cookbook#237)."
    )
    if not LOUD.exists():
        save_loud(MODEL, LOUD)
    if not LOUD_SCALES.exists():
        run("calibrate", LOUD, "--out", LOUD_SCALES, *TEXT)
    run("check", LOUD_SCALES / "kv-overlay")
    run("verify", LOUD, "--scales", LOUD_SCALES, *TEXT)

    tell("3. What do FP8 weights cost, with calibrated scales of inputs and with dynamic ones?")
    if not SCALES.exists():
        run("calibrate", MODEL, "--out", SCALES, *TEXT)
    if not STATIC.exists():
        stats = ("--stats", SCALES)
        run("quantize", MODEL, "--scheme", "fp8-static", *stats, "--out", STATIC)
    if not DYNAMIC.exists():
        run("quantize", MODEL, "--scheme", "fp8-dynamic", "--out", DYNAMIC)
    scales = ("--scales", STATIC, "--scales", DYNAMIC)
    run("verify", MODEL, *scales, *TEXT, "--report", PAGE, "--force")

    tell(f"4. The page with all figures: {PAGE}. What was written: {OUT}.")


def tell(text: str) -> None:
    """Print a paragraph."""
    print(f"\n{textwrap.fill(text, 100)}\n", flush=True)


def run(*words: str | Path) -> None:
    """Print a command, and run it; the demo ends with a command that fails."""
    arguments = list(map(str, words))
    print(f"$ fp8calib {shlex.join(arguments)}", flush=True)
    try:
        run_program(arguments)
    except SystemExit as end:
        if end.code:
            raise
    print(flush=True)


def save_loud(source: Path, target: Path) -> None:
    """Write a model that computes the same with larger values in two layers."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- imports torch

    tensors = load_file(source / "model.safetensors")
    factors: Mapping[str, float] = {"k_proj": FACTOR, "q_proj": 1 / FACTOR}
    for layer in LAYERS:
        for linear, factor in factors.items():
            tensors[f"model.layers.{layer}.self_attn.{linear}.weight"] *= factor
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    work.rename(target)


if __name__ == "__main__":
    main()
