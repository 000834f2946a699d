"""Write a random LLaVA with its processor, and rows with images that it takes.

python -m scripts.benchmarks.workers.media_rows TOKENIZER FOLDER ROWS LAYERS CHANNELS

Prints the facts that the figures depend on as JSON, and the number of tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from scripts.benchmarks.workers.tokens import describe_machine
from scripts.draw_images import write_rows

_IMAGE = "<image>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
_TOWER = {"image_size": 224, "patch_size": 14}
_NUM_PATCHES = (224 // 14) ** 2


def main(tokenizer: str, folder: Path, rows: int, layers: int, channels: int) -> None:
    """Write `FOLDER/model` and `FOLDER/images/rows.jsonl`."""
    transformers.logging.set_verbosity_error()
    _save_model(tokenizer, folder / "model", layers, channels)
    (folder / "images").mkdir()
    write_rows(folder / "images", rows)
    print(json.dumps(describe_machine()))


def _save_model(tokenizer: str, folder: Path, layers: int, channels: int) -> None:
    words = AutoTokenizer.from_pretrained(tokenizer, extra_special_tokens={"image_token": _IMAGE})
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=channels,
        intermediate_size=channels * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=channels // 64,
        num_key_value_heads=channels // 192,
    )
    tower = CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        **_TOWER,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=words.convert_tokens_to_ids(_IMAGE),
        image_seq_length=_NUM_PATCHES,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}
        ),
        tokenizer=words,
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=_TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
