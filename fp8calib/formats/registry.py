"""All dialects. Every list of formats (options, help, messages, README) is made from here."""

from __future__ import annotations

from fp8calib.errors import UsageError, suggest
from fp8calib.formats.dialect import Dialect
from fp8calib.formats.kv.json import RFC, VLLM_JSON
from fp8calib.formats.kv.kv_scales import (
    AUTOFP8_KV,
    COMPRESSED_TENSORS_KV,
    KV_SCALES,
    MODELOPT_KV,
    QUARK_KV,
    TRTLLM,
)
from fp8calib.formats.kv.overlay import KV_OVERLAY, KV_OVERLAY_HEAD, TGI_CHECKPOINT
from fp8calib.plugin import load_all

_dialects: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """Add a dialect; the last one registered is the first to be tried on files.

    Raises:
        ValueError: the name is taken.
    """
    if dialect.name in _dialects:
        raise ValueError(f"a dialect called {dialect.name} is registered already")
    _dialects[dialect.name] = dialect


def list_read() -> tuple[Dialect, ...]:
    """List the dialects that can be read, in the order of recognition."""
    return tuple(each for each in reversed(_dialects.values()) if each.recognise is not None)


def list_format_names() -> tuple[str, ...]:
    """List the values of `--format`."""
    return tuple(name for name, dialect in _dialects.items() if dialect.write is not None)


def find_dialect(format_name: str) -> Dialect:
    """Find the dialect that `--format` names.

    Raises:
        UsageError: there is none that can be written.
    """
    dialect = _dialects.get(format_name)
    if dialect is None or dialect.write is None:
        raise UsageError(
            f"--format {format_name}: unknown format",
            hint=suggest(format_name, list_format_names(), what="formats"),
        )
    return dialect


def list_scale_suffixes() -> tuple[str, ...]:
    """List the endings of scale tensors' names in all dialects."""
    return tuple({suffix for dialect in _dialects.values() for suffix in dialect.scale_suffixes})


def list_json_keys() -> frozenset[tuple[str, ...]]:
    """List the keys that identify JSON files of scales, a tuple for each dialect."""
    return frozenset(dialect.json_keys for dialect in _dialects.values() if dialect.json_keys)


for _dialect in (
    KV_OVERLAY,
    KV_OVERLAY_HEAD,
    TGI_CHECKPOINT,
    KV_SCALES,
    VLLM_JSON,
    RFC,
    COMPRESSED_TENSORS_KV,
    AUTOFP8_KV,
    QUARK_KV,
    MODELOPT_KV,
    TRTLLM,
    *load_all("formats"),
):
    register_dialect(_dialect)
