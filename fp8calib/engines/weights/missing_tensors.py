"""Compare the parameters of a model with the tensors of its checkpoint, and the index with both.

What the model's class has is known from its config (`ModelGeometry.parameters`). Where a checkpoint
differs, only the engine's own loader can tell what becomes of it, but for what it does silently.
"""

from __future__ import annotations

import operator
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import torch

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.status import Status
from fp8calib.engines.weights.expected import PLAIN_DTYPES, Shape
from fp8calib.engines.weights.finding import CUT, Finding, join_alike
from fp8calib.engines.weights.stored import LAYER, count_experts, find_decoder
from fp8calib.engines.weights.weight_rule import NameRules
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, is_companion
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.drafters import is_drafted
from fp8calib.model.module_paths import split_expert
from fp8calib.model.shapes import ModelGeometry

Located = Mapping[str, tuple[str, TensorEntry]]
"""The file and the entry of each tensor, by its name."""

_ABSENT_FIX = "complete the download or the export, or use the config.json of this checkpoint"
_MISFIT_FIX = "use the config.json that the weights were saved with"
_NAMES_FIX = "write the tensors under the names that save_pretrained gives them"
_TIED_FIX = "tie the output layer to the embedding (tie_word_embeddings)"
_HEAD = "lm_head.weight"
_SKIPPED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""What vLLM's models leave out (`models/llama.py` of 0.32, read)."""
_FORMATS = (*PLAIN_DTYPES, *WEIGHT_FORMATS)
_EXPERT_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
}
"""A layer's experts in one parameter, and the names of the same where each expert is stored."""
_PREFERRED_BY_VLLM = "consolidated"
_UNFILLED = "the engine uses uninitialised memory, or ones for a norm"


def list_opened_files(folder: ScaleFolder, *, prefers_single: bool = False) -> tuple[str, ...]:
    """List the files that an engine opens, readable or not, in order.

    Some folders contain the same weights again, under other names, in files that the index does not
    name. transformers prefers `model.safetensors` to those that it names.
    """
    weight_map = folder.indexed
    named = set(folder.files) if weight_map is None else set(weight_map.values())
    if prefers_single and SINGLE_FILE_NAME in folder.files:
        named = {SINGLE_FILE_NAME}
    return tuple(file for file in folder.files if file in named)


def list_tensors(folder: ScaleFolder, files: Iterable[str]) -> Located:
    """List the tensors of those files that are readable."""
    return {
        name: (file, entry)
        for file in files
        for name, entry in folder.tensors.get(file, {}).items()
    }


def list_index_problems(folder: ScaleFolder, geometry: ModelGeometry) -> list[str]:
    """Say where the index and the files differ: tensors, and files with weights of the model."""
    weight_map = folder.indexed
    if weight_map is None:
        return []
    lost = [
        name
        for name, file in weight_map.items()
        if file in folder.tensors and name not in folder.tensors[file]
    ]
    named = set(weight_map.values())
    unlisted = [
        name
        for file in sorted(named.intersection(folder.tensors))
        for name in folder.tensors[file]
        if name not in weight_map
    ]
    problems = []
    if lost:
        what = f"{shorten(lost[0])} ({len(lost)} in all)"
        problems.append(f"{INDEX_NAME} names {what}, which its file does not contain")
    if unlisted:
        what = f"{shorten(unlisted[0])} ({len(unlisted)} in all)"
        problems.append(f"{INDEX_NAME} does not name {what}; engines load whole files")
    for file, held in folder.tensors.items():
        if file not in named and (name := next(filter(geometry.parameters.get, held), None)):
            openers = "TGI and vLLM open" if file.startswith(_PREFERRED_BY_VLLM) else "TGI opens"
            problems.append(
                f"{INDEX_NAME} does not name {shorten(file)}, which contains {shorten(name)}: "
                f"{openers} it, other engines do not"
            )
    return problems


def describe_paths(folder: ScaleFolder) -> str:
    """Say where the index names files by paths, which engines compare as texts; else empty."""
    weight_map = folder.index.get("weight_map") if isinstance(folder.index, dict) else None
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    path = next((each for each in named if isinstance(each, str) and os.sep in each), "")
    return f"{INDEX_NAME} names {shorten(path)}, a path: an engine may not find it" if path else ""


def find_wrong_values(
    folder: ScaleFolder, geometry: ModelGeometry, files: Sequence[str], opened: Located
) -> Finding | None:
    """Find a tensor that a later file replaces, or a norm or bias with NaN or infinity."""
    if not folder.is_on_disk:
        return None
    why = _find_replaced(folder, files) or _find_broken_vector(folder, geometry, opened)
    fix = "write the checkpoint again, with each tensor once"
    return Finding(status=Status.MISREAD, why=why, fix=fix) if why else None


def _find_replaced(folder: ScaleFolder, files: Sequence[str]) -> str:
    """Say which tensor a later file replaces by another one; KV scales are judged elsewhere.

    vLLM 0.32.0 and transformers 5.23 keep the last one (run).
    """
    indexed = folder.indexed or {}
    for first, last in combinations([file for file in files if file in folder.tensors], 2):
        for name in folder.tensors[first].keys() & folder.tensors[last].keys():
            is_meant = indexed.get(name) == last or parse_name(name) is not None
            if not is_meant and not _is_equal(folder, name, first, last):
                where = f"{shorten(first)} and, with other values, in {shorten(last)}"
                return f"{shorten(name)} is in {where}: the later file wins"
    return ""


def _is_equal(folder: ScaleFolder, name: str, *files: str) -> bool:
    entries = [folder.tensors[file][name] for file in files]
    if len({(each.dtype, each.shape) for each in entries}) > 1:
        return False
    read = []
    for file in files:
        with TensorFile(folder.path / file) as opened:
            read.append(opened.read_bytes(name, 0, entries[0].size_bytes))
    return torch.equal(*read)


def _find_broken_vector(folder: ScaleFolder, geometry: ModelGeometry, opened: Located) -> str:
    """Say which norm or bias holds no number. The values of matrices are not read."""
    vectors: dict[str, list[str]] = defaultdict(list)
    for name, (file, entry) in opened.items():
        if len(entry.shape) == 1 and entry.dtype in PLAIN_DTYPES and name in geometry.parameters:
            vectors[file].append(name)
    for file, names in vectors.items():
        with TensorFile(folder.path / file) as held:
            held.fetch(names)
            for name in names:
                if not bool(held.read(name).isfinite().all()):
                    return f"{shorten(name)} holds NaN or infinity"
    return ""


def find_first_fault(
    geometry: ModelGeometry, tensors: Mapping[str, TensorEntry], *, has_linears: bool
) -> str:
    """Say what the checkpoint lacks, or stores in another shape than its config says.

    Empty where there is nothing of that kind, or where the model's class is not known.

    Args:
        geometry: the model's.
        tensors: the checkpoint's.
        has_linears: whether to compare the shapes of linears and experts too.
    """
    if absent := next(_list_absent_names(geometry, tensors), ""):
        return (
            f"the checkpoint is incomplete: it lacks {shorten(absent)}, which the model of its "
            "config.json has"
        )
    for name, found, shape in _list_misfits(geometry, tensors):
        is_linear = name in geometry.matrices or split_expert(name.rpartition(".")[0]) is not None
        if has_linears or not is_linear:
            sizes = f"{list(found)} in the checkpoint and {list(shape)} by its config.json"
            return f"{shorten(name)} is {sizes}"
    return ""


def compare_parameters(
    rules: NameRules,
    geometry: ModelGeometry,
    tensors: Mapping[str, TensorEntry],
    *,
    is_quantized: bool,
    unties: bool,
) -> list[Finding]:
    """List the model's parameters that the checkpoint lacks, or stores otherwise.

    Where tensors have names that the model's class does not have, an engine may know these names:
    what it does with them, and with the parameters that they do not fill, is not known.

    Args:
        rules: the engine's.
        geometry: the model's; one whose class is not known has no parameters to compare.
        tensors: those that the engine opens.
        is_quantized: there is a quantization config.
        unties: config.json gives the output layer a weight of its own.
    """
    doubts = list(_list_name_doubts(rules, geometry, tensors))
    if are_elsewhere(geometry, tensors) and not doubts:
        return []
    explains = any(
        len(tensors[each.subject].shape) > 1 for each in doubts if each.subject in tensors
    )
    absent = [] if explains else list(_list_absent_names(geometry, tensors))
    is_headless = geometry.model_type in rules.headless_types
    is_tied = {geometry.model_type, geometry.architecture} & {*rules.tied_types}
    if unties and is_headless and _HEAD in tensors and not geometry.is_wrapped:
        why = "is of its own by config.json, but the engine's class has no output layer, and stops"
        doubts.append(Finding(status=Status.REFUSED, subject=_HEAD, why=why, fix=_TIED_FIX))
    elif unties and (is_headless or is_tied):
        why = "is of its own by config.json, but the class may take the embedding instead"
        doubts.append(Finding.doubt(_HEAD, why, fix=_TIED_FIX))
        absent = [name for name in absent if name != _HEAD]
    misfits = (
        Finding.doubt(
            name,
            f"has shape {list(found)}, and the config means {list(expected)}",
            fix=_MISFIT_FIX,
            if_loaded=CUT,
        )
        for name, found, expected in _list_misfits(geometry, tensors)
    )
    lacking = _judge_absent(rules, geometry, absent, is_quantized=is_quantized)
    return list(join_alike((*doubts, *lacking, *misfits)))


def _list_name_doubts(
    rules: NameRules, geometry: ModelGeometry, tensors: Mapping[str, TensorEntry]
) -> Iterator[Finding]:
    """List tensors that the model's class does not have, or has under another name."""
    is_skipping = geometry.model_type in rules.skipped_experts
    owners = {linear.runner for _, linear in geometry.linears() if linear.num_experts}
    for name in _list_leftovers(geometry, tensors):
        expert = split_expert(name.rpartition(".")[0])
        if is_skipping and expert is not None and expert[0] in owners:
            why = "has a name that the engine leaves out: its expert is uninitialised memory"
            yield Finding(status=Status.MISREAD, subject=name, why=why, fix=_NAMES_FIX)
        else:
            yield Finding.doubt(name, "is not in the model's class", fix=_NAMES_FIX)
    decoder, counts = find_decoder(geometry), count_experts(geometry)
    for name in sorted(tensors.keys() - set(geometry.leftovers)):
        expert, layer = split_expert(name.rpartition(".")[0]), _find_layer(decoder, name)
        if expert is not None and expert[1] >= counts.get(layer, expert[1] + 1):
            why = "is of an expert that the model does not have"
            yield Finding.doubt(name, why, fix=_NAMES_FIX)
    if geometry.is_wrapped:
        return
    modules = (attention.module for _, attention in geometry.attentions())
    root = next(modules, "").partition(".")[0]
    is_bare = geometry.model_type in rules.bare_types
    for name in geometry.renamed:
        if name in tensors and (name.startswith(f"{root}.") or not is_bare):
            why = "has another name than the model's class gives it"
            yield Finding.doubt(name, why, fix=_NAMES_FIX)


def _list_leftovers(geometry: ModelGeometry, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """List the tensors without a parameter.

    Scales are judged elsewhere. A packed weight (INT4, FP4) has several tensors beside the place of
    a weight that is not stored; that of an expert, beside its integers.
    """
    absent = {name.removesuffix(".weight") for name in geometry.parameters if name not in tensors}
    absent |= {
        module
        for name, entry in tensors.items()
        if entry.dtype not in _FORMATS and split_expert(module := name.rpartition(".")[0])
    }
    num_layers, decoder = len(geometry.layers), find_decoder(geometry)
    for name in geometry.leftovers:
        entry, module = tensors.get(name), name.rpartition(".")[0]
        if entry is None or is_companion(name) or name.endswith(_SKIPPED):
            continue
        starts = (name[: each.start()] for each in re.finditer("_", name))
        if module in absent or not absent.isdisjoint(starts):
            continue
        if not geometry.num_draft_layers or not is_drafted(name, num_layers, decoder):
            yield name


def are_elsewhere(geometry: ModelGeometry, tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether a folder is one of config and scales, or names its weights in its own way."""
    if any(len(tensors[name].shape) > 1 for name in geometry.parameters if name in tensors):
        return False
    has_matrices = any(len(entry.shape) > 1 for entry in tensors.values())
    return has_matrices or any(map(is_companion, tensors))


def _judge_absent(
    rules: NameRules, geometry: ModelGeometry, absent: list[str], *, is_quantized: bool
) -> Iterator[Finding]:
    """Judge parameters that no tensor fills, for which some engines raise an error.

    vLLM 0.32.0 model_loader/default_loader.py (track_weights_loading) raises one without a
    quantization config, and but for modules with a quant_method (read).
    """
    matrices = {
        name.rpartition(".")[0] for name, shape in geometry.parameters.items() if len(shape) > 1
    }
    modules = (name.rpartition(".")[0] for name in absent)
    has_vector = any(each not in matrices and split_expert(each) is None for each in modules)
    is_silent = rules.is_silent or (
        rules.is_silent_if_quantized and (is_quantized or not has_vector)
    )
    for name in absent:
        why = f"is missing: {_UNFILLED}" if is_silent else "is missing"
        status = Status.MISREAD if is_silent else Status.UNKNOWN
        yield Finding(
            status=status,
            subject=name,
            why=why,
            fix=_ABSENT_FIX,
            is_silent=is_silent,
            if_loaded=_UNFILLED,
        )


def _list_absent_names(
    geometry: ModelGeometry, tensors: Mapping[str, TensorEntry]
) -> Iterator[str]:
    """List what no tensor fills: parameters, and weights that some experts lack and others have.

    A parameter may be packed (INT4, FP4), or stored for each expert.
    """
    packed = {
        name.rpartition(".")[0]
        for name, entry in tensors.items()
        if entry.dtype not in _FORMATS or _is_other_weight(name, entry)
    }
    weights = (name.rpartition(".")[0] for name in tensors if not is_companion(name))
    experts = (split_expert(module) for module in weights if not module.endswith("bias"))
    numbered = {each for each in experts if each is not None}
    parts = {(path, projection) for path, _, projection in numbered}
    owners = {path for path, _ in parts}

    def is_held(name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            return module in packed
        ends = (f"{name}_blocks", f"{name}_scale", f"{name}_packed")
        if any(each.startswith(ends) for each in tensors):
            return True
        names = _EXPERT_PARTS.get(leaf)
        is_stacked = names is None or any((module, each) in parts for each in names)
        return module in owners and is_stacked

    yield from (name for name in geometry.parameters if name not in tensors and not is_held(name))
    decoder, counts = find_decoder(geometry), count_experts(geometry)
    projections = sorted({projection for _, _, projection in numbered})
    for path in sorted(owners):
        count = counts.get(_find_layer(decoder, path), 0)
        for number, projection in product(range(count), projections):
            if (path, number, projection) not in numbered:
                yield f"{path}.{number}.{projection}.weight"


def _is_other_weight(name: str, entry: TensorEntry) -> bool:
    """Check whether a matrix beside where `weight` would be is the weight under another name."""
    return (
        len(entry.shape) > 1 and not name.endswith((".weight", "bias")) and not is_companion(name)
    )


def _find_layer(decoder: str | None, path: str) -> int:
    """Find the number of the decoder layer that a path is in; -1 where it is elsewhere."""
    found = LAYER.match(path)
    return int(found[2]) if found is not None and found[1] == decoder else -1


def _list_misfits(
    geometry: ModelGeometry, tensors: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, Shape, Shape]]:
    """List what has another shape than the config says: the name, that shape, the config's.

    Of single experts it is the shape of no projection of any expert.
    """
    for name, shape in geometry.parameters.items():
        entry = tensors.get(name)
        # a number may be a vector of one
        if entry is None or entry.shape == shape or {entry.shape, shape} == {(), (1,)}:
            continue
        if entry.dtype in _FORMATS:
            yield name, entry.shape, shape
    expected = {
        (rows, linear.in_features)
        for _, linear in geometry.linears()
        if linear.num_experts
        for part in linear.parts
        for rows in (part.count * part.unit, linear.out_features)
    }
    decoder = find_decoder(geometry)
    for name, entry in tensors.items() if expected and decoder is not None else ():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(entry.shape) != 2 or split_expert(module) is None:
            continue
        if entry.dtype not in _FORMATS or entry.shape in expected:
            continue
        # Towers and draft layers have experts of their own.
        if 0 <= _find_layer(decoder, name) < len(geometry.layers):
            found = entry.shape
            nearest = min(expected, key=lambda each: sum(map(operator.ne, each, found)))
            yield name, found, nearest
