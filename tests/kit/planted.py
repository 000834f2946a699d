"""Models whose needs are planted, and the text that they write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows

LENGTH = 32


def plant(folder: Path, change: Callable[[Any], None], **sizes: int) -> tuple[Path, Path]:
    """Write a changed llama, of four layers unless `sizes` says it, and text that it wrote."""
    model: Any = zoo.build("llama", **{"num_hidden_layers": 4, **sizes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        change(model)
        tokens = torch.randint(3, 95, (60, 1), generator=generator)
        for _ in range(LENGTH - 1):
            shares = torch.softmax(model(tokens).logits[:, -1, :95], -1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=generator)], 1)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    rows = [{"input_ids": row.tolist()} for row in tokens]
    return folder / "model", write_rows(folder / "text.jsonl", rows)
