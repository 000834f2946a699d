"""The bare script that calibration on images is compared with: process each row, run the model.

python -m scripts.benchmarks.workers.media_forward MODEL ROWS DTYPE DEVICE
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

name, rows, dtype, device = sys.argv[1:]
model = AutoModelForImageTextToText.from_pretrained(name, dtype=getattr(torch, dtype))
model = model.eval().to(device)
processor = AutoProcessor.from_pretrained(name)
with torch.no_grad():
    for line in Path(rows).read_text().splitlines():
        messages = json.loads(line)["messages"]
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = str(Path(rows).with_name(part["image"]))
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt"
        )
        model(**inputs.to(model.dtype).to(device))
