"""The grid of what other tools write: a model, a tool, a preset and a KV config make a cell.

This module runs in the environments of the tools.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NONE = "none"
"""Of a preset: weights stay as they are. Of a cache: so does the KV cache."""
_WHOLE = "llama"
"""Every preset with every KV config."""
ARCHITECTURES = (
    *("llama", "qwen3", "mixtral", "qwen3_moe", "gemma3_text"),
    *("cohere2", "deepseek_v3", "ernie4_5_moe", "exaone4", "gemma2", "glm4", "glm4_moe", "gpt2"),
    *("gpt_oss", "granite", "granitemoe", "hunyuan_v1_moe", "mistral", "nemotron", "olmo2"),
    *("olmoe", "phi3", "qwen2_moe", "smollm3", "starcoder2"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One preset with one KV config."""

    tool: str
    preset: str
    cache: str
    write: Callable[[PreTrainedModel, Path], object]
    is_usual: bool = False
    """Whether every model gets the preset with every KV config."""

    def suits(self, architecture: str) -> bool:
        """Whether the grid has the cell for a model.

        Every model gets every preset, and every KV config alone and with the usual presets; the
        whole product would be five times as many.
        """
        if self.preset == NONE:
            return self.cache != NONE
        return architecture == _WHOLE or self.is_usual or self.cache == NONE


def write_cells(cells: Iterable[Cell], models: Path, out: Path, wanted: str) -> None:
    """Write every cell of every model in MODELS in whose name the expression `wanted` is found.

    OUT gets a folder `ARCHITECTURE/TOOL/PRESET/KV` for each, and `failed-TOOL.json` with what a
    tool cannot write, and why.
    """
    every = list(cells)
    for folder in sorted(models.iterdir()):
        for cell in every:
            name = f"{folder.name}/{cell.tool}/{cell.preset}/{cell.cache}"
            if not re.search(wanted, name) or not cell.suits(folder.name):
                continue
            known = out / f"failed-{cell.tool}.json"
            failed: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
            if name in failed or (out / name / "config.json").exists():
                continue
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
            try:
                cell.write(model, out / name)
            except Exception as error:  # noqa: BLE001 -- a tool's own limit, which is reported
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(name, failed.get(name, "written"), flush=True)
            known.write_text(json.dumps(failed))
