"""Write the benchmark's tokens, and print the facts that the figures depend on as JSON.

python -m scripts.benchmarks.workers.tokens MODEL OUT SEQUENCES TOKENS PART [SPEC]
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import cast

import torch
import transformers

from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.sources import BuiltinPart
from fp8calib.model.load import load_tokenizer, open_source


def main(
    model: str, out: Path, num_sequences: int, num_tokens: int, part: str, *specs: str
) -> None:
    """Cut the data of `specs`, or a part of the built-in text, into rows of `num_tokens` ids."""
    source = open_source(model)
    vocab_size = int(source.config.get_text_config(decoder=True).vocab_size)
    plan = build_plan(
        RowEncoder(lambda: load_tokenizer(source), vocab_size),
        sources=specs,
        samples=num_sequences,
        seq_len=num_tokens,
        part=cast("BuiltinPart", part),
    )
    rows = (json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in plan.sequences)
    out.write_text("".join(rows))
    print(json.dumps(describe_machine()))


def describe_machine() -> dict[str, object]:
    """Describe what the figures depend on: versions, threads, CPU abilities, GPU."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_bfloat16": has_cpu_bfloat16(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def has_cpu_bfloat16() -> bool | None:
    """Whether the CPU multiplies bfloat16 natively; None if unknown."""
    flags = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not flags.is_file():
        return None
    text = flags.read_text()
    return "avx512_bf16" in text or "amx_bf16" in text


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
