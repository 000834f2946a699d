"""The ends of paths of unquantized modules, for engines that use other prefixes or names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from fp8calib.formats.fp8.dialect import UnquantizedMatrix
from fp8calib.model.module_paths import split_expert
from fp8calib.quantization.matrices import Matrix

_RENAMED: Mapping[str, tuple[str, str]] = {"phimoe": ("block_sparse_moe.gate", "mlp.router")}
"""Names in transformers 5.23 of linears that stay unquantized by default
(`conversion_mapping.py`)."""
_MOVED = frozenset({"gemma3n_text"})
"""Types of which vLLM 0.32 has linears outside of numbered layers in another module, run."""
_PARTIAL_CONFIGS = frozenset(
    {"text_config", "llm_config", "language_config", "vision_config", "audio_config"}
)
"""A config with one of these has a text model as a part, and engines give it another prefix."""


def find_ends(
    config: Mapping[str, object],
    unquantized: Collection[UnquantizedMatrix],
    quantized: Collection[Matrix],
) -> Iterator[UnquantizedMatrix]:
    """Add the ends of paths, where engines may use another prefix or other names."""
    model_type = str(config.get("model_type"))
    old, new = _RENAMED.get(model_type, ("", ""))
    is_moved = model_type in _MOVED
    if not (old or is_moved) and _PARTIAL_CONFIGS.isdisjoint(config):
        yield from unquantized
        return
    quantized_ends = {end for matrix in quantized for end in _list_ends(matrix.module)}
    for item in unquantized:
        paths = (path.replace(old, new) for path in item.linears)
        found = (_list_ends(path, only_outermost=True, takes_last=is_moved) for path in paths)
        own = (next((end for end in ends if end not in quantized_ends), None) for ends in found)
        yield replace(item, ends=tuple(dict.fromkeys(end for end in own if end is not None)))


def _list_ends(
    module: str, *, only_outermost: bool = False, takes_last: bool = False
) -> Iterator[str]:
    """List the ends of a path that begin at a numbered layer; for experts, that of all first.

    Of a path without a number it is the last name, with `takes_last`.
    """
    parts = module.split(".")
    places = [position for position, part in enumerate(parts) if position and part.isdecimal()]
    if takes_last and not places:
        yield parts[-1]
    for position in places[: 1 if only_outermost else None]:
        end = ".".join(parts[position - 1 :])
        found = split_expert(end)
        if found is not None:
            yield found[0]
        yield end
