"""Parse the names of KV scales, in every tool's spelling, and find their layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.errors import cut_list, refusal
from fp8calib.formats.dialect import Spelling
from fp8calib.model.geometry import KV_ROLES, Role

if TYPE_CHECKING:
    from fp8calib.model.geometry import Attention, ModelGeometry

RANK_FILE_MARK = "kv_cache_scaling_factor"
"""Part of the names of scales in TensorRT-LLM and AMMO rank files."""


@dataclass(frozen=True, slots=True)
class ScaleName:
    """A parsed tensor name; `path` is the attention module's path, as the file spells it."""

    full: str
    path: str
    spelling: Spelling
    roles: tuple[Role, ...]


_SUFFIXES: Mapping[str, tuple[Spelling, tuple[Role, ...]]] = {
    f".{suffix}": (spelling, roles)
    for role in (Role.K, Role.V, Role.Q)
    for suffix, spelling, roles in (
        (f"{role}_proj.{role}_scale", Spelling.PROJECTION, (role,)),
        (f"qkv_proj.{role}_scale", Spelling.PROJECTION, (role,)),
        (f"qkqkv_proj.{role}_scale", Spelling.PROJECTION, (role,)),
        ("q.scale" if role is Role.Q else f"{role}_cache.scale", Spelling.CACHE, (role,)),
        (f"{role}_proj.output_scale", Spelling.OUTPUT, (role,)),
        (f"{role}_zero_point", Spelling.ZERO_POINT, (role,)),
        (f"{role}_scale", Spelling.ATTENTION, (role,)),
        ("kv_scale", Spelling.SINGLE, KV_ROLES),
    )
}
PROBABILITY_SCALES = (".prob_scale", ".prob_output_scale")
"""How the names of scales of attention probabilities end (Quark)."""
_LAYER = re.compile(r"(?:(?P<root>.*)\.)?(?P<index>[0-9]+)\.(?P<rest>.+?)", re.DOTALL)
_MOST_DIGITS = 10
_WRAPPERS = frozenset({"model", "language_model", "text_model", "base_model", "transformer", "llm"})
"""Path components that differ when a model is wrapped in another one."""


def parse_name(name: str) -> ScaleName | None:
    """Parse the name of a KV scale or zero point; None for any other tensor."""
    for suffix, (spelling, roles) in _SUFFIXES.items():
        if name.endswith(suffix):
            return ScaleName(name, name.removesuffix(suffix), spelling, roles)
    return None


def find_spelling(name: str) -> Spelling | None:
    """Find the spelling of a scale of K or V; None for any other tensor."""
    parsed = parse_name(name)
    if parsed is None or parsed.spelling is Spelling.ZERO_POINT or parsed.roles == (Role.Q,):
        return None
    return parsed.spelling


def find_owners(
    path: Path, geometry: ModelGeometry, names: Collection[ScaleName]
) -> dict[ScaleName, Attention]:
    """Find the attention module of every name, even if the model is wrapped in another.

    The path of the layers is compared as the model and its checkpoint spell it, then without
    wrappers, then as a longer or shorter spelling. Names elsewhere (vision towers, draft layers)
    are left out; a name under that path that belongs to no layer is of another model.
    """
    places = {
        _split(module): attention
        for _, attention in geometry.attentions()
        for module in (attention.module, attention.checkpoint_module)
    }
    modules = {(index, rest): attention for (_, index, rest), attention in places.items()}
    roots = _choose_roots(path, geometry, frozenset(root for root, _, _ in places), names)
    found: dict[ScaleName, Attention] = {}
    extra: list[str] = []
    for name in names:
        root, index, rest = _split(name.path)
        # vLLM's attention layer is inside the module: `self_attn.attn` is `self_attn`.
        attention = modules.get((index, rest)) or modules.get((index, rest.removesuffix(".attn")))
        if root not in roots or is_of_draft_layer(geometry, name.path):
            continue
        if attention is None:
            extra.append(name.full)
        else:
            found[name] = attention
    if extra:
        fault = f"{cut_list(extra)}: the model has no such attention"
        layers = f"it has {len(geometry.layers)} layers"
        raise refusal(path, fault, hint=f"{layers}; the scales may be of another model")
    return found


def is_of_draft_layer(geometry: ModelGeometry, path: str) -> bool:
    """Tell whether a module is in one of the draft layers after the model's own."""
    index = _split(path.partition(".experts.")[0])[1]  # an expert's number is not a layer's
    first = len(geometry.layers)
    drafts = range(first, first + geometry.num_draft_layers)
    return 0 < len(index) < _MOST_DIGITS and int(index) in drafts


def _split(path: str) -> tuple[str, str, str]:
    """Split a path into the path of the layers, the layer's index, and the path in the layer."""
    match = _LAYER.fullmatch(path)
    return (match["root"] or "", match["index"], match["rest"]) if match else ("", "", path)


def _choose_roots(
    path: Path, geometry: ModelGeometry, known: frozenset[str], names: Collection[ScaleName]
) -> frozenset[str]:
    """Choose the paths of layers that fit best: equal, equal without wrappers, one in the other."""
    roots = dict.fromkeys(_split(name.path)[0] for name in names)
    for fits in (str.__eq__, _is_wrapped_alike, _is_inside):
        fitting = [root for root in roots if any(fits(root, other) for other in known)]
        if fitting:
            break
    else:
        example = next((name.full for name in names), "")
        expected = next((a.checkpoint_module for _, a in geometry.attentions()), "no attention")
        fault = f"{example} and the other scales are of another model"
        raise refusal(path, fault, hint=f"this model's attention is {expected}")
    if len(fitting) > 1 and not known.issuperset(fitting):
        fault = f"the scales are under {cut_list(fitting)}, and each could be the model's layers"
        raise refusal(path, fault, hint=f"the model's own are under {cut_list(sorted(known))}")
    return frozenset(fitting)


def _is_wrapped_alike(one: str, other: str) -> bool:
    first, second = (
        [part for part in root.split(".") if part not in _WRAPPERS] for root in (one, other)
    )
    return first == second


def _is_inside(one: str, other: str) -> bool:
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
