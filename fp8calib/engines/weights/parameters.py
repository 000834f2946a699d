"""The rule for what is no linear: a model's parameters beside the tensors of its checkpoint.

What the model's class has is known from its config (`ModelGeometry.parameters`). Where a checkpoint
differs, only the engine's own loader can tell what becomes of it, but for what it does silently.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from itertools import chain, product

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.hub import RANGED_FILES
from fp8calib.checkpoint.model_config import QUANTIZATION_KEYS
from fp8calib.engines.facts.classes import UNTIED, ClassMap, make_pattern, read_class_facts
from fp8calib.engines.facts.release import ADDED_ROOTS, Release
from fp8calib.engines.replay.verdicts import CUT, Finding, join_alike
from fp8calib.engines.status import Status
from fp8calib.engines.weights.layers import (
    HEADS,
    PLAIN_DTYPES,
    Shape,
    count_experts,
    find_decoder,
    find_layer_index,
)
from fp8calib.engines.weights.stored import OpenedWeights, is_equal
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, is_companion
from fp8calib.model.drafters import is_drafted
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.module_paths import split_expert

Tensors = Mapping[str, TensorEntry]
_ABSENT_FIX = "complete the download or the export, or use the config.json of this checkpoint"
_MISFIT_FIX = "use the config.json that the weights were saved with"
_NAMES_FIX = "write the tensors under the names that save_pretrained gives them"
_TIED_FIX = "tie the output layer to the embedding (tie_word_embeddings)"
_UNTIED_FIX = "store an output layer, and set tie_word_embeddings to false"
_HEAD_FIX = "serve it with an engine whose class has an output layer of its own"
_HEAD = "lm_head.weight"
_HEAD_PARTS = [[each] for each in HEADS]
_SKIPPED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""What vLLM's models leave out (`models/llama.py` of 0.32, read)."""
_FORMATS = (*PLAIN_DTYPES, *WEIGHT_FORMATS)
_EXPERT_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
}
"""A layer's experts in one parameter, and the names of the same where each expert is stored."""
_HEADLESS = "class of this model type has no output layer"
"""It takes the embedding, and stops at an output layer that is stored and not tied."""
_REFUSED_TIES = "class of this model type stops at a tied output layer"
_UNTIES = "stored lm_head.weight is loaded, though config.json ties it"
_TIED_TYPES = {
    "vllm": ("Gemma3ForConditionalGeneration",),  # its text_config decides, not run
    "sglang": ("gemma", "gemma2", "gemma3_text", "gemma3n_text"),  # not read
}
"""Types and classes whose output layer an engine may make of the embedding."""
_BARE_TYPES = {"sglang": ("gpt2",)}
"""Types whose tensors an engine also finds without the first part of their names, beside those to
whose names it adds a root."""
_SKIPPED_EXPERTS = {"vllm": ("glm4_moe", "qwen3_moe")}
"""Types for which an engine leaves out experts under other names without an error."""
_UNFILLED = "the engine uses uninitialised memory, or ones for a norm"


def find_first_fault(geometry: ModelGeometry, tensors: Tensors, *, has_linears: bool) -> str:
    """Say what the checkpoint lacks, or stores in another shape than its config says.

    Empty where there is nothing of that kind, or where the model's class is not known. The shapes
    of linears and experts are compared only where `has_linears`.
    """
    if absent := next(_list_absent(geometry, tensors), ""):
        return f"the checkpoint is incomplete: it lacks {shorten(absent)}, which config.json means"
    for name, found, shape in _list_misfits(geometry, tensors):
        is_linear = name in geometry.matrices or split_expert(name.rpartition(".")[0]) is not None
        if has_linears or not is_linear:
            sizes = f"{list(found)} in the checkpoint and {list(shape)} by its config.json"
            return f"{shorten(name)} is {sizes}"
    return ""


def compare_parameters(facts: Release, stored: OpenedWeights) -> list[Finding]:
    """List the model's parameters that the checkpoint lacks, or stores otherwise.

    A model whose class is not known has no parameters to compare. Where tensors have names that the
    model's class does not have, an engine may know these names: what it does with them, and with
    the parameters that they do not fill, is not known.
    """
    geometry, tensors, folder = stored.geometry, stored.tensors, stored.folder
    found = list(_list_other_names(facts, geometry, tensors))
    if are_elsewhere(geometry, tensors) and not found:
        return []
    inner = folder.config.get("text_config")
    sections = [folder.config, *([inner] if isinstance(inner, dict) else [])]
    unties = any(each.get("tie_word_embeddings") is False for each in sections)
    is_quantized = folder.modelopt is not None or any(
        each.get(key) is not None for each in sections for key in QUANTIZATION_KEYS
    )
    explains = any(
        len(tensors[each.subject].shape) > 1 for each in found if each.subject in tensors
    )
    absent = [] if explains else list(_list_absent(geometry, tensors))
    is_headless = geometry.model_type in facts.values.get(_HEADLESS, ())
    tied = _TIED_TYPES.get(facts.key, ())
    is_tied = geometry.model_type in tied or geometry.architecture in tied
    if unties and (is_tied or (is_headless and (_HEAD not in tensors or geometry.is_wrapped))):
        why = "is of its own by config.json, but the class may take the embedding instead"
        found.append(Finding.doubt(_HEAD, why, fix=_TIED_FIX))
        absent = [name for name in absent if name != _HEAD]
    # vLLM 0.32.0 model_loader/default_loader.py (track_weights_loading) raises an error for what no
    # tensor fills without a quantization config, and but for modules with a quant_method (read).
    parameters = geometry.parameters.items()
    matrices = {name.rpartition(".")[0] for name, shape in parameters if len(shape) > 1}
    modules = (name.rpartition(".")[0] for name in absent)
    has_vector = any(each not in matrices and split_expert(each) is None for each in modules)
    # srt/model_loader/loader.py load_weights_and_postprocess of SGLang compares nothing
    is_silent = facts.key == "sglang" or (facts.key == "vllm" and (is_quantized or not has_vector))
    found += (
        Finding(
            status=Status.MISREAD if is_silent else Status.UNKNOWN,
            subject=name,
            why=f"is missing: {_UNFILLED}" if is_silent else "is missing",
            fix=_ABSENT_FIX,
            is_silent=is_silent,
            if_loaded=_UNFILLED,
        )
        for name in absent
    )
    for name, shape, expected in _list_misfits(geometry, tensors):
        why = f"has shape {list(shape)}, and the config means {list(expected)}"
        found.append(Finding.doubt(name, why, fix=_MISFIT_FIX, if_loaded=CUT))
    return list(join_alike(found))


def judge_head(facts: Release, classes: ClassMap, stored: OpenedWeights) -> Iterator[Finding]:
    """Say where an engine does not compute with the output layer that the checkpoint means.

    transformers computes with a stored one, whatever the config ties (5.23, run).
    """
    geometry, tensors = stored.geometry, stored.tensors
    of_class = read_class_facts(facts.key)[facts.version].get(geometry.architecture, ())
    is_own = UNTIED in of_class  # the class has an output layer, whatever the config ties
    own = (each for each in geometry.matrices if each.split(".")[-2:-1] in _HEAD_PARTS)
    head = next(chain(geometry.tied, own), "")
    path, is_tied = head.removesuffix(".weight"), head in geometry.tied
    states = {each.state for each in classes.get(make_pattern(path), ())}
    if head not in tensors or (is_tied and geometry.tied[head] not in tensors):
        yield from _judge_half(facts, geometry, tensors, head, is_own=is_own)
        return
    is_untied = bool(facts.values.get(_UNTIES)) and head.endswith(_HEAD)
    wants_own = not is_tied or is_own or is_untied
    fix = "remove it: config.json ties it to the embedding" if is_tied else _TIED_FIX
    if wants_own and geometry.is_wrapped:  # its text_config decides, which maps do not tell
        is_misnamed = bool(classes) and not states and head in geometry.renamed
        if states == {"refused"} or is_misnamed:
            why = "is stored, and the engine's class may have no output layer of this name"
            yield Finding.doubt(head, why, fix=_NAMES_FIX if is_misnamed else fix)
        return
    is_headless = geometry.model_type in facts.values.get(_HEADLESS, ()) or states == {"refused"}
    if wants_own and is_headless:
        why = "is stored, but the engine's class has no output layer, and stops"
        yield Finding(status=Status.REFUSED, subject=head, why=why, fix=fix)
        return
    has_none = not any(each.kind == "head" for found in classes.values() for each in found)
    if wants_own and states != {"skipped"} and not (classes and has_none and not states):
        return
    embeddings = [
        f"{part}.weight"
        for part, found in classes.items()
        if any(each.kind == "embedding" for each in found)
    ]
    known = [each for each in (geometry.tied.get(head), *embeddings) if each in tensors]
    if not known or tensors[head].dtype not in PLAIN_DTYPES:
        return
    file = stored.located[head][0]
    beside = [(stored.located[each][0], each) for each in known]
    why = "differs from the embedding, with which the engine computes instead"
    alike = (tensors[each] for each in known if tensors[each].shape == tensors[head].shape)
    if any(stored.folder.path / each in RANGED_FILES for each, _ in beside) or any(
        each.dtype != tensors[head].dtype for each in alike
    ):
        fix = "download the checkpoint, or store both in one dtype"
        yield Finding.doubt(head, f"may be one that {why}", fix=fix)
    elif not any(is_equal(stored.folder, (file, head), each) for each in beside):
        yield Finding(status=Status.MISREAD, subject=head, why=why, fix=_HEAD_FIX, is_silent=True)


def _judge_half(
    facts: Release, geometry: ModelGeometry, tensors: Tensors, head: str, *, is_own: bool
) -> Iterator[Finding]:
    """Say whether an engine fills what is not stored of an output layer and a tied embedding."""
    embedding = geometry.tied.get(head, "")
    if head in tensors:
        why = f"is missing: the engine does not fill it with {shorten(head)}"
        fix = f"store {shorten(head)} under this name, too"
        yield Finding(status=Status.MISREAD, subject=embedding, why=why, fix=fix)
    elif embedding in tensors and is_own:
        why = "is missing: the engine's class does not tie it, and uses uninitialised memory"
        fix = f"store {shorten(embedding)} under this name, too"
        yield Finding(status=Status.MISREAD, subject=head, why=why, fix=fix, is_silent=True)
    elif embedding in tensors and geometry.model_type in facts.values.get(_REFUSED_TIES, ()):
        why = "is tied to the embedding, at which the engine's class stops (AssertionError)"
        yield Finding(status=Status.REFUSED, subject=head, why=why, fix=_UNTIED_FIX)


def are_elsewhere(geometry: ModelGeometry, tensors: Tensors) -> bool:
    """Whether a folder is one of config and scales, or names its weights in its own way."""
    if any(len(tensors[name].shape) > 1 for name in geometry.parameters if name in tensors):
        return False
    has_matrices = any(len(entry.shape) > 1 for entry in tensors.values())
    return has_matrices or any(map(is_companion, tensors))


def _list_other_names(
    facts: Release, geometry: ModelGeometry, tensors: Tensors
) -> Iterator[Finding]:
    """List tensors that the model's class does not have, or has under another name.

    Scales are judged elsewhere. A packed weight (INT4, FP4) has several tensors beside the place of
    a weight that is not stored; that of an expert, beside its integers.
    """
    absent = {name.removesuffix(".weight") for name in geometry.parameters if name not in tensors}
    absent |= {
        module
        for name, entry in tensors.items()
        if entry.dtype not in _FORMATS
        and not is_companion(name)  # the exponents of MXFP8 are bytes
        and split_expert(module := name.rpartition(".")[0])
    }
    decoder, counts = find_decoder(geometry), count_experts(geometry)
    has_drafter, num_layers = geometry.num_draft_layers > 0, len(geometry.layers)
    is_skipping = geometry.model_type in _SKIPPED_EXPERTS.get(facts.key, ())
    owners = {linear.runner for _, linear in geometry.linears() if linear.num_experts}
    for name in geometry.leftovers:
        if name not in tensors or is_companion(name) or name.endswith(_SKIPPED):
            continue
        module = name.rpartition(".")[0]
        starts = (name[: each.start()] for each in re.finditer("_", name))
        is_draft = has_drafter and is_drafted(name, num_layers, decoder)
        if is_draft or module in absent or not absent.isdisjoint(starts):
            continue
        expert = split_expert(module)
        if is_skipping and expert is not None and expert[0] in owners:
            why = "has a name that the engine leaves out: its expert is uninitialised memory"
            yield Finding(status=Status.MISREAD, subject=name, why=why, fix=_NAMES_FIX)
        else:
            yield Finding.doubt(name, "is not in the model's class", fix=_NAMES_FIX)
    for name in sorted(tensors.keys() - set(geometry.leftovers)):
        expert, layer = split_expert(name.rpartition(".")[0]), find_layer_index(decoder, name)
        if expert is not None and layer in counts and expert[1] >= counts[layer]:
            why = "is of an expert that the model does not have"
            yield Finding.doubt(name, why, fix=_NAMES_FIX)
    modules = (attention.module for _, attention in geometry.attentions())
    root = next(modules, "").partition(".")[0]
    rooted = (each.partition(": ")[0] for each in facts.values.get(ADDED_ROOTS, ()))
    is_bare = geometry.model_type in (*rooted, *_BARE_TYPES.get(facts.key, ()))
    for name in () if geometry.is_wrapped else geometry.renamed:
        if name in tensors and (name.startswith(f"{root}.") or not is_bare):
            why = "has another name than the model's class gives it"
            yield Finding.doubt(name, why, fix=_NAMES_FIX)


def _list_absent(geometry: ModelGeometry, tensors: Tensors) -> Iterator[str]:
    """List what no tensor fills: parameters, and weights that some experts lack and others have.

    A parameter may be packed (INT4, FP4), or stored for each expert.
    """
    # A matrix beside where `weight` would be is the weight under another name.
    packed = {
        name.rpartition(".")[0]
        for name, entry in tensors.items()
        if entry.dtype not in _FORMATS
        or (
            len(entry.shape) > 1
            and not name.endswith((".weight", "bias"))
            and not is_companion(name)
        )
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
        count = counts.get(find_layer_index(decoder, path), 0)
        for number, projection in product(range(count), projections):
            if (path, number, projection) not in numbered:
                yield f"{path}.{number}.{projection}.weight"


def _list_misfits(geometry: ModelGeometry, tensors: Tensors) -> Iterator[tuple[str, Shape, Shape]]:
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
        if 0 <= find_layer_index(decoder, name) < len(geometry.layers):
            found = entry.shape
            nearest = min(expected, key=lambda each: sum(map(operator.ne, each, found)))
            yield name, found, nearest
