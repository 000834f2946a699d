"""Which model classes each release of vLLM has itself (`models/registry.py`, read)."""

from __future__ import annotations

from fp8calib.engines.facts import Release
from fp8calib.engines.vllm.model_types import (
    CREATED_LINEARS,
    LOADERS,
    NATIVE_WRAPPERS,
    PLAIN_HEAD_TYPES,
    RENAMED_LINEARS,
    SEPARATE_TYPES,
    UNPACKED_TYPES,
    UNQUANTIZED_LINEARS,
    UNSUPPORTED_TYPES,
)
from fp8calib.engines.vllm.releases import VLLM_0_32
from fp8calib.geometry.model_geometry import ModelGeometry

_CLASS = "class"
_TABLES_OF_LINEARS = (
    *(CREATED_LINEARS, PLAIN_HEAD_TYPES, RENAMED_LINEARS, SEPARATE_TYPES, UNPACKED_TYPES),
    UNQUANTIZED_LINEARS,
)


def find_class_fact(geometry: ModelGeometry, release: Release) -> str:
    """Find the first release that has a model's class; empty where all known ones may have it."""
    named = (each for each in release.facts if each.name == _CLASS)
    return next((each.since for each in named if each.value == geometry.architecture), "")


def has_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release has the class of a model; if not, it may run transformers'."""
    name = geometry.architecture
    if any(each.name == _CLASS and each.value == name for each in release.facts):
        return name in release.list_values(_CLASS)
    return geometry.model_type in LOADERS or name in NATIVE_WRAPPERS


def is_unsupported(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release runs a model in no way."""
    is_later = bool(find_class_fact(geometry, release))
    is_dropped = geometry.model_type in UNSUPPORTED_TYPES
    return (is_later or is_dropped) and not has_class(geometry, release)


def is_other_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether an older release has a class that joins or names linears in its own way.

    Those of 0.32 are known: the tables of `model_types.py` were found by running it.
    """
    if release >= VLLM_0_32:
        return False
    is_listed = any(geometry.model_type in table for table in _TABLES_OF_LINEARS)
    return is_listed or has_class(geometry, release) is not has_class(geometry, VLLM_0_32)
