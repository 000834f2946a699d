"""Entries of the public collections of serving recipes: vLLM's recipes and SGLang's cookbook.

The forms are those of vllm-project/recipes 8959cf6 (`CONTRIBUTING.md`) and sgl-project/sgl-cookbook
7b5bd9c (`data/models/src`, `data/schema/types.ts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.dialects.registry import list_scale_suffixes
from fp8calib.engines.registry import find_replayed
from fp8calib.errors import UsageError
from fp8calib.jobs.card.facts import CardFacts
from fp8calib.verification.figures import format_mean_kld, format_ratio

_HEADROOM = 1.2
"""Of memory over the weights, as vLLM's collection counts it."""
_GB = 1e9
_H100_GB = 80
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a model is, by its tensors and its config."""

    parameters: int
    active: int
    """Those that one token is multiplied by."""
    stored_bytes: int
    context: int | None

    @property
    def is_sparse(self) -> bool:
        """Whether it has experts."""
        return self.active < self.parameters


def measure_size(folder: Path) -> Size:
    """Count parameters, without scales.

    Raises:
        ModelError: the folder cannot be read.
        UsageError: it holds files of scales alone.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise UsageError(f"{folder}: scales alone are no variant of a model that is served")
    config: dict[str, Any] = load_json_object(folder / CONFIG_NAME)
    text = config.get("text_config")
    config = {**config, **(text if isinstance(text, dict) else {})}
    suffixes = list_scale_suffixes()
    with Checkpoint.open(folder) as checkpoint:
        counts = {
            name: math.prod(entry.shape)
            for name, entry in checkpoint.tensors.items()
            if not name.endswith(suffixes)
        }
        stored = checkpoint.total_size_bytes
    total = sum(counts.values())
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    number, used = _find_number(config, _EXPERT_COUNTS), _find_number(config, _EXPERTS_A_TOKEN)
    idle = experts * (1 - used / number) if number and used else 0
    return Size(
        parameters=total,
        active=round(total - idle),
        stored_bytes=stored,
        context=_find_number(config, ("max_position_embeddings",)),
    )


def _find_number(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def make_vllm_recipe(
    facts: CardFacts, size: Size, base: str, repo: str, *, oldest: str, added: date
) -> dict[str, Any]:
    """Make the recipe of a base model with the folder as a variant.

    Args:
        facts: what is recorded about the folder.
        size: of the model.
        base: the Hub id of the unquantized model.
        repo: the Hub id of the folder.
        oldest: the oldest release of vLLM that loads it, of those that are known.
        added: when.
    """
    org, _, name = base.partition("/")
    key = "fp8" if facts.weights else "fp8_kv"
    variant: dict[str, Any] = {
        "model_id": repo,
        "precision": "fp8" if facts.weights else "bf16",
        "vram_minimum_gb": _count_gb(size.stored_bytes),
        "description": _describe(facts),
    }
    if options := _list_options(facts, "vllm"):
        variant["extra_args"] = options
    unquantized = {
        "precision": "bf16",
        "vram_minimum_gb": _count_gb(2 * size.parameters),
        "description": "The unquantized model",
    }
    command = find_replayed("vllm").launch
    assert command is not None  # noqa: S101
    served = command.spell(repo, has_kv=facts.has_kv_scales)
    return {
        "meta": {
            "title": name,
            "slug": name.lower(),
            "provider": org,
            "description": f"{name}, and a variant of it in FP8",
            "date_added": added,
            "date_updated": added,
            "difficulty": "beginner",
            "tasks": ["text"],
        },
        "model": {
            "model_id": base,
            "min_vllm_version": oldest,
            "architecture": "moe" if size.is_sparse else "dense",
            "parameter_count": _spell_count(size.parameters),
            "active_parameters": _spell_count(size.active),
            **({} if size.context is None else {"context_length": size.context}),
            "base_args": [],
            "base_env": {},
        },
        "dependencies": [],
        "features": {},
        "opt_in_features": [],
        "variants": {"default": unquantized, key: variant},
        "compatible_strategies": ["single_node_tp"],
        "hardware_overrides": {},
        "strategy_overrides": {},
        "guide": f"## Launching the FP8 variant\n\n```bash\n{served}\n```\n\n"
        f"## References\n\n- [Model card](https://huggingface.co/{repo})\n",
    }


def make_sglang_block(facts: CardFacts, size: Size, base: str, repo: str) -> dict[str, Any]:
    """Make a file of the cookbook's models with the folder as its one model.

    Tensor parallelism is the smallest power of two whose H100s hold the weights.
    """
    ranks = 1
    while ranks * _H100_GB < _count_gb(size.stored_bytes):
        ranks *= 2
    hardware: dict[str, Any] = {"tp": ranks}
    if options := _list_options(facts, "sglang"):
        hardware["extra_args"] = options
    org, _, name = repo.partition("/")
    return {
        "vendor": org,
        "defaults": {
            "configurations": [{"name": "default", "nodes": "single", "optimization": "balanced"}]
        },
        "families": [
            {
                "name": base.partition("/")[2],
                "description": _describe(facts),
                "llm": {"thinking_capability": _find_thinking(facts.folder)},
                "models": [
                    {
                        "name": name,
                        "quantization": "fp8" if facts.weights else "bf16",
                        "hardware": {"H100": hardware},
                    }
                ],
            }
        ],
    }


def _find_thinking(folder: Path) -> str:
    """Tell by the chat template whether the model thinks before it answers."""
    places = (folder / "chat_template.jinja", folder / "tokenizer_config.json")
    text = "".join(path.read_text(encoding="utf-8") for path in places if path.is_file())
    if "enable_thinking" in text:
        return "hybrid"
    return "thinking" if "<think>" in text else "non_thinking"


def _describe(facts: CardFacts) -> str:
    parts = [facts.weights] if facts.weights else []
    parts += ["scales for an FP8 KV cache"] if facts.has_kv_scales else []
    for loss in facts.losses[:1]:
        own = loss.own
        kld = format_mean_kld(own.kld_mean, own.kld_se)
        ratio = format_ratio(own.ppl_ratio, own.ppl_ratio_se)
        parts.append(f"KLD {kld} and perplexity ratio {ratio}, emulated as {loss.engine} computes")
    return "; ".join(parts)


def _list_options(facts: CardFacts, engine: str) -> list[str]:
    """List the options that serve the folder."""
    launch = find_replayed(engine).launch
    return launch.kv_flag.split() if launch is not None and facts.has_kv_scales else []


def _count_gb(size_bytes: int) -> int:
    return max(1, math.ceil(size_bytes * _HEADROOM / _GB))


def _spell_count(count: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
