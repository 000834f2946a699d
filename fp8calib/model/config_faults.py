"""Find what the libraries that engines use refuse in the JSON files of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
)

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import find_quantization_configs, without_quantization
from fp8calib.errors import ModelError, shorten
from fp8calib.model.config_values import list_odd_values
from fp8calib.model.geometry_from_config import complete_heads, is_known, restore_floats

_GENERATION = "generation_config.json"
_SAMPLING = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "repetition_penalty": (1e-9, math.inf),
}
"""What vLLM 0.32.0 accepts (`SamplingParams`, run); transformers takes any number."""
_OFF = ("final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank", "rope_scaling")
"""Keys whose null switches something off in every class that has them, and in engines."""
_WINDOW = "sliding_window"
_GENERAL = (
    *("cross_attention_hidden_size", "finetuning_task", "prefix", "task_specific_params"),
    *("tokenizer_class", "torch_dtype", "n_inner"),
)
"""Keys of null in the configs of published models (n_inner in Bloom's), which no class reads."""


def find_config_fault(config: Mapping[str, object]) -> str:
    """Say why the installed transformers refuses a config.json; empty where it does not.

    It may refuse it only when it builds the model: with `head_dim: null`, whose geometry is that of
    an engine which computes it.
    """
    if not is_known(config):
        return ""
    plain = restore_floats(without_quantization(config))
    if why := _try(partial(_parse_config, plain)):
        return why
    return _try(partial(_build, plain)) if complete_heads(plain) != plain else ""


def _parse_config(config: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING[config["model_type"]].from_dict(config)


def _build(config: Mapping[str, Any]) -> None:
    with torch.device("meta"):
        AutoModel.from_config(_parse_config(config))


def list_other_faults(
    folder: Path, config: Mapping[str, object], *, is_refused: bool
) -> Iterator[str]:
    """List what transformers and compressed-tensors, as installed, refuse beside that.

    Also what they accept and engines may not: a null that the model's class does not replace, and
    the values of `list_odd_values`.

    Args:
        folder: of the checkpoint.
        config: its config.json.
        is_refused: whether transformers refuses that, so that no class has read its values.
    """
    is_read = is_known(config) and not is_refused
    parts = list(_list_parts(restore_floats(without_quantization(config)))) if is_read else []
    for parsed, own in parts:
        yield from _list_nulls(parsed, own)
    if (folder / _GENERATION).is_file():
        yield _prefix(f"transformers refuses {_GENERATION}", _try(partial(_generate, folder)))
        yield from _list_odd_sampling(folder)
    for key, section in islice(find_quantization_configs(config), 1):
        if str(section.get("quant_method")).replace("_", "-") == "compressed-tensors":
            yield _prefix(f"compressed-tensors refuses {key}", _try(partial(_parse, section)))
    for parsed, own in parts:
        yield from list_odd_values(parsed, own)


def _list_parts(config: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """List the configs that the class reads, each with what the file has for it."""
    parsed = _parse_config(config)
    yield parsed, config
    inner, text = config.get("text_config"), parsed.get_text_config()
    if isinstance(inner, dict) and text is not parsed:
        yield text, inner


def _list_nulls(parsed: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """List the nulls that stay null, where the class has a value without them, or no such key.

    vLLM 0.32.0 computes with some of them (logits_scaling of granitemoe, sliding_window of cohere2,
    first_k_dense_replace of glm4_moe_lite: TypeError, run).
    """
    has_windows = "sliding_attention" in (getattr(parsed, "layer_types", None) or ())
    is_off = (*_OFF, *(() if has_windows else (_WINDOW,)))
    for key in (each for each, value in config.items() if value is None and each not in is_off):
        others = {name: value for name, value in config.items() if name != key}
        plain = type(parsed).from_dict(others)
        if getattr(parsed, key, None) is not None:
            continue
        if not hasattr(plain, key):
            is_read = not _is_unread(key)
        else:
            is_read = getattr(plain, key) is not None or _fails_with_none(plain, key)
        if is_read:
            yield f"config.json says {key}: null, and an engine may compute with it"


def _fails_with_none(parsed: Any, key: str) -> bool:
    """Check whether the class fails in a forward pass because a field of its own is None."""
    return not _is_unread(key) and "NoneType" in _try(partial(_run, parsed))


def _run(parsed: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
        model(torch.zeros(1, 2, dtype=torch.long))


_BASE = PretrainedConfig()


def _is_unread(key: str) -> bool:
    """Check whether a key is one that every config had in earlier releases of transformers."""
    is_general = key in _GENERAL or hasattr(GenerationConfig(), key) or hasattr(_BASE, key)
    return is_general or key.endswith("_token_id") or key.startswith("_")


def _prefix(what: str, why: str) -> str:
    return f"{what}: {why}" if why else ""


def _generate(folder: Path) -> None:
    GenerationConfig.from_pretrained(folder, local_files_only=True).validate()


def _list_odd_sampling(folder: Path) -> Iterator[str]:
    try:
        document = load_json_object(folder / _GENERATION)
    except ModelError:
        return  # which transformers refuses too
    for key, (least, most) in _SAMPLING.items():
        value = document.get(key)
        if isinstance(value, int | float) and not least <= value <= most:
            yield f"{_GENERATION} says {key}: {value}, outside {least:g} to {most:g}"


def _parse(section: Mapping[str, object]) -> None:
    from compressed_tensors.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        QuantizationConfig,
    )

    QuantizationConfig.model_validate({**section})


def _try(act: Callable[[], object]) -> str:
    """Give the error of another library as one line; empty without one."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 -- whatever the library raises is its answer
        return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
    return ""
