"""Save a random Llama that is made on a device; print the device's name.

python -m scripts.benchmarks.workers.make_llama FOLDER SHAPE DEVICE
"""

from __future__ import annotations

import platform
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 4096


def main(folder: str, shape: str, device: str) -> None:
    """Make it as transformers initialises it, of LAYERS,WIDTH,INNER,HEADS,KV_HEADS,WORDS."""
    layers, width, inner, heads, kv_heads, words = map(int, shape.split(","))
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=words,
        max_position_embeddings=LENGTH,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    is_cpu = device == "cpu"
    print(platform.processor() or "CPU" if is_cpu else torch.cuda.get_device_name(device))


if __name__ == "__main__":
    main(*sys.argv[1:])
