"""The facts about the classes of an engine: which linears each creates, and how.

A fact is a line of `fp8calib.engines.facts.classes`; its values are the architectures for which it
is true.
"""

import ast
import json
import os
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import fp8calib.plugins.vllm
from fp8calib.engines.facts.classes import DRAFTER, READS, UNBUILT, CreatedLinear, read_class_facts
from fp8calib.engines.facts.release import FOLDER, VLLM_RUN, parse_version
from fp8calib.engines.status import Evidence
from tests import zoo
from tests.architectures import families
from tests.kit.class_facts import spell_fact
from tests.kit.multimodal import MULTIMODAL, build_config, build_tokenizer
from tests.real_engines.class_reader import ClassReader, ReadLinear
from tests.real_engines.package import Package, open_package
from tests.real_engines.sglang_classes import SglangClasses
from tests.real_engines.vllm_job import ENVIRONMENT, PYTHON

LOADER_SCRIPT = Path(fp8calib.plugins.vllm.__file__).with_name("loader_script.py")
_RECORDER = Path(__file__).with_name("vllm_classes.py")
_KIMI: dict[str, Any] = {
    "num_experts": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}

_NO_CHANGES = ("architectures", "model_type", "transformers_version")
_HEADS = ("ParallelLMHead",)
_EMBEDDINGS = ("VocabParallelEmbedding", "Embedding")
_EXPERTS = ("RoutedExperts", "FusedMoE")
_SUFFIX = ".weight"
_NEEDED = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"), ("topk_method",)),
    "InklingForCausalLM": ("padded_vocab_size", "use_embed_norm"),
}
"""Fields that no build shows: vLLM 0.32.0 stops at the router's `e_score_correction_bias` without
`topk_method: noaux_tc` (run: KeyError), and builds Inkling's text model only from a config class of
its own, whose fields transformers' `inkling_text` lacks (run: AttributeError)."""


def list_run_facts(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """List the facts that `vllm_classes.py` saw, with the architectures of each.

    Those with a processor have towers of tiny sizes, for which some classes create linears in
    another way (vLLM 0.32.0 models/siglip.py): what others show counts first.
    """
    facts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    reasons: dict[str, str] = {}
    built: defaultdict[str, set[str]] = defaultdict(set)
    unfilled: defaultdict[str, dict[str, str]] = defaultdict(dict)
    lacking: dict[str, set[str]] = {}
    seen = sorted(rows, key=lambda row: "processor" in row["job"])
    shown: dict[str, set[str]] = {}
    for fact, name in chain.from_iterable(map(_list_drafted, seen)):
        facts[fact][name] = None
    for row in (each for each in seen if not each["job"].get("is_drafter")):
        architecture = row["job"]["architecture"]
        if "error" in row:
            reasons.setdefault(architecture, row["error"])
            continue
        others = shown.setdefault(architecture, set())
        for linear in (describe_run(found) for found in row["linears"] if found["names"]):
            if "processor" not in row["job"]:
                others.update(linear.parts)
            elif not others.isdisjoint(linear.parts):
                continue
            facts[spell_fact(linear)][architecture] = None
            built[architecture].update(linear.parts)
        built.setdefault(architecture, set())
        fields = set(row["lacking"]) - _list_defaults(row["job"]["type"])
        known = fields | row["job"].get("changes", {}).keys()  # may be lacking, or are given
        lacking[architecture] = (lacking.get(architecture, set()) | fields) & known
        unfilled[architecture] |= row["unfilled"] if row["names"] == "transformers" else {}
    for architecture, names in unfilled.items():
        for name, why in names.items():
            part = name.removesuffix(_SUFFIX)
            if part not in built[architecture]:
                state = {"left out": "skipped", "another shape": "maybe"}.get(why, "refused")
                linear = CreatedLinear(state=state, kind="other", path=part, parts=(part,))
                facts[spell_fact(linear)][architecture] = None
    lacking |= {name: {*lacking.get(name, ()), *fields} for name, fields in _NEEDED.items()}
    for name, field in ((name, field) for name, fields in lacking.items() for field in fields):
        facts[f"{READS}{field}"][name] = None
    for architecture, why in reasons.items():
        if architecture not in built:
            facts[f"{UNBUILT}{why}"][architecture] = None
    return {fact: sorted(facts[fact]) for fact in sorted(facts)}


def _list_drafted(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List what a drafter was seen to create, and of which model it is; nothing without one."""
    if not row["job"].get("is_drafter") or "error" in row:
        return
    yield f"{DRAFTER}{row['architecture']}", row["job"]["architecture"]
    for found in row["linears"]:
        if found["names"]:
            yield spell_fact(describe_run(found)), row["architecture"]


def _list_defaults(model_type: str) -> set[str]:
    """List the fields that the config class of the transformers installed here sets."""
    if model_type not in CONFIG_MAPPING:  # vLLM's own
        return set()
    config = CONFIG_MAPPING[model_type]()
    return {*dir(config), *dir(config.get_text_config())}


def describe_run(found: Mapping[str, Any]) -> CreatedLinear:
    """Describe a linear that was built.

    The lists of a config are renamed as the names of a checkpoint are. Where that gives the path
    under which a linear asks the config, lists may use the checkpoint's names.
    """
    parts = tuple(name.removesuffix(_SUFFIX) for name in found["names"])
    kind = find_kind(found["class"])
    if "prefix" not in found or kind == "embedding":  # methods give embeddings none
        return CreatedLinear(state="plain", kind=kind, path=parts[0], parts=parts)
    prefix, packed = found["prefix"], found["packed"]
    parent, _, own = prefix.rpartition(".")
    if kind == "experts":
        is_named = all(each.startswith(prefix) for each in found["renamed"])
        path = _cut_expert(parts[0]) if is_named else prefix
        return CreatedLinear(state="config", kind=kind, path=path, parts=parts)
    ends = packed if len(packed) == len(parts) else [own] * len(parts)
    wanted = {f"{parent}.{end}".lstrip(".") for end in ends} if len(parts) > 1 else {prefix}
    is_named = set(found["renamed"]) == wanted and not found["moved"]
    if found["moved"]:
        prefix = prefix.replace("*", "#")
    if len(parts) == 1:
        path = parts[0] if is_named else prefix
        return CreatedLinear(state="config", kind=kind, path=path, parts=parts)
    above = {part.rpartition(".")[0] for part in parts}
    if is_named and len(above) == 1:
        path = f"{above.pop()}.{own}".lstrip(".")
    else:
        is_named = len(packed) == len(parts)
        path = _respell(prefix, found["renamed"], parts)
    state = "config" if is_named else "joined"
    return CreatedLinear(state=state, kind=kind, path=path, parts=parts)


def _respell(prefix: str, renamed: Sequence[str], parts: Sequence[str]) -> str:
    """Spell the path of a joined module as the checkpoint spells its neighbours."""
    parent, _, own = prefix.rpartition(".")
    above = {each.rpartition(".")[0] for each in parts}
    if {each.rpartition(".")[0] for each in renamed} == {parent} and len(above) == 1:
        return f"{above.pop()}.{own}".lstrip(".")
    return prefix


def _cut_expert(part: str) -> str:
    """Cut the path of a projection, or of a stack, behind `experts`."""
    found = re.match(r".*?experts", part)
    return part if found is None else found.group()


def find_kind(name: str) -> str:
    """Give the kind of a linear by the class of its module."""
    if name in _HEADS:
        return "head"
    if name in _EMBEDDINGS:
        return "embedding"
    if any(each in name for each in _EXPERTS):
        return "experts"
    return "linear" if name.endswith("Linear") else "other"


VLLM_FOLDERS = (
    "vllm/model_executor/models/",
    "vllm/model_executor/layers/mamba/",
    "vllm/models/",
)
_REGISTRY = "vllm.model_executor.models.registry"
_BACKEND = "vllm.model_executor.models.transformers."


class VllmClasses:
    """The classes of a release of vLLM, read.

    Args:
        package: the release's.
    """

    def __init__(self, package: Package) -> None:
        self._reader = ClassReader(package, VLLM_FOLDERS)
        self.registered: dict[str, tuple[str, str]] = {}
        """The module and the class of each architecture."""
        tables = (getattr(node, "value", None) for node in self._reader.open(_REGISTRY).tree.body)
        for table in tables:
            pairs = (
                zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
            )
            for key, pair in pairs:
                if isinstance(key, ast.Constant) and isinstance(pair, ast.Tuple):
                    module, name = (ast.literal_eval(each) for each in pair.elts)
                    module = module if "." in module else f"vllm.model_executor.models.{module}"
                    self.registered[str(key.value)] = (module, name)

    def reads_field(self, architecture: str, name: str) -> bool:
        """Tell whether the module of an architecture's class reads a field of its config."""
        module, _ = self.registered.get(architecture, (_BACKEND, ""))
        nodes = ast.walk(self._reader.open(module.rstrip(".")).tree)
        return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)

    def read(self, architecture: str) -> list[ReadLinear] | str:
        """List what the class of an architecture creates; the code where transformers' is run."""
        module, name = self.registered.get(architecture, (_BACKEND, ""))
        if module.startswith(_BACKEND.rstrip(".")):
            nodes = ast.walk(self._reader.open(f"{_BACKEND}utils").tree)
            names = ("replace_linear_class", "log_replacement")
            return "".join(ast.dump(each) for each in nodes if getattr(each, "name", "") in names)
        return self._reader.read(module, name)


def keep_unchanged(
    facts: Mapping[str, Sequence[str]], run: Package, other: Package
) -> dict[str, list[str]]:
    """Keep the architectures for which another release creates the same, as read in both."""
    first, second = VllmClasses(run), VllmClasses(other)
    names = {name for values in facts.values() for name in values}
    kept = {name for name in names if _is_same(first, second, name)}
    found = {fact: [each for each in values if each in kept] for fact, values in facts.items()}
    for fact, values in found.items():
        field = fact.removeprefix(READS)
        if fact.startswith(READS) and not any(field in each for each in _NEEDED.values()):
            found[fact] = [each for each in values if second.reads_field(each, field)]
    return {fact: values for fact, values in found.items() if values}


def _is_same(first: VllmClasses, second: VllmClasses, name: str) -> bool:
    one, other = first.read(name), second.read(name)
    if isinstance(one, str) or isinstance(other, str):  # transformers' class
        return one == other
    return bool(one) and set(one) <= set(other)


def update_file(
    engine: str, requirement: str, facts: Mapping[str, Sequence[str]], how: Evidence
) -> None:
    """Write the facts of a release into a file; values of the same releases share an entry."""
    path = FOLDER / f"{engine}_classes.json"
    package, _, version = requirement.partition("==")
    releases = {each["version"]: each for each in json.loads(path.read_text())["releases"]}
    releases[version] = {"version": version, "package": package, "evidence": str(how)}
    versions = sorted(releases, key=parse_version)
    true = {
        each: {(fact, name) for name, own in found.items() for fact in own}
        for each, found in read_class_facts(engine).items()
    }
    true[version] = {(fact, value) for fact, values in facts.items() for value in values}
    spans: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for fact, value in sorted(set().union(*true.values())):
        for first, after in list_spans([(fact, value) in true[each] for each in versions]):
            since = versions[first] if first else ""
            until = versions[after] if after < len(versions) else ""
            spans[fact, since, until].append(value)
    lines = [
        json.dumps({"fact": fact, "since": since, "until": until, "values": values})
        for (fact, since, until), values in sorted(spans.items())
    ]
    written = json.dumps([releases[each] for each in versions])
    text = ",\n".join(lines)
    path.write_text(f'{{"releases": {written}, "facts": [\n{text}\n]}}\n')
    read_class_facts.cache_clear()


def list_spans(is_true: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """List from where to where something is true."""
    first = 0
    for holds, group in groupby(is_true):
        after = first + len(list(group))
        if holds:
            yield first, after
        first = after


def run_vllm(*more: str) -> dict[str, list[str]]:
    """Build classes of the vLLM that is installed here, and list the facts.

    Args:
        more: `all`, for all classes of which there is a config; those of tiny models of text else.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs, result = Path(folder, "jobs.json"), Path(folder, "rows.jsonl")
        wrapped = _list_wrapped(Path(folder, "processors")) if more else ()
        jobs.write_text(json.dumps([*_list_families(), *wrapped]))
        command = [
            str(PYTHON),
            "-I",
            str(_RECORDER),
            str(LOADER_SCRIPT),
            str(jobs),
            str(result),
            *more,
        ]
        environment = {**os.environ, **ENVIRONMENT}
        subprocess.run(command, check=True, env=environment)
        return list_run_facts(map(json.loads, result.read_text().splitlines()))


def _list_families() -> Iterator[dict[str, Any]]:
    """List the configs of tiny models that tests build: they have kinds of layers beside defaults.

    Only vLLM's own config of kimi_linear says which layers have no attention.
    """
    refused = {name: changes for name, (changes, _) in families.REFUSED.items()}
    for name, changes in {**zoo.CONFIGS, **refused}.items():
        fields = {**families.SIZES, **changes}
        job = {"type": name, "architecture": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}
        yield {**job, "changes": fields}
        yield {**job, "changes": {**fields, "tie_word_embeddings": False}}
        if name == "kimi_linear":
            yield {**job, "changes": {**fields, **_KIMI}}


def _list_wrapped(folder: Path) -> Iterator[dict[str, Any]]:
    """List the configs of tiny models that see or hear, whose processors are saved in a folder."""
    for name, kind in MULTIMODAL.items():
        tokenizer = build_tokenizer(kind)
        kind.make_processor(tokenizer).save_pretrained(folder / name)
        architecture = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name]
        job = {"type": name, "architecture": architecture, "processor": str(folder / name)}
        config = build_config(name, tokenizer)
        for tied in (True, False):
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
            fields = config.to_dict().items()
            yield {**job, "changes": {key: each for key, each in fields if key not in _NO_CHANGES}}


def read_classes(requirement: str) -> None:
    """Write what the classes of a release create.

    The release of vLLM that is installed here is run; others have what is read as in it.
    """
    package, _, version = requirement.partition("==")
    if package == "sglang":
        facts = SglangClasses(open_package(requirement)).list_facts()
        update_file("sglang", requirement, facts, "read")
        return
    if version == VLLM_RUN.version:
        update_file("vllm", requirement, run_vllm("all"), "run")
        return
    seen: defaultdict[str, list[str]] = defaultdict(list)
    for architecture, facts_of_it in read_class_facts("vllm")[VLLM_RUN.version].items():
        for fact in facts_of_it:
            if not fact.startswith(UNBUILT):
                seen[fact].append(architecture)
    run = open_package(f"{VLLM_RUN.package}=={VLLM_RUN.version}")
    kept = keep_unchanged(seen, run, open_package(requirement))
    update_file("vllm", requirement, kept, "read")
