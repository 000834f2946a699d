"""Which model classes each release of vLLM has itself (`models/registry.py`, read)."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
from fp8calib.model.shapes import ModelGeometry

CLASS = "class"
BACKEND_PLACES = "transformers' classes have parameters for KV scales"
_TABLES_HOLD = "classes join and name linears as model_types.py says"
_BASES_WITH_HEAD = ("Gemma2Model", "LlamaModel", "Qwen2Model")
"""Base classes that the registry has as the class with an output layer."""
_BASES_OF_OTHERS = ("MistralModel",)
"""Those that it has as another model's class."""
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


def names_base(config: Mapping[str, object], geometry: ModelGeometry) -> bool:
    """Check whether a config names the model without its output layer, or nothing, as vLLM sees it.

    Without a name vLLM takes the base class of the model type (`transformers_utils/config.py`,
    get_config; 0.26.0 to 0.33.0, read).
    """
    base, named = _find_base(geometry), config.get("architectures") or None
    return base not in ("", *_BASES_OF_OTHERS) and named in (None, [base])


def generates_nothing(config: Mapping[str, object], geometry: ModelGeometry) -> bool:
    """Check whether vLLM runs a model of that kind to embed text, without an output layer.

    `config/model.py` (_get_default_runner_type, _SUFFIX_TO_DEFAULTS) and `models/registry.py`:
    0.26.0 to 0.33.0 read, 0.32.0 run with 10 types.
    """
    return names_base(config, geometry) and _find_base(geometry) not in _BASES_WITH_HEAD


def _find_base(geometry: ModelGeometry) -> str:
    base = re.sub("(ForCausalLM|LMHeadModel)$", "Model", geometry.architecture)
    return base if base != geometry.architecture else ""


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
