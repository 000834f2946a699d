"""docs/engines.md lists what the records of engines assume, and what was run and what read.

FP8CALIB_WRITE_README=1 in the environment writes the page again.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby, pairwise
from pathlib import Path

from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import Numerics
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.vllm.releases import RELEASES, Release
from fp8calib.engines.weights.weight_rule import ParameterRules, WeightRule
from tests.real_engines.fuzz.exclusions import EXCLUDED

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
HEAD = """# What is assumed of engines, and how it is known

`check` replays loading rules, and `verify` emulates arithmetic. *Run* means that the result was
compared with the engine itself, *loader run* with the engine's own code that loads scales. *Read*
means that only the source was read: such a rule is an assumption until someone runs the engine.
A rule that does not say that it was run was read.
`tests/engines/test_documentation.py` makes these tables from the records in `fp8calib/engines/`.
"""
RELEASES_OF_VLLM = """A release has the rules of 0.32 but for these. Model types with attention of
their own kind, and names that only some models know, are judged in all of them by the rules of
0.32. Which scheme a linear gets was found by running the config classes of each release on
configs of compressed-tensors, the `fp8` method and ModelOpt; how tensors fill its parameters was
read. Where the model's class joins or names linears in its own way, `check` says that it was not
compared. Blocks of the `fp8` method may end inside of a projection from 0.14 on, and inside of an
expert from 0.29 on. Before 0.25 each model has a loader of its own; which of them map the names
of scales was read (`vllm/remapping`). Of the arithmetic of releases before 0.32, Python was
compared with that of 0.32, and no kernel.
"""
RELEASES_OF_SGLANG = """
## What differs between the releases of SGLang

The code of each release from 0.5.1 to 0.5.23 was run on the names of scales: its models' loaders,
its reader of files of scales, and what it does with scales of zero; and its config classes, which
choose the scheme of a linear, on configs of compressed-tensors, the `fp8` method and ModelOpt. How
tensors fill the parameters of linears was read. The arithmetic of 0.5.19 to 0.5.22 is that of
0.5.23: the functions and kernels it follows were compared, and what they changed concerns other
GPUs, other formats or activations fused with quantization. That of older releases was not compared.

|  | from which release on |
|---|---|
| Attention has parameters for KV scales with ModelOpt's and Quark's method | 0.5.1 |
| ... with the `fp8` method (`fp8.py` get_quant_method) | 0.5.6 |
| ... with compressed-tensors (`compressed_tensors.py` get_quant_method) | 0.5.19 |
| ... in Qwen3-Next; in Qwen3.5 | 0.5.9; 0.5.17 |
| `.mixer.k_proj.k_scale` is mapped (`maybe_remap_kv_scale_name`) | 0.5.9 |
| ModelOpt's kv_cache_quant_algo is read in config.json (`modelopt_quant.py` from_config) | 0.5.15 |
| ModelOpt's MIXED_PRECISION is not read as w4afp8 in Nemotron-H | 0.5.10, until 0.5.14 |
| ... where a layer is NVFP4 | 0.5.15 |
| Two scales of zero count as not loaded; before, SGLang stops (`kv_cache.py`) | 0.5.18 |
| ModelOpt's and Quark's names are no error in Qwen3; MiniMax-M2 | 0.5.2; 0.5.10 |
| ... in Gemma 3; Qwen3-VL | 0.5.14; 0.5.20 |
| Any name of a scale is no error in GLM-4; Qwen2.5-VL | 0.5.4; 0.5.5, but for 0.5.6 |
| ... in GLM-4V; Qwen3-VL | 0.5.6; 0.5.7 |
| compressed-tensors: FP8 weights in blocks (`_is_fp8_w8a8`) | 0.5.6 |
| ... weights alone, per tensor; before, vLLM has to be installed beside it (ImportError) | 0.5.4 |
| ... weights alone, per channel; before, an ImportError (`_is_wNa16_group_channel`) | 0.5.22 |
| ... the format of a config group; before, that of the whole config holds | 0.5.17 |
| ... the formats nvfp4-pack-quantized; pack-quantized, for groups in FP8 | 0.5.7; 0.5.16 |
| ... entries of `ignore` match a part of a path; the end of a path (`utils.py`) | 0.5.7; 0.5.17 |
| ... experts have the scheme of their projections; before, that of the target `Linear` | 0.5.9 |
| ... an output layer that is named by a target (get_lm_head_scheme) | 0.5.19 |
| The `fp8` method reads `modules_to_not_convert` (`fp8.py` from_config) | 0.5.6 |
| ... its entries match a part of a path; whole parts (is_layer_skipped) | 0.5.6; 0.5.11 |
| ... its list may have experts, and q, k and v by their own names | 0.5.10; 0.5.11 |
| ModelOpt's list may have linears; before, an error (`modelopt_quant.py`) | 0.5.4 |
| ... its entries are globs, and may be experts (is_layer_excluded) | 0.5.9 |
| ... the output layer may be quantized | 0.5.15 |
| ... FP8_PB_WO for linears, and for experts, of a mixed precision | 0.5.18; 0.5.21 |
| Slices that are too short are padded; before, an error (`parameter.py`) | 0.5.3 |
| A BF16 weight in an FP8 linear that is not joined is an error; before, it is cast | 0.5.8 |
| Tensors of experts that are too small fill a part; before, an error | 0.5.17 |
| Block scales of q, k and v, and of gate and up, that are stored as one | 0.5.3; 0.5.9 |

Classes that came later are listed in `sglang/model_types`: before, SGLang runs transformers' code,
which loads no KV scales.
"""
ARITHMETIC = """
## Arithmetic that `verify --engine` emulates

What differs from the plain rule (divide in fp32, saturate, round to nearest even). It is true for
Hopper GPUs, unless the engine is for a CPU. Not emulated: the order of sums, accumulation in fewer
bits than fp32, the running maximum of softmax over tiles (the maximum of the row is used), and
FlashInfer's own quantization of inputs in vLLM's block linears, for fewer than 32 tokens.
"""


def read_meanings(kind: type) -> dict[str, str]:
    """Read what the source says below each field of a class."""
    (body,) = (
        node.body
        for node in ast.parse(Path(inspect.getfile(kind)).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    found: dict[str, str] = {}
    for one, after in pairwise(body):
        is_field = isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_field and is_text:
            found[one.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def list_releases() -> Iterator[Engine]:
    for engine in ENGINES.values():
        yield from (engine, *engine.releases)


def describe_older(engine: Engine) -> Iterator[tuple[str, ...]]:
    """Describe the other releases of an engine, those with the same evidence on one line."""
    for _, group in groupby(engine.releases, key=lambda each: describe_engine(each)[3:]):
        first, *rest = map(describe_engine, group)
        last = rest[-1] if rest else first
        spans = [
            new if new == old else f"{new} to {old}" for new, old in zip(first, last, strict=True)
        ]
        yield tuple(spans)


def describe_engine(engine: Engine) -> tuple[str, ...]:
    is_replayed = engine.replay_folder is not None or engine.replay_json is not None
    arithmetic = "not emulated"
    if engine.numerics is not None:
        numbers = engine.numerics
        arithmetic = "run and read" if numbers.run else "read"
    return (
        engine.title,
        f"`{engine.key}`",
        engine.version,
        str(engine.evidence) if is_replayed else "not replayed",
        arithmetic,
    )


def describe_field(numerics: Numerics, name: str, meanings: dict[str, str]) -> tuple[str, ...]:
    known = "run" if name in numerics.run else "read"
    shown = f"`{name}` = {show_value(getattr(numerics, name))}"
    return shown, meanings[name], known, numerics.sources[name]


def show_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key or 'others'}: {each}" for key, each in value.items())
    if isinstance(value, frozenset | tuple):
        return ", ".join(map(str, sorted(value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_rule(engine: Engine, rule: WeightRule) -> tuple[str, ...]:
    scope = [rule.dialect, *rule.schemes, *rule.model_types]
    scope += ["blocks"] * rule.has_blocks + ["experts"] * rule.has_experts
    known = "run" if "tried" in rule.source else "read"
    return (
        engine.key,
        ", ".join(filter(None, scope)) or "all",
        rule.effect,
        rule.why,
        known,
        rule.source,
    )


LIMITS = """
## What the random comparison does not see

`scripts/test-engines --fuzz N --seed S` loads random checkpoints in vLLM 0.32, transformers and
SGLang's loaders, and compares. These errors are those of a CPU or of another package, and are left
out and counted:
"""
CLOSE = """
Weights count as equal where they differ by less than a tenth of their norm, and each row by less
than half of its norm. In these cases `check` names a fault, and the comparison may find none:

* one of many experts in 16 bits, which vLLM casts without a scale: the difference can be less than
  that
* an asymmetric scheme of keys and values without a zero point: the comparison sees scales alone
* vLLM: the missing scale of the last of several projections that are joined: where all of them
  have the same scale, the largest of the others is the right one
* vLLM: llama4's q and k in blocks, of the `fp8` method: vLLM reorders rows inside of a head, which
  is right where heads fill blocks
"""


def list_exclusions() -> Iterator[str]:
    for engine, reasons in EXCLUDED.items():
        yield from (f"* {engine}: {why}" for why in reasons.values())


def list_loader_sources() -> Iterator[tuple[str, str]]:
    """List the constants that name a file of an engine and end in how it is known."""
    for path in sorted(ENGINE_FOLDER.glob("**/*.py")):
        for node in ast.parse(path.read_text()).body:
            value = node.value if isinstance(node, ast.Assign) else None
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and (found := KNOWN_BY.fullmatch(text)):
                yield found[1], found[2]


def list_loading_rules() -> Iterator[tuple[str, str]]:
    """List the modules and the tables in them whose docstrings name a source."""
    for path in (*sorted(ENGINE_FOLDER.glob("**/*.py")), JOINED):
        tree = ast.parse(path.read_text())
        folder = ENGINE_FOLDER if path.is_relative_to(ENGINE_FOLDER) else ENGINE_FOLDER.parent
        place = path.relative_to(folder).with_suffix("").as_posix()
        texts = {place: ast.get_docstring(tree) or ""}
        for one, after in pairwise(tree.body):
            target = one.target if isinstance(one, ast.AnnAssign) else None
            target = one.targets[0] if isinstance(one, ast.Assign) else target
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                texts[f"{place}: {target.id.strip('_')}"] = str(value.value)
        for rule, text in texts.items():
            if SOURCE.search(text):
                yield f"`{rule}`", " ".join(text.split())


def describe_releases() -> Iterator[tuple[str, str]]:
    """Describe what changed when, by field: each value with the release that had it first."""
    meanings = read_meanings(Release)
    for each in fields(Release):
        values = [(release.name, getattr(release, each.name)) for release in RELEASES]
        groups = [(value, [*group]) for value, group in groupby(values, key=lambda pair: pair[1])]
        if each.name not in {"version", "evidence"} and len(groups) > 1:
            steps = (f"{group[0][0]}: {show_value(value) or 'none'}" for value, group in groups)
            yield meanings[each.name], "; ".join(steps)


def make_page() -> str:
    releases = [each for each in list_releases() if each.key != "reference"]
    rows: list[tuple[str, ...]] = []
    for engine in ENGINES.values():
        rows += [describe_engine(engine), *describe_older(engine)] if engine.version else []
    lines = [HEAD, *make_table(ENGINE_COLUMNS, rows)]
    lines += ["", "## What differs between the releases of vLLM", ""]
    lines += [RELEASES_OF_VLLM, *make_table(("", "from which release on"), describe_releases())]
    lines += [RELEASES_OF_SGLANG.rstrip(), ARITHMETIC.rstrip()]
    meanings, seen = read_meanings(Numerics), set()
    for engine in releases:
        numerics = engine.numerics
        if numerics is None or numerics.name in seen:
            continue
        seen.add(numerics.name)
        lines += ["", f"### {engine.release}, `{engine.key}`", ""]
        rows = (describe_field(numerics, name, meanings) for name in sorted(numerics.sources))
        lines += make_table(("field", "what it means", "known by", "source"), rows)
    lines += [
        "",
        "## Loading rules",
        "",
        *make_table(("rule", "what it follows"), list_loading_rules()),
    ]
    lines += ["", "## Parameters of linears and of KV scales, and how tensors fill them", ""]
    lines += make_table(("source", "known by"), list_loader_sources())
    lines += [
        "",
        "## Parameters of the model that a checkpoint lacks or stores in another shape",
        "",
    ]
    lines += make_table(PARAMETER_COLUMNS, describe_parameters(releases))
    lines += ["", "## FP8 weights that engines do not load as they are", ""]
    owners: dict[WeightRule, Engine] = {}
    for engine in releases:
        for rule in engine.weight_rules:
            owners.setdefault(rule, engine)
    rules = (describe_rule(engine, rule) for rule, engine in owners.items())
    lines += make_table(RULE_COLUMNS, rules)
    return "\n".join([*lines, LIMITS, *list_exclusions(), CLOSE])


def describe_parameters(releases: Iterable[Engine]) -> Iterator[tuple[str, ...]]:
    """Describe what each set of rules says, for the first engine that has it."""
    seen: list[ParameterRules] = []
    for engine in releases:
        rules = engine.parameter_rules
        if rules is None or rules in seen:
            continue
        seen.append(rules)
        kinds = {"lacks": rules.absent, "lacks a norm": rules.absent_vector, "shape": rules.misfit}
        for kind, rule in kinds.items():
            if rule is not None:
                source, known = rule.source.rsplit(", ", 1)
                yield engine.key, kind, rule.effect, rule.what, known, source


PARAMETER_COLUMNS = ("engine", "what", "effect", "why", "known by", "source")
ENGINE_FOLDER = Path(__file__).parents[2] / "fp8calib" / "engines"
JOINED = ENGINE_FOLDER.parent / "geometry" / "module_paths.py"
"""It has the names of joined projections, which quantization needs too."""
SOURCE = re.compile(r"\.py|\d\.\d|commit [0-9a-f]{6}")
KNOWN_BY = re.compile(r"(.+), ((?:run|read).*)")
ENGINE_COLUMNS = ("engine", "`--engine`", "release", "loading", "arithmetic")
RULE_COLUMNS = ("engine", "weights", "effect", "why", "known by", "source")


def test_the_page_shows_the_records() -> None:
    page = make_page()
    if os.environ.get("FP8CALIB_WRITE_README"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FP8CALIB_WRITE_README=1 writes it again"


def test_every_field_and_rule_has_a_meaning_and_a_source() -> None:
    assert read_meanings(Numerics).keys() >= {each.name for each in fields(Numerics)}
    assert read_meanings(Release).keys() >= {
        each.name for each in fields(Release) if each.name != "version"
    }
    assert all(rule.source for engine in ENGINES.values() for rule in engine.weight_rules)
