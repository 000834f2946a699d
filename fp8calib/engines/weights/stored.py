"""The linears of a checkpoint as its tensors and the model's geometry show them, in groups."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.facts.classes import (
    CreatedLinear,
    fill_pattern,
    list_numbers,
    make_pattern,
)
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.weights.expected import PLAIN_DTYPES, WEIGHT, Shape
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.formats.fp8.weights import is_linear_scale
from fp8calib.formats.kv.parse_names import is_of_draft_layer
from fp8calib.model.module_paths import FUSED_PATHS, name_fused_group, split_expert
from fp8calib.model.shapes import Linear, ModelGeometry
from fp8calib.numerics.encode import decode_scale
from fp8calib.numerics.formats import SMALLEST_EXPONENT, SMALLEST_SCALE

HEADS = ("lm_head", "embed_out")
"""The last part of the path of an output layer."""
_TRANSPOSED_TYPES = ("gpt2",)
"""Model types whose checkpoints store linears as [in, out]; engines transpose them."""
_STACKED = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "input_linear.weight": ("gate_proj", "up_proj"),
    "output_linear.weight": ("down_proj",),
}
"""The names of a layer's experts in one tensor, and the projections in it; the last two are
granitemoe's."""
_STACK = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _STACKED))})")
FindCreated = Callable[[str], Sequence[CreatedLinear]]
"""Gives what an engine's class may make of a linear, by its path."""
LAYER = re.compile(r"(.*?\.)(\d+)\.")
"""The beginning of a path, up to the number of its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleValues:
    """What the scales of linears hold, by their names."""

    bad: Mapping[str, str]
    """What is not a finite number above zero, or subnormal, in words."""
    numbers: Mapping[str, float]
    """Those that are one number."""
    largest: Mapping[str, float]
    """The largest number of each that is not bad."""


def read_scale_values(
    folder: ScaleFolder, tensors: Mapping[str, tuple[str, TensorEntry]]
) -> ScaleValues:
    """Read the scales of linears; numbers smaller than a byte are not read."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, (file, entry) in tensors.items():
        if is_linear_scale(name) and entry.dtype not in PACKED_BITS and entry.size_bytes:
            by_file[file].append(name)
    bad: dict[str, str] = {}
    numbers: dict[str, float] = {}
    largest: dict[str, float] = {}
    for file, names in by_file.items():
        with TensorFile(folder.path / file) as opened:
            for name in names:
                scale = opened.read(name)
                values = decode_scale(scale)
                has_exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
                smallest = SMALLEST_EXPONENT if has_exponents else SMALLEST_SCALE
                if what := _describe_bad(values, smallest):
                    bad[name] = what
                else:
                    largest[name] = values.max().item()
                if values.numel() == 1:
                    numbers[name] = values.item()
    return ScaleValues(bad=bad, numbers=numbers, largest=largest)


def _describe_bad(values: torch.Tensor, smallest: float) -> str:
    """Say what a scale holds that no scale may hold; empty where it has none of these.

    Kernels on GPUs may take a subnormal number for 0, and its reciprocal is infinite.
    """
    if bool(values.isnan().any()):
        return "NaN"
    if bool(values.isinf().any()):
        return "infinity"
    if bool((values < 0).any()):
        return "a negative number"
    if bool((values == 0).any()):
        return "0"
    return f"a number under {smallest:.4g}" if bool((values < smallest).any()) else ""


def list_groups(
    tensors: Mapping[str, TensorEntry], geometry: ModelGeometry, find: FindCreated | None = None
) -> Iterator[LinearGroup]:
    """List the linears that an engine creates for a checkpoint, in groups that it joins.

    These are the linears of the model, and whatever else is stored as a matrix or has the scale of
    one.

    Args:
        tensors: of the checkpoint.
        geometry: the model's.
        find: what the engine's class creates of a path; None for an engine without a map of
            classes, which joins what most engines join.
    """
    beside: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in tensors.items():
        module, _, suffix = name.rpartition(".")
        beside[module][suffix] = entry
    # A folder of config and scales alone is a model's whose weights are elsewhere.
    matrices = geometry.matrices if any(map(_is_linear, beside.values())) else {}
    linears = {name.removesuffix(f".{WEIGHT}"): each for name, each in matrices.items()}
    is_listed = geometry.model_type not in _TRANSPOSED_TYPES
    known = _list_known(geometry, matrices, beside) if is_listed else {}
    stored = (module for module, held in beside.items() if _is_linear(held))
    experts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    plain: list[str] = []
    for module in dict.fromkeys((*known, *linears, *stored)):
        if (expert := split_expert(module)) is not None:
            experts[expert[0]].append((expert[1], expert[2]))
        else:
            plain.append(module)
    made = {
        module: _make_linear(module, known.get(module), linears.get(module), beside.get(module, {}))
        for module in plain
    }
    if find is None:
        yield from _join_by_name(made, known)
    else:
        yield from _join_by_class(made, find, geometry)
    counts = _place_experts(experts, known, geometry)
    for group in (*_group_experts(experts, counts, beside), *_group_stacks(tensors)):
        yield group if find is None else _find_experts(group, find)


def _join_by_class(
    linears: Mapping[str, StoredLinear], find: FindCreated, geometry: ModelGeometry
) -> Iterator[LinearGroup]:
    """Join linears as the engine's class does."""
    leftovers = set(geometry.leftovers)
    joined: dict[tuple[tuple[str, ...], CreatedLinear], dict[str, StoredLinear]] = defaultdict(dict)
    for module, linear in linears.items():
        created = _choose(module, linears, find(module))
        if created is None:
            # Drafters have classes of their own; other leftovers are judged with the parameters.
            is_left = f"{module}.{WEIGHT}" in leftovers or is_of_draft_layer(geometry, module)
            state = "stored" if is_left else ""
            yield LinearGroup(path=module, kind=_find_kind(module), members=(linear,), state=state)
        else:
            joined[list_numbers(module), created][make_pattern(module)] = linear
    for (_, created), members in joined.items():
        ordered = tuple(members[part] for part in dict.fromkeys(created.parts) if part in members)
        first = ordered[0].module
        own = created.path.rpartition(".")[2]
        parent = first.rpartition(".")[0]
        yield LinearGroup(
            path=first if len(created.parts) == 1 else f"{parent}.{own}".lstrip("."),
            kind=GroupKind.HEAD if created.kind == "head" else GroupKind.LINEAR,
            members=ordered,
            state=created.state,
            listed=fill_pattern(created.path, first),
        )


def _choose(
    module: str, linears: Collection[str], created: Sequence[CreatedLinear]
) -> CreatedLinear | None:
    """Choose what a linear becomes: what has all its parts in the checkpoint, or else the first."""

    def is_whole(each: CreatedLinear) -> bool:
        return all(fill_pattern(part, module) in linears for part in each.parts)

    ordered = sorted(created, key=lambda each: len(each.parts), reverse=True)
    return next(filter(is_whole, ordered), ordered[-1] if ordered else None)


def _find_experts(group: LinearGroup, find: FindCreated) -> LinearGroup:
    """Find how the engine's class creates the experts of a layer."""
    paths = [each.module for each in group.members[:1]]
    paths += [f"{group.path}.{name}" for name in ("gate_up_proj", "down_proj")]
    paths += [f"{group.path.rpartition('.')[0]}.input_linear"]
    created = next((each for path in paths for each in find(path)), None)
    if created is None:
        return replace(group, state="")
    return replace(group, state=created.state, listed=fill_pattern(created.path, group.path))


def _find_kind(path: str) -> GroupKind:
    return GroupKind.HEAD if path.rpartition(".")[2] in HEADS else GroupKind.LINEAR


def _is_linear(tensors: Mapping[str, TensorEntry]) -> bool:
    is_matrix = WEIGHT in tensors and len(tensors[WEIGHT].shape) == 2
    return is_matrix or any(is_linear_scale(suffix) for suffix in tensors)


def _list_known(
    geometry: ModelGeometry,
    matrices: Collection[str],
    beside: Mapping[str, Mapping[str, TensorEntry]],
) -> dict[str, Linear]:
    """List the linears of decoder layers that the checkpoint should store, by path."""
    known = {}
    for _, linear in geometry.linears():
        name = linear.checkpoint_name or ""
        module = name.removesuffix(f".{WEIGHT}")
        if linear.num_experts or linear.section == "other" or module == name:
            continue
        if module in beside or name in matrices:
            known[module] = linear
    return known


def _join_by_name(
    linears: Mapping[str, StoredLinear], known: Collection[str]
) -> Iterator[LinearGroup]:
    joined: dict[tuple[str, str], dict[str, StoredLinear]] = defaultdict(dict)
    for module, linear in linears.items():
        parent, _, projection = module.rpartition(".")
        joined[parent, name_fused_group(module).rpartition(".")[2]][projection] = linear
    for (parent, fused), members in joined.items():
        parts = fused.split("+")
        if len(members) == len(parts) > 1:
            path = f"{parent}.{FUSED_PATHS[fused]}" if parent else FUSED_PATHS[fused]
            yield _make_group(path, tuple(members[part] for part in parts), known)
        else:
            for each in members.values():
                yield _make_group(each.module, (each,), known)


def _make_group(
    path: str, members: tuple[StoredLinear, ...], known: Collection[str]
) -> LinearGroup:
    kind = _find_kind(path)
    is_known = kind is GroupKind.HEAD or all(each.module in known for each in members)
    state = "config" if is_known else "stored"
    return LinearGroup(path=path, kind=kind, members=members, state=state)


def _make_linear(
    module: str,
    linear: Linear | None,
    shape: tuple[int, int] | None,
    tensors: Mapping[str, TensorEntry],
) -> StoredLinear:
    stored = tensors[WEIGHT].shape if WEIGHT in tensors else ()
    if linear is not None:
        shape = linear.out_features, linear.in_features
    return StoredLinear(
        module=module,
        shape=shape or _read_matrix(stored),
        tensors=tensors,
    )


def count_experts(geometry: ModelGeometry) -> dict[int, int]:
    """Count the experts of each layer that has some."""
    return {
        layer.index: number
        for layer in geometry.layers
        if (number := max((linear.num_experts for linear in layer.linears), default=0))
    }


def _place_experts(
    paths: Collection[str], known: Mapping[str, Linear], geometry: ModelGeometry
) -> dict[str, int]:
    """Count the experts of each decoder layer that has some, by the path that others have.

    Args:
        paths: of the experts that are stored, by layer.
        known: the other linears of decoder layers, by path.
        geometry: the model's; its paths may be other ones than the checkpoint's.
    """
    first = LAYER.match(next(iter(known), ""))
    if first is None:
        return {}
    counts = count_experts(geometry)
    found = (LAYER.match(path) for path in paths)
    ends = {each.string[each.end() :] for each in found if each and each[1] == first[1]}
    return {f"{first[1]}{index}.{end}": number for end in ends for index, number in counts.items()}


def _group_experts(
    experts: Mapping[str, Collection[tuple[int, str]]],
    counts: Mapping[str, int],
    beside: Mapping[str, Mapping[str, TensorEntry]],
) -> Iterator[LinearGroup]:
    """Group the experts of each layer, each with all projections that any expert has.

    Args:
        experts: the number and the projection of each expert's linear, by the path of the layer's.
        counts: how many experts the model has, by path.
        beside: all tensors of the checkpoint.
    """
    shapes: dict[str, Counter[Shape]] = defaultdict(Counter)
    own: dict[tuple[str, str], Counter[Shape]] = defaultdict(Counter)
    for path, found in experts.items():
        for number, projection in found:
            weight = beside[f"{path}.{number}.{projection}"].get(WEIGHT)
            found_shapes = [] if weight is None else [weight.shape]
            shapes[projection].update(found_shapes)
            own[path, projection].update(found_shapes)
    for path in dict.fromkeys((*experts, *counts)):
        stored = dict.fromkeys(number for number, _ in experts.get(path, ()))
        numbers = range(counts[path]) if path in counts else stored
        members = (
            StoredLinear(
                module=f"{path}.{expert}.{projection}",
                shape=_read_matrix(_find_commonest(own[path, projection] or every)),
                tensors=beside.get(f"{path}.{expert}.{projection}", {}),
            )
            for expert in numbers
            for projection, every in shapes.items()
        )
        yield LinearGroup(path=path, kind=GroupKind.EXPERTS, members=tuple(members), state="config")


def _group_stacks(tensors: Mapping[str, TensorEntry]) -> Iterator[LinearGroup]:
    """Group the experts of layers that store them in one tensor of 16 bits, as linears of one.

    Stacks in FP8 are not judged.
    """
    found: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in tensors.items():
        if (
            entry.dtype in PLAIN_DTYPES
            and len(entry.shape) == 3
            and (stack := _STACK.fullmatch(name))
        ):
            for projection in _STACKED[stack[2]]:
                found[f"{stack[1]}.experts"][projection] = entry
    for path, held in found.items():
        members = (
            StoredLinear(
                module=f"{path}.0.{projection}", shape=_read_matrix(()), tensors={WEIGHT: entry}
            )
            for projection, entry in held.items()
        )
        yield LinearGroup(path=path, kind=GroupKind.EXPERTS, members=tuple(members), state="config")


def _find_commonest(shapes: Counter[Shape]) -> Shape:
    return next((shape for shape, _ in shapes.most_common(1)), ())


def _read_matrix(shape: Shape) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
