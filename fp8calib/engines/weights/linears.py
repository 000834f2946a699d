"""The linears of a checkpoint, in the groups that an engine's class joins."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.facts.classes import (
    ClassMap,
    CreatedLinear,
    fill_pattern,
    list_numbers,
    make_pattern,
)
from fp8calib.engines.weights.layers import (
    HEADS,
    LAYER,
    PLAIN_DTYPES,
    WEIGHT,
    Shape,
    count_experts,
    find_decoder,
)
from fp8calib.formats.fp8.weights import is_linear_scale
from fp8calib.model.drafters import is_drafted
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import split_expert

UNKNOWN = {
    "": "is a linear, and it is not known how the engine's class creates it",
    "maybe": "is a linear that the engine's class creates by the config in some cases",
    "refused": "has no place under this name in the engine's class",
}
"""Why only the engine's own loader can judge a linear, by how the class creates it."""
_STACKED = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "input_linear.weight": ("gate_proj", "up_proj"),
    "output_linear.weight": ("down_proj",),
    "experts.fc1.weight": ("gate_proj", "up_proj"),
    "experts.fc2.weight": ("down_proj",),
}
"""The names of a layer's experts in one tensor, and the projections in it; the last four are
granitemoe's and aria's."""
_STACK = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _STACKED))})")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Other names of an expert's projections."""
_FindCreated = Callable[[str], Sequence[CreatedLinear]]
"""Gives what an engine's class may make of a linear, by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A linear of the model, with the tensors that the checkpoint stores for it."""

    module: str
    """Its path in the checkpoint."""
    shape: Shape
    """[out, in], by the model's config where the model is known; zeros if that is not known."""
    tensors: Mapping[str, TensorEntry]
    """By the last part of their names."""

    @property
    def projection(self) -> str:
        """The last part of its path."""
        return self.module.rpartition(".")[2]

    @property
    def is_plain(self) -> bool:
        """Whether its weight is stored, and not quantized."""
        return WEIGHT in self.tensors and self.tensors[WEIGHT].dtype in PLAIN_DTYPES

    @property
    def has_codes(self) -> bool:
        """Whether its weight is stored, and quantized."""
        return WEIGHT in self.tensors and not self.is_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGroup:
    """Linears that an engine joins: a linear, fused projections, or the experts of a layer."""

    path: str
    """The engine's module, by the checkpoint's path: `model.layers.0.self_attn.qkv_proj`."""
    kind: str
    """`linear`, `experts` (of a layer) or `head` (the output layer)."""
    members: tuple[StoredLinear, ...]
    state: str = ""
    """How the engine's class creates it, as `CreatedLinear.state` says; empty if that is not
    known, and `stored` where no map of classes is asked."""
    listed: str
    """What the lists of a config call it."""


def list_groups(
    tensors: Mapping[str, TensorEntry], geometry: ModelGeometry, classes: ClassMap
) -> Iterator[LinearGroup]:
    """List the linears that an engine creates for a checkpoint, in groups that it joins.

    These are the linears of the model, and whatever else is stored as a matrix or has the scale of
    one. `classes` is what the engine's class creates.
    """
    beside: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == WEIGHT or name not in geometry.parameters:  # such as `global_scale` of routers
            beside[module][suffix] = entry
    stored = [
        module
        for module, held in beside.items()
        if (WEIGHT in held and len(held[WEIGHT].shape) == 2) or any(map(is_linear_scale, held))
    ]
    # A folder of config and scales alone is a model's whose weights are elsewhere.
    matrices = geometry.matrices if stored else {}
    shapes = {name.removesuffix(f".{WEIGHT}"): shape for name, shape in matrices.items()}
    linears: dict[str, StoredLinear] = {}
    experts: list[tuple[str, int, str]] = []
    for module in dict.fromkeys((*shapes, *stored)):
        held = beside.get(module, {})
        if (expert := split_expert(module)) is not None:
            experts.append(expert)
        else:
            shape = held[WEIGHT].shape if WEIGHT in held else ()
            shape = shapes.get(module) or (shape if len(shape) == 2 else (0, 0))
            linears[module] = StoredLinear(module=module, shape=shape, tensors=held)
    decoder = find_decoder(geometry)
    find = partial(_find_created, classes, decoder)
    yield from _join(linears, find, geometry)
    grouped = dict(_group_experts(experts, beside, geometry)) if experts else {}
    # those of layers that store them in one tensor of 16 bits, as linears of one; stacks in FP8 are
    # not judged
    stacks: dict[str, list[StoredLinear]] = defaultdict(list)
    for name, entry in tensors.items():
        is_plain = entry.dtype in PLAIN_DTYPES and len(entry.shape) == 3
        if is_plain and (stack := _STACK.fullmatch(name)):
            path = f"{stack[1]}.experts"
            stacks[path] += (
                StoredLinear(module=f"{path}.0.{each}", shape=(0, 0), tensors={WEIGHT: entry})
                for each in _STACKED[stack[2]]
            )
    for path, members in (*grouped.items(), *stacks.items()):
        joined = [f"{path}.gate_up_proj", f"{path}.down_proj"]
        names = [*joined, f"{path.rpartition('.')[0]}.input_linear"]
        paths = [*(each.module for each in members[:1]), *names]
        created = next((each for name in paths for each in find(name)), None)
        yield LinearGroup(
            path=path,
            kind="experts",
            members=tuple(members),
            state="" if created is None else created.state,
            listed=path if created is None else fill_pattern(created.path, path),
        )


def _find_created(classes: ClassMap, decoder: str | None, path: str) -> Sequence[CreatedLinear]:
    """Find what a linear may become; in a drafter, what one of the decoder's layers does."""
    pattern = make_pattern(path)
    if pattern in classes or not is_drafted(path, 0):
        return classes.get(pattern, ())
    layer = f"{decoder}*."
    for match in re.finditer(r"\*\.", pattern):
        own, rest = pattern[: match.end()], pattern[match.end() :]
        for created in classes.get(f"{layer}{rest}", ()):
            names = [created.path, *created.parts]
            if all(name.startswith(layer) for name in names):
                path, *parts = (f"{own}{name.removeprefix(layer)}" for name in names)
                return (replace(created, path=path, parts=tuple(parts)),)
    return ()


def _join(
    linears: Mapping[str, StoredLinear], find: _FindCreated, geometry: ModelGeometry
) -> Iterator[LinearGroup]:
    """Join linears as the engine's class does."""
    leftovers = set(geometry.leftovers)
    num_layers, decoder = len(geometry.layers), find_decoder(geometry)
    joined: dict[tuple[tuple[str, ...], CreatedLinear], dict[str, StoredLinear]] = defaultdict(dict)
    for module, linear in linears.items():
        # what has all its parts in the checkpoint, or else the first
        ordered = sorted(find(module), key=lambda each: len(each.parts), reverse=True)
        whole = (
            each
            for each in ordered
            if all(fill_pattern(part, module) in linears for part in each.parts)
        )
        created = next(whole, ordered[-1] if ordered else None)
        if created is not None:
            joined[list_numbers(module), created][make_pattern(module)] = linear
            continue
        # The linear beside the layers of a drafter is plain where these follow the decoder's
        # (`eh_proj`: vLLM 0.32.0 deepseek_mtp.py, glm4_moe_mtp.py). Under `mtp` some classes
        # create it by the config (`fc`: qwen3_next_mtp.py), others plain (mimo_mtp.py).
        # Other leftovers are judged with the parameters.
        is_left = f"{module}.{WEIGHT}" in leftovers or is_drafted(module, num_layers, decoder)
        yield LinearGroup(
            path=module,
            kind="head" if linear.projection in HEADS else "linear",
            members=(linear,),
            state="stored" if is_left and not is_drafted(module, 0) else "",
            listed=module,
        )
    for (_, created), members in joined.items():
        joint = tuple(members[part] for part in dict.fromkeys(created.parts) if part in members)
        first = joint[0].module
        own = f"{first.rpartition('.')[0]}.{created.path.rpartition('.')[2]}".lstrip(".")
        listed = fill_pattern(created.path, first)
        if is_drafted(first, 0) and created.path.startswith(f"{decoder}*."):
            # numbered after the decoder's layers (vLLM 0.32.0 ernie_mtp.py)
            (number, *_) = list_numbers(first)
            shifted = f"{decoder}{num_layers + int(number)}."
            listed = f"{shifted}{listed.removeprefix(f'{decoder}{number}.')}"
        yield LinearGroup(
            path=first if len(created.parts) == 1 else own,
            kind="head" if created.kind == "head" else "linear",
            members=joint,
            state=created.state,
            listed=listed,
        )


def _group_experts(
    experts: Sequence[tuple[str, int, str]],
    beside: Mapping[str, Mapping[str, TensorEntry]],
    geometry: ModelGeometry,
) -> Iterator[tuple[str, Sequence[StoredLinear]]]:
    """Group the experts of each layer by path, each with all projections that any expert has.

    `experts` are the path of the layer's experts, the number and the projection of each linear;
    `beside` the tensors of linears. Where some of the decoder are stored, all of the model count.
    """
    numbers: dict[str, dict[int, None]] = defaultdict(dict)
    shapes: dict[tuple[str, str], Counter[Shape]] = defaultdict(Counter)
    for path, number, projection in experts:
        numbers[path][number] = None
        weight = beside.get(f"{path}.{number}.{projection}", {}).get(WEIGHT)
        if weight is not None:
            shapes[path, projection][weight.shape] += 1
            shapes["", projection][weight.shape] += 1
    decoder = find_decoder(geometry)
    matches = (LAYER.match(path) for path in numbers)
    ends = {each.string[each.end() :]: None for each in matches if each and each[1] == decoder}
    counts = {
        f"{decoder}{index}.{end}": number
        for end in ends
        for index, number in count_experts(geometry).items()
    }
    packed: dict[str, Shape] = {}  # of weights that show no shape
    for _, linear in geometry.linears():
        if linear.num_experts:
            name = linear.module.rpartition(".")[2]
            packed[name] = packed[_MIXTRAL.get(name, name)] = (
                linear.out_features,
                linear.in_features,
            )
    projections = dict.fromkeys(projection for _, _, projection in experts)
    for path in dict.fromkeys((*numbers, *counts)):
        members = []
        for expert in range(counts[path]) if path in counts else numbers[path]:
            for projection in projections:
                module = f"{path}.{expert}.{projection}"
                # the commonest of this layer, or else of all layers
                common = (shapes[path, projection] or shapes["", projection]).most_common(1)
                shape = common[0][0] if common else packed.get(projection, ())
                member = StoredLinear(
                    module=module,
                    shape=shape if len(shape) == 2 else (0, 0),
                    tensors=beside.get(module, {}),
                )
                members.append(member)
        yield path, members
