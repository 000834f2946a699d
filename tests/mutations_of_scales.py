"""Models of Llama's kind whose function is the same while K, V or q have another magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plant:
    """K, V or q of a layer is multiplied by 2 ** `exponent`, and another weight undoes it."""

    layer: int
    role: str
    exponent: int
    head: int | None = None
    """The KV head; None: all."""

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        return f"{self.role} of layer {self.layer}{head} times 2^{self.exponent}"


def plant(model: Any, fault: Plant) -> None:
    """Change the weights of a model of Llama's kind."""
    config = model.config
    attention = model.model.layers[fault.layer].self_attn
    size, groups = attention.head_dim, config.num_key_value_heads
    each = config.num_attention_heads // groups
    factor = 2.0**fault.exponent
    query = attention.q_proj.weight.view(groups, each * size, -1)
    key = attention.k_proj.weight.view(groups, size, -1)
    value = attention.v_proj.weight.view(groups, size, -1)
    output = attention.o_proj.weight.view(-1, groups, each * size)
    for head in range(groups) if fault.head is None else (fault.head,):
        if fault.role == "v":
            value[head] *= factor
            output[:, head] /= factor
        else:
            grown, shrunk = (key, query) if fault.role == "k" else (query, key)
            grown[head] *= factor
            shrunk[head] /= factor
