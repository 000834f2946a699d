"""The linears of a checkpoint as its tensors and the model's geometry show them, in groups."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.facts.classes import (
    ClassMap,
    CreatedLinear,
    fill_pattern,
    list_numbers,
    make_pattern,
)
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.weights.expected import PLAIN_DTYPES, WEIGHT, Shape
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.formats.fp8.weights import is_linear_scale
from fp8calib.model.drafters import is_drafted
from fp8calib.model.module_paths import split_expert
from fp8calib.model.shapes import ModelGeometry
from fp8calib.numerics.encode import decode_scale
from fp8calib.numerics.formats import SMALLEST_EXPONENT, SMALLEST_SCALE

HEADS = ("lm_head", "embed_out")
"""The last part of the path of an output layer."""
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
            opened.fetch(names)
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
    tensors: Mapping[str, TensorEntry], geometry: ModelGeometry, classes: ClassMap
) -> Iterator[LinearGroup]:
    """List the linears that an engine creates for a checkpoint, in groups that it joins.

    These are the linears of the model, and whatever else is stored as a matrix or has the scale of
    one.

    Args:
        tensors: of the checkpoint.
        geometry: the model's.
        classes: what the engine's class creates.
    """
    beside: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in tensors.items():
        module, _, suffix = name.rpartition(".")
        beside[module][suffix] = entry
    stored = [module for module, held in beside.items() if _is_linear(held)]
    # A folder of config and scales alone is a model's whose weights are elsewhere.
    matrices = geometry.matrices if stored else {}
    shapes = {name.removesuffix(f".{WEIGHT}"): shape for name, shape in matrices.items()}
    linears: dict[str, StoredLinear] = {}
    experts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for module in dict.fromkeys((*shapes, *stored)):
        held = beside.get(module, {})
        if (expert := split_expert(module)) is not None:
            experts[expert[0]].append((expert[1], expert[2]))
        else:
            shape = shapes.get(module) or _read_matrix(held[WEIGHT].shape if WEIGHT in held else ())
            linears[module] = StoredLinear(module=module, shape=shape, tensors=held)
    find = partial(_find_created, classes, find_decoder(geometry))
    yield from _join(linears, find, geometry)
    counts = _place_experts(experts, geometry) if stored else {}
    yield from _group_experts(experts, counts, beside, find)
    yield from _group_stacks(tensors, find)


def _find_created(classes: ClassMap, decoder: str | None, path: str) -> Sequence[CreatedLinear]:
    """Find what a linear may become; in a drafter, what one of the decoder's layers does."""
    pattern = make_pattern(path)
    if pattern in classes or not is_drafted(path, 0):
        return classes.get(pattern, ())
    layer = f"{decoder}*."
    for found in re.finditer(r"\*\.", pattern):
        own, rest = pattern[: found.end()], pattern[found.end() :]
        for each in classes.get(f"{layer}{rest}", ()):
            if all(name.startswith(layer) for name in (each.path, *each.parts)):
                parts = tuple(f"{own}{part.removeprefix(layer)}" for part in each.parts)
                path = f"{own}{each.path.removeprefix(layer)}"
                return (replace(each, path=path, parts=parts),)
    return ()


def _is_linear(tensors: Mapping[str, TensorEntry]) -> bool:
    is_matrix = WEIGHT in tensors and len(tensors[WEIGHT].shape) == 2
    return is_matrix or any(is_linear_scale(suffix) for suffix in tensors)


def _join(
    linears: Mapping[str, StoredLinear], find: FindCreated, geometry: ModelGeometry
) -> Iterator[LinearGroup]:
    """Join linears as the engine's class does."""
    leftovers = set(geometry.leftovers)
    num_layers, decoder = len(geometry.layers), find_decoder(geometry)
    joined: dict[tuple[tuple[str, ...], CreatedLinear], dict[str, StoredLinear]] = defaultdict(dict)
    for module, linear in linears.items():
        created = _choose(module, linears, find(module))
        if created is None:
            is_head = module.rpartition(".")[2] in HEADS
            # The linear beside the layers of a drafter is plain where these follow the decoder's
            # (`eh_proj`: vLLM 0.32.0 deepseek_mtp.py, glm4_moe_mtp.py). Under `mtp` some classes
            # create it by the config (`fc`: qwen3_next_mtp.py), others plain (mimo_mtp.py).
            # Other leftovers are judged with the parameters.
            is_left = f"{module}.{WEIGHT}" in leftovers or is_drafted(module, num_layers, decoder)
            is_left = is_left and not is_drafted(module, 0)
            yield LinearGroup(
                path=module,
                kind=GroupKind.HEAD if is_head else GroupKind.LINEAR,
                members=(linear,),
                state="stored" if is_left else "",
            )
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


def count_experts(geometry: ModelGeometry) -> dict[int, int]:
    """Count the experts of each layer that has some."""
    return {
        layer.index: number
        for layer in geometry.layers
        if (number := max((linear.num_experts for linear in layer.linears), default=0))
    }


def find_decoder(geometry: ModelGeometry) -> str | None:
    """Find what the names of tensors in decoder layers begin with, before the layer's number."""
    modules = (attention.checkpoint_module for _, attention in geometry.attentions())
    found = LAYER.match(next(modules, ""))
    return None if found is None else found[1]


def _place_experts(paths: Collection[str], geometry: ModelGeometry) -> dict[str, int]:
    """Count the experts of each decoder layer that has some, by the path that others have."""
    decoder = find_decoder(geometry)
    found = (LAYER.match(path) for path in paths)
    ends = {each.string[each.end() :] for each in found if each and each[1] == decoder}
    counts = count_experts(geometry)
    return {f"{decoder}{index}.{end}": number for end in ends for index, number in counts.items()}


def _group_experts(
    experts: Mapping[str, Collection[tuple[int, str]]],
    counts: Mapping[str, int],
    beside: Mapping[str, Mapping[str, TensorEntry]],
    find: FindCreated,
) -> Iterator[LinearGroup]:
    """Group the experts of each layer, each with all projections that any expert has.

    Args:
        experts: the number and the projection of each expert's linear, by the path of the layer's.
        counts: how many experts the model has, by path.
        beside: all tensors of the checkpoint.
        find: gives what the engine's class creates.
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
        members = []
        for expert in range(counts[path]) if path in counts else stored:
            for projection, every in shapes.items():
                module = f"{path}.{expert}.{projection}"
                commonest = (own[path, projection] or every).most_common(1)
                shape = _read_matrix(commonest[0][0] if commonest else ())
                held = beside.get(module, {})
                members.append(StoredLinear(module=module, shape=shape, tensors=held))
        yield _make_experts(path, members, find)


def _group_stacks(tensors: Mapping[str, TensorEntry], find: FindCreated) -> Iterator[LinearGroup]:
    """Group the experts of layers that store them in one tensor of 16 bits, as linears of one.

    Stacks in FP8 are not judged.
    """
    found: dict[str, list[StoredLinear]] = defaultdict(list)
    for name, entry in tensors.items():
        is_plain = entry.dtype in PLAIN_DTYPES and len(entry.shape) == 3
        if is_plain and (stack := _STACK.fullmatch(name)):
            path = f"{stack[1]}.experts"
            found[path] += (
                StoredLinear(module=f"{path}.0.{each}", shape=(0, 0), tensors={WEIGHT: entry})
                for each in _STACKED[stack[2]]
            )
    for path, members in found.items():
        yield _make_experts(path, members, find)


def _make_experts(path: str, members: Sequence[StoredLinear], find: FindCreated) -> LinearGroup:
    """Make the group of a layer's experts, and find how the engine's class creates them."""
    names = [f"{path}.gate_up_proj", f"{path}.down_proj", f"{path.rpartition('.')[0]}.input_linear"]
    paths = [*(each.module for each in members[:1]), *names]
    created = next((each for name in paths for each in find(name)), None)
    return LinearGroup(
        path=path,
        kind=GroupKind.EXPERTS,
        members=tuple(members),
        state="" if created is None else created.state,
        listed="" if created is None else fill_pattern(created.path, path),
    )


def _read_matrix(shape: Shape) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
