"""Errors that say nothing about a checkpoint: a kernel, a package or a size that is not there."""

from __future__ import annotations

import re
from collections.abc import Mapping

EXCLUDED: dict[str, Mapping[str, str]] = {
    "vllm": {
        r"Found unknown kwargs=\{'_name_or_path'": "dbrx: a config of transformers 5.23, which "
        "the 5.19 beside vLLM does not read",
        r"No MXFP4 MoE backend supports": "deepseek_v4: a kernel that a CPU does not have",
        r"--mamba-block-size can only be set": "kimi_linear: its blocks are longer than the 64 "
        "tokens for which models are loaded",
        r"\nmodel_executor/(kernels|layers/fused_moe/oracle)/": "a kernel that a CPU does not have",
        r"\['Qwen3_5(Moe)?ForCausalLM'\] failed to be inspected": "qwen3_5: it imports "
        "torchvision, of which there is no build beside vLLM's for CPUs",
    },
    "transformers": {
        r"got: c10::BFloat16 != c10::Float8_e4m3fn": "autofp8 with a scale per tensor: without a "
        "GPU transformers dequantizes FP8 weights, and has no code for these",
    },
    "sglang": {},
    "run": {r"^the build for CPU": "an error that `vllm check` calls one of the build for CPU"},
}
EXCLUDED["vllm-run"] = EXCLUDED["vllm"]
"""By engine: what an error's text matches, and why it is not compared."""


def find_exclusion(engine: str, error: str) -> str:
    """Give the reason for which an error is not compared; empty where it is."""
    found = (why for pattern, why in EXCLUDED[engine].items() if re.search(pattern, error))
    return next(found, "") if error else ""
