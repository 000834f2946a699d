"""Quantize models with llm-compressor and ModelOpt.

Runs in the peers' environment: `python -m tests.real_engines.peers.write MODELS OUT [CELLS]`.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from modelopt.torch.export import export_hf_checkpoint
from transformers import PreTrainedModel

from scripts.fixtures.tiny_models import NUM_TOKENS, make_rows, make_tokenizer
from tests.real_engines.peers.cells import NONE, Cell, write_cells

_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_CACHES: Mapping[str, Mapping[str, Any] | None] = {
    NONE: None,
    "tensor": {**_NUMBER, "strategy": "tensor"},
    "head": {**_NUMBER, "strategy": "attn_head"},
}
_ROUTERS = ["lm_head", "re:.*gate$", "re:.*router.*", "re:.*shared_expert_gate$"]


def list_cells() -> Iterator[Cell]:
    """List all that both tools offer; ModelOpt offers KV configs by themselves too."""
    for preset in (*PRESET_SCHEMES, NONE):
        for cache, scheme in _CACHES.items():
            write = partial(_compress, preset=preset, cache=scheme)
            yield Cell("llmcompressor", preset, cache, write, is_usual=preset == "FP8")
    presets = sorted(name for name in mtq.config.choices if "KV" not in name)
    caches = sorted(name for name in dir(mtq) if name.endswith("_KV_CFG"))
    for preset in (*presets, NONE):
        for cache in (NONE, *caches):
            made = partial(_export, preset=preset, cache=cache)
            yield Cell("modelopt", preset, cache, made, is_usual=preset == "FP8_DEFAULT_CFG")


def _compress(
    model: PreTrainedModel, out: Path, *, preset: str, cache: Mapping[str, Any] | None
) -> None:
    rows = make_rows()
    recipe: dict[str, Any] = {"targets": [], "kv_cache_scheme": cache}
    if preset != NONE:
        recipe |= {"targets": "Linear", "scheme": preset, "ignore": _ROUTERS}
    oneshot(
        model=model,
        processor=make_tokenizer(),
        dataset=Dataset.from_list([{"input_ids": row} for row in rows.tolist()]),
        recipe=QuantizationModifier(**recipe),
        num_calibration_samples=len(rows),
        max_seq_length=NUM_TOKENS,
        shuffle_calibration_samples=False,
        pipeline="basic",
    )
    model.save_pretrained(out, save_compressed=True)


def _export(model: PreTrainedModel, out: Path, *, preset: str, cache: str) -> None:
    nothing = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    config = copy.deepcopy(nothing if preset == NONE else dict(getattr(mtq, preset)))
    if cache != NONE:
        config["quant_cfg"] = [*config["quant_cfg"], *getattr(mtq, cache)["quant_cfg"]]

    def run(each: torch.nn.Module) -> None:
        for row in make_rows():
            each(row.unsqueeze(0))

    with torch.inference_mode():
        export_hf_checkpoint(mtq.quantize(model, config, run), export_dir=str(out))


if __name__ == "__main__":
    write_cells(list_cells(), Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:]))
