"""Find what the libraries that engines use refuse in the JSON files of a checkpoint.

Also find what transformers accepts and engines may refuse: transformers checks only the types of
the fields that a model's own class declares. It does not check fields of the base class, sizes of
zero, or keys that the class does not use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import torch
import transformers
from huggingface_hub.dataclasses import type_validator
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import find_quantization_configs, without_quantization
from fp8calib.errors import ModelError, shorten
from fp8calib.model.geometry_from_class import (
    complete_heads,
    is_known,
    parse_config,
    restore_floats,
)
from fp8calib.model.geometry_from_config import GENERATION_NAME

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
_GENERAL = (
    *("cross_attention_hidden_size", "finetuning_task", "prefix", "task_specific_params"),
    *("tokenizer_class", "torch_dtype", "n_inner"),
)
"""Keys that no class reads and that are null in published configs, such as n_inner of Bloom."""
_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_STRUCTURE = ("layer_types", "layers_block_type", "attn_type_list", "sliding_window")
"""Keys that decide the cache and the attention in vLLM 0.32.0 (`config/model.py`, read), even if
the class does not use them."""
_PLAIN_LAYERS = {"attention", "full_attention"}
_BASE = PretrainedConfig()


def find_config_faults(folder: Path, config: Mapping[str, object]) -> tuple[str, list[str]]:
    """Find what transformers and compressed-tensors, as installed, refuse in a folder's JSON files.

    Returns:
        Why transformers refuses config.json (empty if it does not), and other faults. They include
        what these libraries accept and engines may refuse: a null that the model's class does not
        replace, sampling that vLLM refuses, and odd values. Values of a config.json that is refused
        or of an unknown model type are not judged.
    """
    refused, nulls, odd = "", tuple[str, ...](), tuple[str, ...]()
    if is_known(config):
        refused, nulls, odd = _judge(json.dumps(restore_floats(without_quantization(config))))
    read = (*_list_generation_faults(folder), *_list_quantization_faults(config))
    return refused, [*nulls, *read, *odd]


@lru_cache(maxsize=16)
def _judge(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Judge a config without quantization, given as JSON: a command checks many files with one.

    Returns:
        Why transformers refuses it, then the faults of nulls and those of other values.
    """
    plain = json.loads(text)
    if refused := _find_refusal(plain):
        return refused, (), ()
    parsed = parse_config(plain)
    parts = [(parsed, plain)]
    """Parsed configs, of the model and of its text model, each beside its part of config.json."""
    inner, text_model = plain.get("text_config"), parsed.get_text_config()
    if isinstance(inner, dict) and text_model is not parsed:
        parts.append((text_model, inner))
    nulls = (fault for part in parts for fault in _list_nulls(*part))
    odd = (fault for part in parts for fault in _list_odd_values(*part))
    return "", tuple(nulls), tuple(odd)


def _find_refusal(config: Mapping[str, Any]) -> str:
    """Say why transformers refuses a config without quantization; empty if it does not.

    If a head size is missing (`head_dim: null`), the model is built too: transformers may fail only
    while it computes the size.
    """

    def build() -> None:
        with torch.device("meta"):
            AutoModel.from_config(parse_config(config))

    why = _try(lambda: parse_config(config))
    return why or (_try(build) if complete_heads(config) != config else "")


def _list_generation_faults(folder: Path) -> Iterator[str]:
    if not (folder / GENERATION_NAME).is_file():
        return
    read = GenerationConfig.from_pretrained
    if why := _try(lambda: read(folder, local_files_only=True).validate()):
        yield f"transformers refuses {GENERATION_NAME}: {why}"
    document: Mapping[str, object] = {}
    with suppress(ModelError):  # which transformers refuses too
        document = load_json_object(folder / GENERATION_NAME)
    for key, (least, most) in _SAMPLING.items():
        value = document.get(key)
        if isinstance(value, int | float) and not least <= value <= most:
            yield f"{GENERATION_NAME} says {key}: {value}, outside {least:g} to {most:g}"


def _list_quantization_faults(config: Mapping[str, object]) -> Iterator[str]:
    for key, section in islice(find_quantization_configs(config), 1):
        if str(section.get("quant_method")).replace("_", "-") == "compressed-tensors":
            from compressed_tensors.quantization import QuantizationConfig  # type: ignore[import-untyped]  # noqa: PLC0415

            if why := _try(partial(QuantizationConfig.model_validate, {**section})):
                yield f"compressed-tensors refuses {key}: {why}"


def _try(act: Callable[[], object]) -> str:
    """Give the error of another library as one line; empty without one."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 -- whatever the library raises is its answer
        return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
    return ""


def _list_nulls(parsed: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """List the keys whose null the class keeps, although null is not its default.

    A key that the class does not know is listed too; so is one whose default is null, if a forward
    pass fails because of it. vLLM 0.32.0 computes with some of them (logits_scaling of granitemoe,
    sliding_window of cohere2, first_k_dense_replace of glm4_moe_lite: TypeError, run).
    """

    @cache
    def stops() -> bool:
        """Check whether a forward pass fails because something is null."""
        return "NoneType" in _try(run)

    def run() -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(parsed).from_dict({**config}))
            model(torch.zeros(1, 2, dtype=torch.long))

    has_windows = "sliding_attention" in (getattr(parsed, "layer_types", None) or ())
    off = (*_OFF, *(() if has_windows else ("sliding_window",)))
    for key in (each for each, value in config.items() if value is None and each not in off):
        if getattr(parsed, key, None) is not None:
            continue
        without = type(parsed).from_dict({k: value for k, value in config.items() if k != key})
        if getattr(without, key, None) is None:
            # every config had these keys in earlier releases of transformers
            is_general = key in _GENERAL or hasattr(GenerationConfig(), key) or hasattr(_BASE, key)
            if is_general or key.endswith("_token_id") or key.startswith("_"):
                continue
            # null is the default: it counts only if a forward pass fails because of it
            if hasattr(without, key) and not stops():
                continue
        yield f"config.json says {key}: null, and an engine may compute with it"


def _list_odd_values(parsed: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """List the values that an engine may refuse, or take for another structure.

    vLLM stopped at `architectures` given as a string, at `max_position_embeddings: 0`, and at a
    llama with two kinds of `layer_types`. `parsed` is the config as transformers reads it.
    """
    default = type(parsed)()
    hints = get_type_hints(PretrainedConfig, localns={"torch": torch})
    types = {each.name: hints[each.name] for each in fields(PretrainedConfig)}
    types["torch_dtype"] = types["dtype"]
    for key, value in config.items():
        if value is None:
            continue
        try:
            type_validator(key, value, types.get(key, Any))
        except TypeError:
            yield f"config.json says {key}: {shorten(str(value))}, which is of another type"
        if isinstance(value, int | float) and value < 0 and not key.endswith("_token_id"):
            usual = getattr(default, key, None)
            if isinstance(usual, int | float) and not isinstance(usual, bool) and usual >= 0:
                yield f"config.json says {key}: {value}, where the class has {usual}"
            elif usual is None and key in _SIZES:  # engines read it, whatever the class does
                yield f"config.json says {key}: {value}"
        is_plain = isinstance(value, list) and _PLAIN_LAYERS.issuperset(map(str, value))
        if key in _STRUCTURE and not hasattr(default, key) and value and not is_plain:
            yield f"config.json says {key}, for which {type(parsed).__name__} has no use"
    for key in _SIZES:
        if getattr(parsed, key, None) == 0 and getattr(default, key, None) != 0:
            yield f"config.json says {key}: 0"


def is_multimodal_class(name: object, config: Mapping[str, object]) -> bool:
    """Check whether `name` is the class of a config's model type that takes more than text."""
    if not isinstance(name, str) or not name.endswith("ForConditionalGeneration"):
        return False
    own = getattr(getattr(transformers, name, None), "config_class", None)
    return own is not None and own.model_type == config.get("model_type")
