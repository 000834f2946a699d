"""Match a model with its checkpoint, and list the weights and sites that are not observed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key
from transformers.utils.loading_report import LoadStateDictInfo

from fp8calib.checkpoint.checkpoint import Checkpoint, stored_dtype
from fp8calib.checkpoint.header import INTEGERS
from fp8calib.errors import ModelError, cut_list
from fp8calib.model.geometry import ModelGeometry, Role, Site
from fp8calib.model.module_paths import group_by_pattern, list_paths, match_names
from fp8calib.model.topology import (
    find_geometry,
    find_text_decoder,
    is_experts,
    is_linear,
    is_matrix,
)
from fp8calib.model.weight_source import WeightSource, group_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model, with or without weights, and the source of its weights."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    geometry: ModelGeometry
    unobserved: Mapping[str, str]
    """The modules whose weights no hook can observe, with the reason."""
    weights: WeightSource
    ignored: frozenset[str]
    """The modules that are excluded from calibration."""
    leftovers: tuple[str, ...] = ()
    """The tensors that the model has no parameter for; numbers that differ are `*`. Those below the
    paths of `weights.unused`, and buffers that models now compute, are left out."""
    absent: tuple[str, ...] = ()
    """The parameters that no tensor fills, which are outside the text decoder; as `leftovers`."""


def prepare(
    model: PreTrainedModel, checkpoint: Checkpoint, ignore: Collection[str] = ()
) -> PreparedModel:
    """Find the geometry of `model`, and the modules that the patterns of `ignore` match.

    Raises:
        ModelError: the architecture is not understood, or the checkpoint does not hold the model
            that its config describes.
        RecipeError: a pattern matches no module.
    """
    weights = WeightSource(model, checkpoint)
    absent, leftovers = compare_names(weights)
    check_stored_parameters(weights, absent, leftovers)
    covered = set(weights.unused)
    tensors = (name for names in leftovers.values() for name in names)
    others = (name for name in tensors if covered.isdisjoint(list_paths(name)))
    geometry, unobserved = find_geometry(
        model, weights.single_tensors, checkpoint_dtype=stored_dtype(checkpoint)
    )
    names = [attention.module for _, attention in geometry.attentions()]
    names += dict.fromkeys(linear.runner for _, linear in geometry.linears())
    return PreparedModel(
        model=model,
        checkpoint=checkpoint,
        geometry=geometry,
        unobserved=unobserved,
        weights=weights,
        ignored=frozenset(
            name for pattern in ignore for name in match_names(pattern, names, "observe.ignore")
        ),
        leftovers=tuple(sorted(group_by_pattern(others), key=dot_natural_key)),
        absent=tuple(sorted(group_by_pattern(absent), key=dot_natural_key)),
    )


def list_skipped(
    prepared: PreparedModel,
    observed: Collection[Site],
    unseen: Mapping[Site, str],
    *,
    query: bool,
    inputs: bool,
) -> Iterator[tuple[str, str]]:
    """List the sites and weights that were not observed, each with the reason.

    `unseen` has the reasons of an engine that ran the model. Sites of q and of inputs are listed
    only if they were to be observed.
    """
    geometry, ignored = prepared.geometry, prepared.ignored
    for module, why in prepared.unobserved.items():
        yield f"{module}.weight", why
    for layer, attention in geometry.attentions() if query else ():
        site = attention.site(Role.Q)
        if site not in observed and attention.module not in ignored:
            yield str(site), f"{layer.mixer} does not use transformers' attention interface"
    for _, linear in geometry.linears() if inputs else ():
        site = Site(linear.module, Role.INPUT)
        if site not in observed and linear.runner not in ignored:
            why = "the model does not call this linear: its input is not observed"
            yield str(site), unseen.get(site, why)
    for layer in geometry.layers:
        if layer.attention is None:
            yield layer.module, f"{layer.mixer} caches no K and V"
        elif (producer := layer.attention.producer) is not None:
            why = f"reads the K and V of layer {producer}, and carries its scale"
            yield f"{layer.attention.module}.k/v", why
    for module in sorted(ignored):
        yield module, "excluded by the recipe (observe.ignore)"
    yield from _list_modules(prepared)
    drafters = {path for site in observed for path in list_paths(site.module)}
    for names, why in (
        (
            [name for name in prepared.weights.unused if name not in drafters],
            "in the checkpoint, but not part of the text decoder: neither loaded nor run",
        ),
        (
            prepared.leftovers,
            "in the checkpoint, but not a parameter of the model: neither loaded nor run",
        ),
        (prepared.absent, "not in the checkpoint, and not part of the text decoder: not run"),
    ):
        yield from ((name, why) for name in names)


def _list_modules(prepared: PreparedModel) -> Iterator[tuple[str, str]]:
    """List the modules with weights that are not observed, though no site is there.

    They are outside the text decoder; or in it, and neither a linear of a layer nor an expert:
    linears outside the layers, and matrices that other modules (routers, hyper-connections) apply
    themselves. Experts are observed or in `unobserved`.
    """
    model = prepared.model
    path, decoder = find_text_decoder(model)
    node: nn.Module = model
    above = ""
    for step in path.split(".") if path else ():
        for name, child in node.named_children():
            if name == step or next(child.parameters(), None) is None:
                continue
            if child is model.get_output_embeddings():
                yield name, "calibration needs no logits"
            else:
                yield f"{above}{name}", f"{type(child).__name__}: not part of the text decoder"
        node, above = node.get_submodule(step), f"{above}{step}."
    layers = prepared.geometry.layers[0].module.rpartition(".")[0]
    applied: dict[str, str] = {}
    for name, module in decoder.named_modules(prefix=path):
        kind = type(module).__name__
        if is_linear(module):
            if not name.startswith(f"{layers}."):
                yield name, "a linear outside the decoder layers, which engines do not quantize"
            continue
        is_depthwise = getattr(module, "groups", 1) > 1
        is_other = isinstance(module, nn.Embedding) or is_depthwise or "norm" in kind.lower()
        if is_other or is_experts(module) or name in prepared.unobserved:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter) and not leaf.endswith("bias"):
                applied[f"{name}.{leaf}"] = kind
    for name, paths in group_by_pattern(applied).items():
        yield name, f"{applied[paths[0]]} applies it itself, outside any linear: not observed"


# --- stored parameters ---------------------------------------------------------------------------


class UnfilledModelError(ModelError):
    """The checkpoint and the model's class or config do not fit together."""


def check_stored_parameters(
    weights: WeightSource, absent: Sequence[str], leftovers: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse a checkpoint that does not hold the model that its config describes.

    `absent` and `leftovers` are those of `compare_names`.

    Raises:
        UnfilledModelError: the checkpoint lacks a parameter of the text decoder or the lm_head,
            holds one in another shape, or has values for one that the config switches off.
        ModelError: the checkpoint holds integers for a parameter.
    """
    model, stored = weights.model, weights.source
    runs = is_run(model)
    if missing := [name for name in absent if runs(name)]:
        raise missing_error(stored.folder, missing)
    known = model.state_dict()
    for name, tensor in weights.single_tensors.items():
        found = stored.tensors[tensor].shape
        if name in known and tuple(found) != tuple(known[name].shape):
            raise mismatch_error(stored.folder, name, found, known[name].shape)
    # the tensors of one projection of all experts of a layer
    stacks = (names for parts in weights.parts.values() for names in group_parts(parts).values())
    for names in stacks:
        shape = stored.tensors[names[0]].shape
        for name in names:
            if (found := stored.tensors[name].shape) != shape:
                raise UnfilledModelError(
                    f"{stored.folder}: {name} is {list(found)}, and {names[0]} is {list(shape)}",
                    hint="experts of a layer have one shape; download the weights again",
                )
    floats = [name for name in weights.parameters if known[name].is_floating_point()]
    for tensor in sorted(weights.tensor_names(floats)):
        if (dtype := stored.tensors[tensor].dtype) in INTEGERS:
            raise ModelError(
                f"{tensor} is stored in {dtype}: the model is quantized, although its config does "
                "not state it",
                hint="use the unquantized model that it was made from",
            )
    if unused := list(_find_switched_off(weights, leftovers)):
        raise UnfilledModelError(
            f"{stored.folder}: the checkpoint holds {cut_list(unused, 3)}, but its config gives "
            "the model no such parameter",
            hint="use the config.json that the weights were saved with",
        )


def is_run(model: PreTrainedModel) -> Callable[[str], bool]:
    """Make a function that tells whether a parameter belongs to the text decoder or the lm_head."""
    path, _ = find_text_decoder(model)
    head = model.get_output_embeddings()
    in_head = set() if head is None else set(head.modules())
    return lambda name: (
        name.startswith(f"{path}." if path else "") or _find_module(model, name) in in_head
    )


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Find, for each tied parameter, the other parameters that share its memory."""
    groups: dict[str, list[str]] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(source, [source]).append(target)
    return {name: [n for n in group if n != name] for group in groups.values() for name in group}


def missing_error(folder: Path, missing: Sequence[str]) -> ModelError:
    """Make the error for parameters that a checkpoint lacks."""
    hint = "download the weights again, or use the config.json that they were saved with"
    if [*missing] == ["lm_head.weight"]:
        hint += "; a classifier or a reward model, which has none, is not supported"
    return UnfilledModelError(
        f"{folder}: the checkpoint lacks {cut_list(missing, 3)}; the model would run "
        "with random weights instead",
        hint=hint,
    )


def mismatch_error(
    folder: Path, name: str, found: Sequence[int], expected: Sequence[int]
) -> ModelError:
    """Make the error for a parameter whose shapes in checkpoint and config differ."""
    return UnfilledModelError(
        f"{folder}: {name} is {list(found)} in the checkpoint and {list(expected)} by its config",
        hint="config.json and weights belong to two models; download both again",
    )


def compare_names(weights: WeightSource) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Compare the names of parameters and tensors, as transformers does.

    Returns:
        The parameters that no tensor fills; and the tensors that fill no parameter, by the names
        that they would have in the model. The class tells which names do not count.
    """
    model, unmatched = weights.model, weights.unmatched
    stored = {made for group in weights.parameters.values() for made in group}
    known = model.state_dict(keep_vars=True)
    filled = {id(known[name]) for name in stored if name in known}  # one object with two names
    tied = tied_names(model)
    computed = {name for name, _ in model.named_buffers()}
    info = LoadStateDictInfo(
        missing_keys={
            name
            for name, value in known.items()
            if id(value) not in filled and stored.isdisjoint((name, *tied.get(name, ())))
        },
        unexpected_keys={
            name for name in unmatched if computed.isdisjoint(_spellings(model, name))
        },
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    unexpected = sorted(info.unexpected_keys, key=dot_natural_key)
    return sorted(info.missing_keys), {name: unmatched[name] for name in unexpected}


def _find_switched_off(
    weights: WeightSource, leftovers: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Find tensors for parameters that the config switches off, if their values have an effect.

    Their modules are built without a parameter, such as a bias, that they could have.
    """
    model = weights.model
    runs = is_run(model)
    for name, tensors in leftovers.items():
        leaf = name.rpartition(".")[2]
        owners = (_find_module(model, each) for each in _spellings(model, name) if runs(each))
        parameters = [owner._parameters for owner in owners if owner is not None]
        if any(leaf in own and own[leaf] is None for own in parameters):
            neutral = 1.0 if leaf == "weight" else 0.0
            for stored in tensors:
                if bool((weights.source.read(stored) != neutral).any()):
                    yield stored


def _spellings(model: PreTrainedModel, name: str) -> tuple[str, str]:
    """Give a name, and the name that it has in a checkpoint of the bare decoder."""
    return name, f"{model.base_model_prefix}.{name}"


def _find_module(model: PreTrainedModel, name: str) -> nn.Module | None:
    """Find the module that a parameter of this name would belong to."""
    try:
        owner: nn.Module = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None
    return owner
