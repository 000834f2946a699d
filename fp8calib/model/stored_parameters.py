"""Compare the parameters of a model with the tensors of its checkpoint.

Whole and streamed models are compared in the same way, before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key
from transformers.utils.loading_report import LoadStateDictInfo

from fp8calib.checkpoint.header import INTEGERS
from fp8calib.errors import ModelError, cut_list
from fp8calib.model.module_paths import group_by_pattern, list_paths
from fp8calib.model.topology.find import find_text_decoder
from fp8calib.model.weight_source import WeightSource


class UnfilledModelError(ModelError):
    """The checkpoint and the model's class or config do not fit together."""


def check_stored_parameters(weights: WeightSource) -> None:
    """Refuse a checkpoint that does not hold the model that its config describes.

    Raises:
        UnfilledModelError: the checkpoint lacks a parameter of the text decoder or the lm_head,
            holds one in another shape, or has values for one that the config switches off.
        ModelError: the checkpoint holds integers for a parameter.
    """
    model, stored = weights.model, weights.source
    runs = is_run(model)
    if missing := [name for name in find_absent(weights) if runs(name)]:
        raise missing_error(stored.folder, missing)
    known = model.state_dict()
    for name, tensor in weights.single_tensors.items():
        entry = stored.tensors[tensor]
        found = entry.shape
        if name in known and tuple(found) != tuple(known[name].shape):
            raise mismatch_error(stored.folder, name, found, known[name].shape)
        if name in known and known[name].is_floating_point() and entry.dtype in INTEGERS:
            raise ModelError(
                f"{name} is stored in {entry.dtype}: the model is quantized, although its config "
                "does not state it",
                hint="use the unquantized model that it was made from",
            )
    if unused := list(_find_switched_off(weights)):
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


def list_leftovers(weights: WeightSource) -> list[str]:
    """List the tensors that the model has no parameter for; numbers that differ are `*`.

    Tensors below the paths of `weights.unused`, and buffers that models now compute, are not
    listed.
    """
    covered = set(weights.unused)
    others = (name for name in find_leftovers(weights) if covered.isdisjoint(list_paths(name)))
    return sorted(group_by_pattern(others), key=dot_natural_key)


def find_leftovers(weights: WeightSource) -> list[str]:
    """Find the tensors that the model has no parameter for."""
    return [name for key in _find_unexpected(weights) for name in weights.unmatched[key]]


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Find, for each tied parameter, the other parameters that share its memory."""
    groups: dict[str, list[str]] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(source, [source]).append(target)
    return {name: [n for n in group if n != name] for group in groups.values() for name in group}


def missing_error(folder: Path, missing: Sequence[str]) -> ModelError:
    """Make the error for parameters that a checkpoint lacks."""
    return UnfilledModelError(
        f"{folder}: the checkpoint lacks {cut_list(missing, 3)}; the model would run "
        "with random weights instead",
        hint="download the weights again, or use the config.json that they were saved with",
    )


def mismatch_error(
    folder: Path, name: str, found: Sequence[int], expected: Sequence[int]
) -> ModelError:
    """Make the error for a parameter whose shapes in checkpoint and config differ."""
    return UnfilledModelError(
        f"{folder}: {name} is {list(found)} in the checkpoint and {list(expected)} by its config",
        hint="config.json and weights belong to two models; download both again",
    )


def find_absent(weights: WeightSource) -> list[str]:
    """Find the parameters that no tensor fills, except those that transformers ignores."""
    model = weights.model
    stored = {made for group in weights.parameters.values() for made in group}
    known = model.state_dict(keep_vars=True)
    filled = {id(known[name]) for name in stored if name in known}  # one object with two names
    tied = tied_names(model)
    missing = (
        name
        for name, value in known.items()
        if id(value) not in filled and stored.isdisjoint((name, *tied.get(name, ())))
    )
    return sorted(_filter(model, missing=missing).missing_keys)


def _find_unexpected(weights: WeightSource) -> list[str]:
    """Find the tensors without a parameter by their names in the model, as transformers does."""
    model = weights.model
    computed = {name for name, _ in model.named_buffers()}
    unexpected = (
        name for name in weights.unmatched if computed.isdisjoint(_spellings(model, name))
    )
    return sorted(_filter(model, unexpected=unexpected).unexpected_keys, key=dot_natural_key)


def _filter(
    model: PreTrainedModel, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> LoadStateDictInfo:
    """Drop the names that the model's class tells transformers to ignore."""
    info = LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info


def _find_switched_off(weights: WeightSource) -> Iterator[str]:
    """Find tensors for parameters that the config switches off, if their values have an effect.

    Their modules are built without a parameter, such as a bias, that they could have.
    """
    model = weights.model
    runs = is_run(model)
    for name in _find_unexpected(weights):
        leaf = name.rpartition(".")[2]
        owners = (_find_module(model, each) for each in _spellings(model, name) if runs(each))
        parameters = [owner._parameters for owner in owners if owner is not None]
        if any(leaf in own and own[leaf] is None for own in parameters):
            neutral = 1.0 if leaf == "weight" else 0.0
            for stored in weights.unmatched[name]:
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
