"""Which model classes each release of vLLM has itself (`models/registry.py`, read)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.engines.facts.release import Release
from fp8calib.engines.vllm.model_types import LOADERS, NATIVE_WRAPPERS, UNSUPPORTED_TYPES
from fp8calib.model.shapes import ModelGeometry

CLASS = "class"
BACKEND_PLACES = "transformers' classes have parameters for KV scales"
_BASES_WITH_HEAD = ("Gemma2Model", "LlamaModel", "Qwen2Model")
"""Base classes that the registry has as the class with an output layer."""
_BASES_OF_OTHERS = ("MistralModel",)
"""Those that it has as another model's class."""


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
