"""Search the linears to quantize with auto-round's `AutoScheme`, at several sizes.

python -m scripts.benchmarks.peers.auto_round_plan MODEL TOKENS OUT BITS...

Writes a JSON object: for each number of bits a weight, the linears in FP8 with static inputs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from auto_round import AutoRound
from auto_round.auto_scheme.gen_auto_scheme import AutoScheme
from safetensors import safe_open
from transformers import AutoTokenizer

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def main(folder: str, tokens: Path, out: Path, bits: list[float]) -> None:
    """Search on all sequences."""
    rows = [json.loads(line)["input_ids"] for line in tokens.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = out.with_suffix(".jsonl")  # it takes the name of a file of texts alone
    texts = [tokenizer.decode(row) for row in rows]
    text.write_text("".join(f"{json.dumps({'text': each})}\n" for each in texts))
    size = (len(rows), min(map(len, rows)))
    out.write_text(json.dumps({each: search(folder, text, size, each) for each in bits}))


def search(folder: str, text: Path, size: tuple[int, int], bits: float) -> list[str]:
    """Give the linears that are quantized."""
    nsamples, seqlen = size
    given = {"nsamples": nsamples, "seqlen": seqlen, "dataset": str(text)}
    scheme = AutoScheme(
        avg_bits=bits, options="FP8_STATIC,BF16", shared_layers=_JOINED, batch_size=1, **given
    )
    rounding = AutoRound(
        folder,
        scheme=scheme,
        iters=0,
        nsamples=size[0],
        seqlen=size[1] - 8,  # what is tokenized again may be shorter
        dataset=str(text),
    )
    with tempfile.TemporaryDirectory() as written:
        rounding.quantize_and_save(output_dir=written, format="auto_round")
        files = sorted(Path(written).rglob("*.safetensors"))
        return [name for file in files for name in list_quantized(file)]


def list_quantized(file: Path) -> list[str]:
    """List the linears whose weights are FP8."""
    with safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if name.endswith(".weight")]  # noqa: SIM118
        return [n[:-7] for n in names if opened.get_slice(n).get_dtype() == "F8_E4M3"]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), [float(each) for each in sys.argv[4:]])
