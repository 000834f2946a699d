"""Open a model by folder or hub id: its config, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from fp8calib.checkpoint.checkpoint import Checkpoint, refuse_duplicate_tensors
from fp8calib.checkpoint.hub import find_folder
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import QUANTIZATION_KEYS, let_layers_differ
from fp8calib.checkpoint.tensor_file import LazyTensor
from fp8calib.checkpoint.weight_index import lacks_weights
from fp8calib.errors import CalibrationError, ModelError, UsageError, first_line
from fp8calib.model.prepared import is_run, mismatch_error, missing_error
from fp8calib.model.topology import find_text_decoder
from fp8calib.model.weight_source import WeightSource

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PIECES = "tokenizer.model"
"""A SentencePiece model, or a vocabulary of tiktoken."""
_TEKKEN = "tekken.json"
"""Mistral's own file, which transformers reads with the package mistral-common."""
_TOKENIZER_FILES = ("tokenizer.json", _PIECES, "vocab.json", "vocab.txt", "spiece.model", _TEKKEN)
_TRUST = "add --trust-remote-code if you trust that code"

_MODEL_CLASSES = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

LoadedModel = PreTrainedModel
"""The type of a model, for modules that may not import transformers (`lint-imports`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A checkpoint folder and its parsed config."""

    folder: Path
    config: PreTrainedConfig
    raw_config: Mapping[str, object]
    trust_remote_code: bool
    stored: Checkpoint | None = None
    """The folder's weights, of which none is read yet; None if they were not opened."""


def open_source(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    needs_weights: bool = True,
) -> ModelSource:
    """Find the model's folder, downloading it for a hub id, and read its config.

    `revision` is a branch, tag or commit on the hub. Without `trust_remote_code` no code of the
    checkpoint is run; without `needs_weights` the folder may hold a config alone.

    Raises:
        ModelError: there is no model, its config cannot be used, or it is not a decoder-only model.
    """
    folder = find_folder(model, revision)
    is_bare = not needs_weights and lacks_weights(folder)
    checkpoint = Checkpoint(folder) if is_bare else Checkpoint.open(folder)
    raw = checkpoint.load_config()
    refuse_duplicate_tensors(checkpoint)
    name = raw.get("model_type")
    is_known = isinstance(name, str) and name in transformers.CONFIG_MAPPING
    if "auto_map" in raw and not is_known and not trust_remote_code:
        raise ModelError(
            f"{folder}: model_type {name} needs the Python code of the checkpoint", hint=_TRUST
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        config = let_layers_differ(config)
    except Exception as error:
        what = f"{folder}/config.json: transformers {transformers.__version__} cannot use it"
        hint = "try pip install --upgrade transformers, or use the config.json that was published"
        why = _explain_load_error(error)
        raise ModelError(f"{what}: {why}", hint="" if is_known else hint) from error
    source = ModelSource(
        folder=folder,
        config=config,
        raw_config=raw,
        trust_remote_code=trust_remote_code,
        stored=checkpoint,
    )
    _choose_class(source)  # which refuses what is not decoder-only
    return source


def _explain_load_error(error: BaseException) -> str:
    """Explain an error of transformers or of the hub in one line."""
    if isinstance(error, KeyError):
        return f"{error} is missing or unknown"
    line = first_line(error)
    if "`CONVERSION` entries" in line:  # it refers to a report that is not printed
        return "tensors that it joins (experts, fused weights) are missing or differ in shape"
    # a line that ends with a colon is explained by the next one
    return " ".join(str(error).split("\n")[:2]) if line.endswith(":") else line


def _choose_class(source: ModelSource) -> tuple[Any, Any]:
    """Choose the class of transformers and its config: some classes take only the text config."""
    config, raw = source.config, source.raw_config
    if source.trust_remote_code and isinstance(raw.get("auto_map"), dict):
        return transformers.AutoModelForCausalLM, config
    architectures = raw.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else "?"
    is_generative = named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    is_encoder = getattr(config, "is_encoder_decoder", False) or (
        not is_generative and getattr(config, "is_decoder", None) is False
    )
    mapped = (mapping[type(config)] for mapping in _MODEL_CLASSES if type(config) in mapping)
    classes = [found[0] if isinstance(found, tuple) else found for found in mapped]
    if not classes or is_encoder:
        hint = "use a model that generates text from left to right"
        if classes and named == "?":
            hint = f"if it is a {classes[0].__name__}, name that in `architectures` of config.json"
        raise ModelError(
            f"{source.folder}: {named} (model_type {config.model_type}) is not a decoder-only "
            "language model (looked for a causal or image-text-to-text class of transformers)",
            hint=hint,
        )
    # Some types have a class for text alone beside the multimodal one: the config names one.
    chosen = next((each for each in classes if each.__name__ == named), classes[0])
    text = config.sub_configs.get("text_config")
    is_text_only = text is not None and getattr(chosen, "config_class", None) is text
    return chosen, config.get_text_config(decoder=True) if is_text_only else config


def as_unquantized(source: ModelSource) -> ModelSource:
    """Remove the sections on quantization from the config of a model, but not from `raw_config`.

    The weights are then read from a checkpoint that decodes them.
    """
    config = deepcopy(source.config)
    for part in (config, config.get_text_config(decoder=True)):
        for key in QUANTIZATION_KEYS:
            if hasattr(part, key):
                delattr(part, key)
    return replace(source, config=config)


def find_longest(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """Find the longest sequence that a model supports, and the longest that may be padded.

    None if its config does not state it, and if any may be padded. Some rotary angles (longrope,
    dynamic NTK) depend on the longest sequence of a batch, padding included (transformers 5.23
    `dynamic_rope_update`).
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    limits = []
    for section in [rope, *rope.values()] if isinstance(rope, dict) else ():
        if not isinstance(section, dict):
            continue
        kind = str(section.get("rope_type", section.get("type")))
        if "dynamic" in kind or kind in {"longrope", "su"}:
            limits.append(
                section.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or longest
            )
    longest_padded = min((int(limit) for limit in limits if limit), default=None)
    return int(longest) if longest else None, longest_padded


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer.

    Raises:
        ModelError: the folder has none, or it cannot be loaded.
    """
    folder, own = source.folder, (*_TOKENIZER_FILES, "*.tiktoken")
    if not any(next(folder.glob(name), None) for name in own):
        raise ModelError(
            f"{folder} holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})",
            hint="copy the tokenizer to this folder, or use data with input_ids; from Python, pass "
            "tokenizer= with a model in memory",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:
        why = _explain_load_error(error)
        pieces = folder / _PIECES  # of SentencePiece a protobuf, of tiktoken text
        is_protobuf = pieces.is_file() and pieces.read_bytes()[:1] == b"\n"
        if "trust_remote_code" in str(error):
            hint = _TRUST
        elif find_spec("sentencepiece") is None and is_protobuf:
            why = f"{_PIECES} is a SentencePiece model"  # transformers says that tiktoken reads it
            hint = "pip install sentencepiece protobuf, which read it, or copy a tokenizer.json"
        elif (folder / _TEKKEN).is_file() and find_spec("mistral_common") is None:
            load_json_object(folder / _TEKKEN)  # a damaged one is named as such
            hint = "pip install mistral-common, which reads tekken.json, or copy a tokenizer.json"
        elif "pip install" in str(error):
            hint = "install the package that it names, or copy a tokenizer.json"
        else:
            hint = "copy all files of the tokenizer that the model was published with"
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {why}", hint=hint) from error
    own_file = folder / "chat_template.json"  # where older processors keep the template
    if not getattr(tokenizer, "chat_template", None) and own_file.is_file():
        template = load_json_object(own_file).get("chat_template")
        if isinstance(template, list):  # several, as the tokenizer's own file has them
            template = {each["name"]: each["template"] for each in template}
        tokenizer.chat_template = template
    return tokenizer


def load_processor(source: ModelSource) -> Any:
    """Load the processor of images and audio.

    Raises:
        ModelError: it is missing, or cannot be loaded.
        UsageError: it needs a package that is not installed.
    """
    folder, cause = source.folder, None
    fault = f"{folder} holds no processor of media (looked for {', '.join(_PROCESSOR_FILES)})"
    hint, what = "copy the files that the model was published with", "the processor of its media"
    try:
        processor = AutoProcessor.from_pretrained(
            folder, trust_remote_code=source.trust_remote_code
        )
        if hasattr(processor, "tokenizer"):  # without its files transformers gives the tokenizer
            return processor
    except ImportError as error:
        raise UsageError(
            f"{folder}: {what} needs a package that is not installed: {_explain_load_error(error)}",
            hint='pip install "fp8calib[images,audio]", or the package that it names',
        ) from error
    except Exception as error:  # noqa: BLE001 -- raised below
        cause = error
        if any((folder / name).is_file() for name in _PROCESSOR_FILES):
            fault = f"{folder}: {what} cannot be loaded: {_explain_load_error(error)}"
            hint = _TRUST if "trust_remote_code" in str(error) else hint
    raise ModelError(fault, hint=hint) from cause


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: str,
    device_map: str | None,
    checkpoint: Checkpoint | None = None,
) -> PreTrainedModel:
    """Load the weights and put the model into evaluation mode.

    Stacks of experts that transformers does not join are joined from `checkpoint`. If `checkpoint`
    decodes quantized weights, `source` comes from `as_unquantized`.

    Raises:
        CalibrationError: the memory of the device, or of all devices, is too small.
        ModelError: a weight is missing or has another shape, or transformers fails to load it.
    """
    model_class, config = _choose_class(source)
    place: Path | None = source.folder
    options: dict[str, Any] = {}
    if checkpoint is not None and checkpoint.form:
        place = None
        options["state_dict"] = {
            name: LazyTensor(entry, partial(checkpoint.read, name))
            for name, entry in checkpoint.tensors.items()
        }
    try:
        model, info = model_class.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            device_map=device_map or (None if device == "cpu" else device),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # these raise an error below
            **options,
        )
    except Exception as error:
        hint = ""
        if isinstance(error, torch.OutOfMemoryError):
            hint = "use --device-map auto, --dtype bfloat16, or --device cpu"
        elif device_map is not None and "offload_folder" in str(error):
            hint = "leave out --device-map: the model is then streamed layer by layer"
        if hint:
            what = f"{source.folder}: out of memory while loading the model"
            raise CalibrationError(what, hint=hint) from error
        raise ModelError(
            f"{source.folder}: transformers cannot load the model: {_explain_load_error(error)}"
        ) from error
    loaded: PreTrainedModel = model.eval()
    missing = sorted(filter(is_run(loaded), info.get("missing_keys") or ()))
    if missing and checkpoint is not None:
        missing = _join_experts(missing, WeightSource(loaded, checkpoint))
    if missing:
        raise missing_error(source.folder, missing)
    for name, found, expected in sorted(info.get("mismatched_keys") or ()):
        raise mismatch_error(source.folder, name, found, expected)
    attend_causally(loaded)
    return loaded


@torch.no_grad()
def _join_experts(missing: Sequence[str], weights: WeightSource) -> list[str]:
    """Fill missing parameters that transformers does not join; list those that cannot be filled."""
    made = weights.parameters
    parameters = dict(weights.model.named_parameters())
    left = [name for name in missing if name not in made or parameters[name].is_meta]
    for name in missing:
        if name not in left:
            parameters[name].copy_(weights.read(name))
    return left


def build_skeleton(source: ModelSource, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the model without weights, to inspect its modules before loading them.

    It computes in `dtype`; None means the config's.

    Raises:
        ModelError: transformers cannot build it.
    """
    model_class, config = _choose_class(source)
    config = deepcopy(config)  # transformers writes the dtype into it
    options = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"):
            if model_class is transformers.AutoModelForCausalLM:
                model = model_class.from_config(config, trust_remote_code=True, **options)
            else:
                model = model_class._from_config(config, **options)
    except Exception as error:
        what = f"{source.folder}: transformers cannot build {source.config.model_type}"
        raise ModelError(f"{what}: {_explain_load_error(error)}") from error
    built: PreTrainedModel = model.eval()
    attend_causally(built)
    return built


def attend_causally(model: PreTrainedModel) -> None:
    """Let tokens attend only to earlier tokens, as engines do with text, whatever the config says.

    Some configs ask for attention in both directions (PaliGemma, EmbeddingGemma). Transformers 5.23
    then applies it to some batches only, depending on their padding.
    """
    decoder: Any = find_text_decoder(model)[1]
    for config in (decoder.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "use_bidirectional_attention", None) in {True, "all"}:
            config.use_bidirectional_attention = None
        elif getattr(config, "is_causal", True):
            continue
        config.is_causal = True
        for module in decoder.modules():
            if getattr(module, "is_causal", None) is False:
                module.is_causal = True
