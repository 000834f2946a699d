"""What SGLang's model classes create, read from their source.

The checkpoint's names are those that transformers' classes save: as the map of vLLM has them, or
of a class that is built here. What of them fills a linear is told by the names that the class
joins, and where it renames more, by the texts that its module replaces.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import filterfalse, product

import torch
import transformers
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp8calib.engines.facts.classes import OTHERS, UNBUILT, UNTIED, CreatedLinear, make_pattern
from fp8calib.engines.facts.release import FOLDER
from tests import zoo
from tests.architectures import families
from tests.kit.class_facts import spell_fact
from tests.real_engines.class_reader import Class, ReadLinear
from tests.real_engines.package import Package
from tests.real_engines.sglang_models import SglangModels

_STATES = {"config": "config", "none": "plain", "maybe": "maybe", "listed": "config"}
_JOINED_STATES = {**_STATES, "config": "joined", "listed": "maybe"}
"""Of what is joined under a name that lists of configs do not know the parts of."""
_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_KINDS = ("linear", "experts", "head", "other")
_JOINED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""What loaders join in code, and not by a list."""
_DRAFTERS = re.compile(r"MTP|NextN|Eagle|DSpark|DFlash|Draft")
_TIES = re.compile(r"tie_word_embeddings|'lm_head\.weight' not in|lm_head = self\.\w+\.\w+")
"""What classes do that may compute with the embedding: the last also where the head is absent."""
_STACKS = ("input_linear", "output_linear")
_TRIPLE = 3
_RENAMED_PLACES = {str.__contains__: "orig_to_new_substr", str.startswith: "orig_to_new_prefix"}
"""Where a mapper looks for texts in a name, in order."""


class SglangClasses:
    """The classes of a release of SGLang.

    Args:
        package: the release's.
    """

    def __init__(self, package: Package) -> None:
        models = SglangModels(package)
        self._reader = models.reader
        entries = models.entries.items()
        self.entries = {name: each for name, each in entries if not _DRAFTERS.search(name)}

    def list_facts(self) -> dict[str, list[str]]:
        """List the facts, with the architectures of each."""
        facts: defaultdict[str, set[str]] = defaultdict(set)
        stored = read_stored()
        for architecture, saved in list_stored().items():
            embeddings = {name: kind for name, kind in saved.items() if kind == "embedding"}
            stored[architecture] = stored.get(architecture, saved) | embeddings
        for architecture in sorted({*stored, *self.entries}):
            names = stored.get(architecture, {})
            if architecture in self.entries:
                found = list(self.describe(architecture, names))
                found += [_make_embedding(each) for each, k in names.items() if k == "embedding"]
                if self.leaves_untied(architecture):
                    facts[UNTIED].add(architecture)
            else:
                found = list(_describe_backend(names))
            for each in found:
                facts[spell_fact(each)].add(architecture)
            if not found:
                facts[f"{UNBUILT}nothing was read of the class"].add(architecture)
        return {fact: sorted(facts[fact]) for fact in sorted(facts)}

    def leaves_untied(self, architecture: str) -> bool:
        """Tell whether a class creates an output layer, and nowhere ties it to the embedding."""
        bases = self._reader.list_bases(self.entries[architecture])
        nodes = [self._reader.open(each.module).classes[each.name] for each in bases]
        text = "\n".join(map(ast.unparse, nodes))
        return "self.lm_head = ParallelLMHead(" in text and not _TIES.search(text)

    def describe(self, architecture: str, stored: Iterable[str]) -> Iterator[CreatedLinear]:
        """Describe what a class of its own creates, of a checkpoint with these linears."""
        start = self.entries[architecture]
        grouped: dict[str, list[ReadLinear]] = {}
        for each in self._reader.read(start.module, start.name):
            if each.kind in _KINDS:
                grouped.setdefault(make_pattern(each.path), []).append(each)
        joined, packed = self._list_joined(start, grouped)
        names = set(stored)
        renamed = self._rename(start.module, names)
        # Lists of configs are renamed as the checkpoint's names are.
        is_renamed = bool(
            list(self._reader.list_assigned(start, "hf_to_sglang_mapper"))
            or self._reader.find_method(start, "get_hf_to_sglang_mapper")
        )
        rename = self._find_mapper(start)
        for path, found in grouped.items():
            states = {each.state for each in found}
            read = states.pop() if len(states) == 1 else "maybe"
            prefixes = [path, *dict.fromkeys(make_pattern(each.prefix) for each in found)]
            own = path.rpartition(".")[2]
            kind = found[0].kind
            if kind == "other" and path not in names:
                continue
            every = {**_JOINED, **joined, **packed}
            parts = _find_parts([*prefixes, *_respell(prefixes)], own, kind, every, names)
            if not parts and kind == "linear":
                alone = {each for name in prefixes for each in renamed.get(name, ())} - {*grouped}
                is_listed = all(rename(each) in prefixes for each in alone)
                is_listed |= read == "none" or not is_renamed
                parts = list(alone) if len(alone) == 1 and is_listed else []
            if not parts:
                continue
            is_joined = len(parts) > 1 and kind == "linear" and own not in packed
            state = (_JOINED_STATES if is_joined else _STATES)[read]
            listed = _find_listed([] if is_renamed else prefixes[1:], own, kind, parts)
            yield CreatedLinear(state=state, kind=kind, path=listed, parts=tuple(parts))

    def _find_mapper(self, start: Class) -> Callable[[str], str]:
        """Find what a class renames lists of configs by (0.5.23 models/utils.py, WeightsMapper)."""
        mappers = self._reader.list_assigned(start, "hf_to_sglang_mapper")
        made = next((each for each in mappers if isinstance(each, ast.Call)), ast.Constant(None))
        tables = {each.arg: each.value for each in getattr(made, "keywords", ())}
        pairs = {
            place: sorted(ast.literal_eval(tables[name]).items(), key=lambda pair: -len(pair[0]))
            for place, name in _RENAMED_PLACES.items()
            if isinstance(tables.get(name), ast.Dict)
        }

        def rename(path: str) -> str:
            for place, texts in pairs.items():
                found = next(((old, new) for old, new in texts if place(path, old)), ("", ""))
                path = path.replace(*found, 1)
            return path

        return rename

    def _list_joined(
        self, start: Class, grouped: Mapping[str, Sequence[ReadLinear]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """List what classes join of which parts: all loaders, and what configs are told."""
        bases = self._reader.list_bases(start)
        modules = {each.module for each in bases}
        modules |= {each.module for found in grouped.values() for each in found}
        joined: dict[str, list[str]] = {}
        for name in sorted(modules):
            for node in ast.walk(self._reader.open(name).tree):
                if isinstance(node, ast.Tuple) and len(node.elts) == _TRIPLE:
                    texts = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                    if len(texts) == _TRIPLE and all(isinstance(each, str) for each in texts[:2]):
                        whole, part = (str(each).strip(".") for each in texts[:2])
                        if part not in joined.setdefault(whole, []):
                            joined[whole].append(part)
        packed: dict[str, list[str]] = {}
        for value in self._reader.list_assigned(start, "packed_modules_mapping"):
            node = self._reader.find_literal(start, value)
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            for key, parts in pairs:
                if isinstance(key, ast.Constant) and isinstance(parts, ast.List):
                    packed[str(key.value)] = list(ast.literal_eval(parts))
        for each in bases:
            for node in ast.walk(self._reader.open(each.module).classes[each.name]):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                    target = node.targets[0]
                    if ast.unparse(target.value) == "self.packed_modules_mapping":
                        packed[ast.literal_eval(target.slice)] = ast.literal_eval(node.value)
        return joined, packed

    def _rename(self, module: str, names: Iterable[str]) -> dict[str, list[str]]:
        """Rename names of a checkpoint as a loader may, after the number of the layer.

        It does so by pairs of texts in its module: those of tables, and arguments of `replace`.
        """
        pairs: dict[tuple[str, str], None] = {}
        for node in ast.walk(self._reader.open(module).tree):
            texts: Iterable[tuple[ast.expr | None, ast.expr]] = ()
            if isinstance(node, ast.Dict):
                texts = zip(node.keys, node.values, strict=True)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".replace"):
                texts = zip(node.args[:1], node.args[1:2], strict=False)
            for old, new in texts:
                if isinstance(old, ast.Constant) and isinstance(new, ast.Constant):
                    pairs[str(old.value), str(new.value)] = None
        found: dict[str, list[str]] = {}
        for name, (old, new) in product(sorted(names), pairs):
            renamed = f"{name}.weight".replace(old, new).removesuffix(".weight")
            if old and renamed != name and renamed.split("*")[0] == name.split("*")[0]:
                found[renamed] = [*dict.fromkeys((*found.get(renamed, ()), name))]
        return found


def _respell(prefixes: Sequence[str]) -> Iterator[str]:
    """List other spellings of paths, as loaders rename the checkpoint's."""
    for each in prefixes:
        parent, _, own = each.rpartition(".")
        yield f"{parent}.self_attn.{own}"
        if each.startswith("model."):
            yield f"backbone.{each.removeprefix('model.')}"


def _find_parts(
    prefixes: Sequence[str],
    own: str,
    kind: str,
    joined: Mapping[str, Sequence[str]],
    names: set[str],
) -> list[str]:
    """Find the checkpoint's linears that fill one; its parts by name where nothing is known."""
    if kind == "experts":
        inside = [each for each in names for prefix in prefixes if each.startswith(f"{prefix}.")]
        above = prefixes[0].rpartition(".")[0]
        inside += [f"{above}.{end}" for end in _STACKS if f"{above}.{end}" in names]
        ends = [f"{prefixes[0]}.*.{end}" for end in _EXPERTS]
        return sorted(dict.fromkeys(inside)) or ([] if names else ends)
    for prefix in prefixes:
        parent = prefix.rpartition(".")[0]
        for ends in (joined.get(own, ()), (own,)):
            parts = [f"{parent}.{end}".lstrip(".") for end in ends]
            if held := [each for each in parts if each in names]:
                return held
    if names:
        return []
    parent = prefixes[0].rpartition(".")[0]
    return [f"{parent}.{end}".lstrip(".") for end in joined.get(own, (own,))]


def _find_listed(prefixes: Sequence[str], own: str, kind: str, parts: Sequence[str]) -> str:
    """Find the path that lists of a config have to name."""
    parent = parts[0].rpartition(".")[0]
    beside = f"{parent}.{own}".lstrip(".")
    if kind == "experts":
        end = parts[0].find(f".{own}")
        beside = parts[0][: end + len(own) + 1] if end >= 0 else parts[0].rpartition(".")[0]
    known = [each for each in prefixes if not each.startswith("*")]
    return known[0] if len(known) == 1 and known[0] != own else beside


def _make_embedding(name: str) -> CreatedLinear:
    """Describe an embedding, for which no method of a config has FP8."""
    return CreatedLinear(state="plain", kind="embedding", path=name, parts=(name,))


def _describe_backend(stored: Mapping[str, str]) -> Iterator[CreatedLinear]:
    """Describe what SGLang makes of a class of transformers: each linear by the config, alone.

    It renames the lists of a config as it does weights, but for a part of towers that transformers
    5 left out (0.5.23 models/transformers.py, MultiModalMixin).
    """
    for name, kind in stored.items():
        state = "plain" if kind in ("embedding", "other") else "config"
        listed = name.replace("vision_tower.vision_model.", "vision_tower.")
        yield CreatedLinear(state=state, kind=kind, path=listed, parts=(name,))


def read_stored() -> dict[str, dict[str, str]]:
    """Read the checkpoint's linears by architecture, with their kinds, from the map of vLLM."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for entry in json.loads((FOLDER / "vllm_classes.json").read_text())["facts"]:
        if not entry["fact"].startswith(OTHERS):
            created = CreatedLinear.parse(entry["fact"])
            for architecture in filterfalse(_DRAFTERS.search, entry["values"]):
                found[architecture] |= dict.fromkeys(created.parts, created.kind)
    return found


@cache
def list_stored() -> dict[str, dict[str, str]]:
    """List the matrices that transformers' causal models save, with the kinds of their modules."""
    found: dict[str, dict[str, str]] = {}
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        changes = {**families.SIZES, **zoo.CONFIGS[model_type]} if model_type in zoo.CONFIGS else {}
        try:
            config = transformers.AutoConfig.for_model(model_type, **changes)
            with torch.device("meta"):
                model = getattr(transformers, architecture)(config)
            saved = revert_weight_conversion(model, model.state_dict())
        except Exception:  # noqa: BLE001, S112 -- a config without defaults: nothing is known
            continue
        kinds = {f"{name}.weight": _find_kind(name, each) for name, each in model.named_modules()}
        names = [each for each in saved if len(saved[each].shape) > 1 and "bias" not in each]
        found[architecture] = {
            make_pattern(each.removesuffix(".weight")): kinds.get(each, "other") for each in names
        }
    return found


def _find_kind(name: str, module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "head" if name in ("lm_head", "embed_out", "output_projection") else "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "other"
