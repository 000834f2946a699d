"""Quantize models with llm-compressor and ModelOpt, in every preset and KV config.

Runs in the peers' environment: `python -m tests.real_engines.peers.write MODELS OUT [CELLS]`.
MODELS has a folder for each architecture. OUT gets a folder for each cell,
`ARCHITECTURE/TOOL/PRESET/KV`, and `failed.json` with the cells that a tool does not write.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.fixtures.tiny_models import NUM_TOKENS, make_rows
from scripts.fixtures.with_llmcompressor import make_tokenizer

_NONE = "none"
_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_CACHES: Mapping[str, Mapping[str, Any] | None] = {
    _NONE: None,
    "tensor": {**_NUMBER, "strategy": "tensor"},
    "head": {**_NUMBER, "strategy": "attn_head"},
}
_ROUTERS = ["lm_head", "re:.*gate$", "re:.*router.*", "re:.*shared_expert_gate$"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One preset with one KV config."""

    tool: str
    preset: str
    cache: str
    write: Callable[[PreTrainedModel, Path], object]


def list_cells() -> Iterator[Cell]:
    """List all that both tools offer; ModelOpt offers KV configs by themselves too."""
    for preset in (*PRESET_SCHEMES, _NONE):
        for cache, scheme in _CACHES.items():
            if (preset, cache) != (_NONE, _NONE):
                write = partial(_compress, preset=preset, cache=scheme)
                yield Cell("llmcompressor", preset, cache, write)
    presets = sorted(name for name in mtq.config.choices if "KV" not in name)
    caches = sorted(name for name in dir(mtq) if name.endswith("_KV_CFG"))
    for preset in (*presets, _NONE):
        for cache in (_NONE, *caches):
            if (preset, cache) != (_NONE, _NONE):
                yield Cell("modelopt", preset, cache, partial(_export, preset=preset, cache=cache))


def _compress(
    model: PreTrainedModel, out: Path, *, preset: str, cache: Mapping[str, Any] | None
) -> None:
    rows = make_rows()
    recipe: dict[str, Any] = {"targets": [], "kv_cache_scheme": cache}
    if preset != _NONE:
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
    config = copy.deepcopy(nothing if preset == _NONE else dict(getattr(mtq, preset)))
    if cache != _NONE:
        config["quant_cfg"] = [*config["quant_cfg"], *getattr(mtq, cache)["quant_cfg"]]

    def run(each: torch.nn.Module) -> None:
        for row in make_rows():
            each(row.unsqueeze(0))

    with torch.inference_mode():
        export_hf_checkpoint(mtq.quantize(model, config, run), export_dir=str(out))


def main(models: Path, out: Path, wanted: str = "") -> None:
    """Write every cell of every model; `wanted` is a part of the cells' names."""
    known = out / "failed.json"
    failed: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    for folder in sorted(models.iterdir()):
        for cell in list_cells():
            name = f"{folder.name}/{cell.tool}/{cell.preset}/{cell.cache}"
            is_done = name in failed or (out / name / "config.json").exists()
            if wanted not in name or is_done:
                continue
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
            try:
                cell.write(model, out / name)
            except Exception as error:  # noqa: BLE001 -- a tool's own limit, which is reported
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(name, failed.get(name, "written"), flush=True)
            known.write_text(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
