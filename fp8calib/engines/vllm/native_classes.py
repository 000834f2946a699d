"""Which model classes each release of vLLM has itself (`models/registry.py`, read)."""

from __future__ import annotations

from fp8calib.engines.facts.release import VLLM_RUN, Release
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
from fp8calib.geometry.model_geometry import ModelGeometry

CLASS = "class"
BACKEND_PLACES = "transformers' classes have parameters for KV scales"
_TABLES_HOLD = "classes join and name linears as model_types.py says"
_TABLES_OF_LINEARS = (
    *(CREATED_LINEARS, PLAIN_HEAD_TYPES, RENAMED_LINEARS, SEPARATE_TYPES, UNPACKED_TYPES),
    UNQUANTIZED_LINEARS,
)


def has_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release has the class of a model; if not, it may run transformers'."""
    name = geometry.architecture
    if name in release.begins[CLASS]:
        return name in release.list_values(CLASS)
    return geometry.model_type in LOADERS or name in NATIVE_WRAPPERS


def is_unsupported(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release runs a model in no way.

    Since its backend for transformers' classes has parameters for KV scales, it may run a model
    whose own class came later.
    """
    is_later = bool(release.begins[CLASS].get(geometry.architecture))
    is_later = is_later and not release.has(BACKEND_PLACES)
    is_dropped = geometry.model_type in UNSUPPORTED_TYPES
    return (is_later or is_dropped) and not has_class(geometry, release)


def is_other_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release has a class that joins or names linears in its own way.

    The tables of `model_types.py` were found by running one release.
    """
    if release.has(_TABLES_HOLD):
        return False
    is_listed = any(geometry.model_type in table for table in _TABLES_OF_LINEARS)
    return is_listed or has_class(geometry, release) is not has_class(geometry, VLLM_RUN)
