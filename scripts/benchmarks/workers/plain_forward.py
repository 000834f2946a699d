"""The bare script that calibration is compared with: load a model, run `model(input_ids)`.

python -m scripts.benchmarks.workers.plain_forward MODEL TOKENS DTYPE DEVICE
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

name, tokens, dtype, device = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=getattr(torch, dtype), device_map=None if device == "cpu" else device
).eval()
with open(tokens) as file:  # noqa: PTH123 (as a user would write it)
    rows = [json.loads(line)["input_ids"] for line in file]
with torch.no_grad():
    for row in rows:
        model(torch.tensor([row], device=device))
if device != "cpu":
    torch.cuda.synchronize()
