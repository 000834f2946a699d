"""Candidates of files: scales of any dialect, and FP8 checkpoints, that belong to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.engines.weights.layers import PLAIN_DTYPES
from fp8calib.errors import ModelError, first_line
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import require_format
from fp8calib.formats.fp8.match_scales import is_fp8_checkpoint
from fp8calib.formats.read import has_kv_scales, read_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.model.weight_source import WeightSource
from fp8calib.verification.candidates import (
    Target,
    build_kv_candidate,
    check_model,
    describe_rounding,
    explain_plain_cache,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.weights import emulate_stored

_SAMPLE_BYTES = 4096


def open_file(name: str, path: Path, target: Target) -> Candidate:
    """Read scales or an FP8 checkpoint as the engine reads it, and emulate them."""
    if path.is_dir() and is_fp8_checkpoint(path):
        return _open_checkpoint(name, path, target)
    table = _read_scales(name, path, target)
    made = build_kv_candidate(name, table, target.numerics, origin=table.dialect)
    found = _check_weights(path, target) if target.prepared.checkpoint.has_weights else ""
    if found and not target.prepared.checkpoint.form:
        note = f"only its KV scales are emulated, not its weights: {found}"
        made = replace(made, notes=(*made.notes, note))
    return replace(made, origin=table.origin)


def _read_scales(name: str, path: Path, target: Target) -> ScaleTable:
    table = read_scales(path, target.prepared.geometry, fills_layers=True)
    check_model(name, table.origin, target)
    return table


def _check_weights(path: Path, target: Target) -> str:
    """Refuse an overlay whose weights or config are another model's; name a quantized weight."""
    quantized = ""
    try:
        overlay = Checkpoint.open(path) if (path / CONFIG_NAME).is_file() else None
    except ModelError:
        overlay = None
    if overlay is None:
        return quantized  # no weights beside the scales: nothing to compare
    with overlay:
        _check_config(overlay, target)
        for name, entry in overlay.tensors.items():
            if len(entry.shape) > 1 and entry.dtype not in PLAIN_DTYPES:
                quantized = quantized or f"{name} is {entry.dtype}"
                continue
            own = target.prepared.checkpoint.tensors.get(name)
            if own is None or (own.dtype != entry.dtype and own.shape == entry.shape):
                continue
            if own.shape != entry.shape or overlay.sample_bytes(
                name, _SAMPLE_BYTES
            ) != target.prepared.checkpoint.sample_bytes(name, _SAMPLE_BYTES):
                raise ModelError(
                    f"{path}: its {name} is not that of the model, so the scales belong to "
                    "another model",
                    hint="pass the model that the overlay was made from",
                )
    return quantized


def _open_checkpoint(name: str, path: Path, target: Target) -> Candidate:
    """Emulate a whole FP8 checkpoint, with its KV scales if it has any."""
    numerics = target.numerics
    checkpoint = Fp8Checkpoint.open(
        path,
        fuse=numerics.fused_share_scales,
        through_float16=numerics.weights_through_float16,
        keeps_equal_scales=numerics.modelopt_keeps_equal_scales,
    )
    require_format(path, checkpoint.load_config())
    _check_config(checkpoint, target)
    check_model(name, checkpoint.origin, target)
    source = WeightSource(target.prepared.model, checkpoint)
    emulation = emulate_stored(
        checkpoint, target.prepared.checkpoint, target.prepared.geometry, source, numerics
    )
    what = f"{checkpoint.dialect.name} checkpoint, weights {checkpoint.fmt.name}"
    kv = Candidate(name=name)
    if has_kv_scales(path):
        table = _read_scales(name, path, target)
        if why := explain_plain_cache(table, numerics):
            kv = replace(kv, notes=(f"its KV scales are ignored: {why}",))
        else:
            kv = build_kv_candidate(name, table, numerics, origin=table.dialect)
            what += f", {kv.description}"
    return replace(
        kv,
        description=what + describe_rounding(emulation.quantizers, numerics),
        quantizers={**emulation.quantizers, **kv.quantizers},
        weights=emulation.weights,
        notes=(*kv.notes, *emulation.notes),
        origin=checkpoint.origin,
    )


# --- configs --------------------------------------------------------------------------------------

_IDLE = {
    # how files are stored and read
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("quantization_config", "compression_config", "name_or_path", "model_type"),
    # training
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
    *("initializer_range", "pretraining_tp", "router_aux_loss_coef", "router_z_loss_coef"),
    # generation
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("num_logits_to_keep", "is_decoder", "is_encoder_decoder", "id2label", "label2id"),
    *("problem_type", "chunk_size_feed_forward"),
}
"""Keys that change nothing of what a forward pass computes from the same weights."""


def _check_config(checkpoint: Checkpoint, target: Target) -> None:
    """Refuse a checkpoint that engines compute in another way than the model."""
    if other := find_other_setting(checkpoint.load_config(), target.prepared.model.config):
        raise ModelError(
            f"{checkpoint.folder}: its config.json is not that of the model: {other}",
            hint="engines follow it: copy the value from the model's config.json",
        )


def find_other_setting(raw: Mapping[str, Any], config: PreTrainedConfig) -> str:
    """Name a setting of a config.json by which it computes something else; empty if none does."""
    own = {key: value for key, value in raw.items() if key != "quantization_config"}
    if own.get("model_type") != config.model_type:
        return f"model_type is {own.get('model_type')}, not {config.model_type}"
    try:
        read = type(config).from_dict(own)
    except Exception as error:  # noqa: BLE001 -- of any library, on any value
        return f"transformers cannot read it: {first_line(error)}"
    found, expected = (
        dict(_flatten(each.get_text_config(decoder=True).to_dict())) for each in (read, config)
    )
    for key in found.keys() & expected.keys():
        is_untied = (
            key == "tie_word_embeddings" and not found[key]
        )  # it has a copy of the embedding
        if found[key] != expected[key] and not is_untied:
            return f"{key} is {found[key]}, not {expected[key]}"
    return ""


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key.startswith("_") or key in _IDLE:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
