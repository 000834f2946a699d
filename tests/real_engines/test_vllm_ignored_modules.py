"""vLLM's own function matches the `ignore` of overlays with linears, and with no attention layer.

vLLM on TPUs asks it for attention layers too; vLLM on GPUs and CPUs only for linears and experts.
"""

from __future__ import annotations

import json
import subprocess

from fp8calib.formats.kv.overlay import IGNORED
from tests.real_engines.vllm_job import PYTHON

ASK = """
import json, sys
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
ignore, names = json.load(sys.stdin)
fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
json.dump([should_ignore_layer(name, ignore, fused) for name in names], sys.stdout)
"""
IGNORED_NAMES = (
    *("lm_head", "model.embed_tokens", "model.layers.0.self_attn.qkv_proj"),
    *("model.layers.0.self_attn.o_proj", "model.layers.11.mlp.gate_up_proj"),
    *("model.layers.3.mlp.experts", "model.layers.3.mlp.gate", "transformer.h.0.attn.c_attn"),
    *("model.layers.1.linear_attn.in_proj_qkvz", "visual.blocks.0.attn.qkv"),
)
ATTENTION_NAMES = (
    *("model.layers.0.self_attn.attn", "transformer.h.0.attn.attn"),
    *("backbone.layers.3.mixer.attn", "language_model.model.layers.7.self_attn.attn"),
)


def test_vllm_ignores_every_linear_of_an_overlay_and_no_attention_layer() -> None:
    names = [*IGNORED_NAMES, *ATTENTION_NAMES]
    done = subprocess.run(
        [PYTHON, "-c", ASK],
        input=json.dumps([[IGNORED], names]),
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(zip(names, json.loads(done.stdout), strict=True))
    assert [name for name in names if found[name]] == list(IGNORED_NAMES)
