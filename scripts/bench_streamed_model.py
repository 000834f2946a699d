"""Write a random Llama, a shard a layer: python scripts/bench_streamed_model.py FOLDER L C I H K V.

L layers of width C, I inside, H heads, K KV heads, V words; bfloat16, embeddings tied. Prints its
size as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

DEVIATION = 0.02


def main(
    folder: Path, layers: int, width: int, inside: int, heads: int, kv: int, words: int
) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    size_bytes = parameters = 0
    for number in range(layers + 1):
        shapes = list_rest(width, words)
        if number < layers:
            shapes = list_layer(number, width, inside, kv * (width // heads))
        tensors = {name: draw(shape) for name, shape in shapes.items()}
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        parameters += sum(x.numel() for x in tensors.values())
        size_bytes += sum(x.numel() * x.itemsize for x in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = make_config(layers, width, inside, heads, kv, words)
    (folder / "config.json").write_text(json.dumps(config))
    print(json.dumps({"parameters": parameters, "size_bytes": size_bytes}))


def draw(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw a matrix; a norm's weights are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, dtype=torch.bfloat16) * DEVIATION


def list_layer(
    number: int, width: int, inside: int, kv_width: int
) -> Mapping[str, tuple[int, ...]]:
    """Name a decoder layer's tensors, with their shapes."""
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inside, width),
        "mlp.up_proj": (inside, width),
        "mlp.down_proj": (width, inside),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def list_rest(width: int, words: int) -> Mapping[str, tuple[int, ...]]:
    """Name the tensors around the layers."""
    return {"model.embed_tokens.weight": (words, width), "model.norm.weight": (width,)}


def make_config(
    layers: int, width: int, inside: int, heads: int, kv: int, words: int
) -> Mapping[str, object]:
    """Make the config of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inside,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "vocab_size": words,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
