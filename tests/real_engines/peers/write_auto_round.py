"""Quantize models with auto-round, to nearest, in every scheme that is not GGUF's.

Runs in its environment: `python -m tests.real_engines.peers.write_auto_round MODELS OUT [CELLS]`.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from auto_round import AutoRound
from auto_round.schemes import PRESET_SCHEMES
from transformers import PreTrainedModel

from scripts.fixtures.tiny_models import NUM_TOKENS, make_rows, make_tokenizer
from tests.real_engines.peers.cells import NONE, Cell, write_cells

_FORMATS = {"FP8_STATIC": ("auto_round", "llm_compressor"), "FP8_BLOCK": ("auto_round", "fp8")}
_CACHES = (NONE, "fp8")


def list_cells() -> Iterator[Cell]:
    """List the schemes, each in the formats that engines read it in."""
    for scheme in sorted(name for name in PRESET_SCHEMES if not name.startswith("GGUF")):
        for written in _FORMATS.get(scheme, ("auto_round",)):
            for cache in _CACHES:
                write = partial(_round, scheme=scheme, written=written, cache=cache)
                is_usual = scheme == "FP8_STATIC"
                yield Cell("autoround", f"{scheme}-{written}", cache, write, is_usual=is_usual)


def _round(model: PreTrainedModel, out: Path, *, scheme: str, written: str, cache: str) -> None:
    rounding = AutoRound(
        model,
        make_tokenizer(),
        scheme=scheme,
        iters=0,
        nsamples=len(make_rows()),
        seqlen=NUM_TOKENS,
        dataset=[{"input_ids": row.unsqueeze(0)} for row in make_rows()],
        static_kv_dtype=None if cache == NONE else cache,
    )
    with tempfile.TemporaryDirectory(dir=out.parents[3]) as folder:
        rounding.quantize_and_save(output_dir=folder, format=written)
        made = next(Path(folder).rglob("config.json")).parent
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, out)


if __name__ == "__main__":
    write_cells(list_cells(), Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:]))
