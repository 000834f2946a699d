"""Write a checkpoint of a random Llama without torch: one shard per layer, bfloat16."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = False
    """Whether the output head is the embedding."""

    def save(self, folder: Path) -> int:
        """Write the checkpoint; return its number of parameters."""
        folder.mkdir(parents=True)
        data = _draw_bfloat16(1 << 23)
        parts = [*map(self._list_layer, range(self.layers)), self._list_rest()]
        weight_map: dict[str, str] = {}
        for number, shapes in enumerate(parts, 1):
            name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            _write_shard(folder / name, shapes, data)
            weight_map |= dict.fromkeys(shapes, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self._make_config()))
        return sum(math.prod(shape) for shapes in parts for shape in shapes.values())

    def _list_layer(self, number: int) -> Shapes:
        hidden, kv = self.hidden, self.kv_heads * (self.hidden // self.heads)
        shapes = {
            "input_layernorm": (hidden,),
            "mlp.down_proj": (hidden, self.intermediate),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "post_attention_layernorm": (hidden,),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.v_proj": (kv, hidden),
        }
        return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}

    def _list_rest(self) -> Shapes:
        words = (self.vocabulary, self.hidden)
        head = {} if self.is_tied else {"lm_head.weight": words}
        return {**head, "model.embed_tokens.weight": words, "model.norm.weight": (self.hidden,)}

    def _make_config(self) -> Mapping[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
        }


def _draw_bfloat16(count: int) -> bytes:
    """Draw numbers of magnitudes between 2**-9 and 2**-1, of both signs."""
    source = random.Random(0)  # noqa: S311 -- weights, no secrets
    exponents = (0x3B, 0x3C, 0x3D, 0x3E)
    table = bytes(exponents[code % 4] | (code & 0x80) for code in range(256))
    data = bytearray(2 * count)
    data[0::2] = source.randbytes(count)
    data[1::2] = source.randbytes(count).translate(table)
    return bytes(data)


def _write_shard(path: Path, shapes: Shapes, data: bytes) -> None:
    """Write a safetensors file of bfloat16 that repeats `data`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            piece = data[:offset]
            file.write(piece)
            offset -= len(piece)
