"""`compressed-tensors`: groups of linears, by name, expression or class."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from fp8calib.errors import ExportError, refusal
from fp8calib.formats.fp8.dialect import HEAD, NUMBER, Config, ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    make_scheme,
    matches_entry,
    read_block,
    read_names,
    unless_ignored,
    weight_contradiction,
)
from fp8calib.formats.fp8.targets import make_targets
from fp8calib.model.module_paths import name_fused_path, split_expert
from fp8calib.numerics.schemes import GROUP_SIZE, MX_BLOCK, Granularity, InputScaling, Scheme

MX_FORMAT = "mxfp8-quantized"
CONFIG_FORMATS = (
    *("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"),
    MX_FORMAT,
)
"""The formats for which vLLM creates schemes of 8 bits."""
_EXPONENT_DTYPES = ("torch.uint8", "uint8")
_DRAFTERS = "re:(model[.](decoder|mtp_block)[.]|self_attn[.]|mlps?[.]|eh_proj$)"
"""`DRAFTER_MODULES`, and those without a path before them in SGLang 0.5.23 (`mimo_mtp.py`,
`longcat_flash_nextn.py`). An entry that is not an expression matches the end of any path."""
_EMBEDDING_MARKS = ("embed", "wte", "word_embeddings")


def _make_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of compressed-tensors: groups of linears, by name, expression or class."""
    from fp8calib.formats.kv.config import check_scheme  # noqa: PLC0415 -- imports torch

    check_scheme(path, config.get("kv_cache_scheme"))  # vLLM stops, whatever the linears are
    sparsity, groups = config.get("sparsity_config"), config.get("config_groups")
    fault = ""
    if isinstance(sparsity, dict) and sparsity.get("targets"):
        fault = "sparsity_config has targets"
    elif not isinstance(groups, dict) or not all(
        isinstance(each, dict) for each in groups.values()
    ):
        fault = f"config_groups is {groups!a:.60}, not an object of groups"
    elif config.get("transform_config"):
        fault = "transform_config rotates tensors while serving"
    if fault or not isinstance(groups, dict):
        raise refusal(path, fault, hint="the weights cannot be read; use another checkpoint")
    ignored = read_names(path, config, "ignore")
    targets = {
        target: group for group in groups.values() for target in read_names(path, group, "targets")
    }

    def find(module: str) -> StoredScheme:
        group = targets.get(_find_target(path, module, targets) or "", {})
        own = group.get("format")
        form = config.get("format", CONFIG_FORMATS[0]) if own is None else own
        if not group or form not in CONFIG_FORMATS:
            says = f"the config's format is {form!a:.40}" if group else "no config group has it"
            raise weight_contradiction(path, module, says)
        return read_scheme(path, module, group)

    return unless_ignored(path, ignored, operator.eq, find)


def require_format(path: Path, config: Mapping[str, object]) -> None:
    """Refuse a config.json where a group of weights has no format, and the config has none either.

    vLLM 0.32.0 (run) and SGLang 0.5.23 (read) have no scheme for such weights; transformers does
    not ask for the format.

    Raises:
        ModelError: naming the group.
    """
    section = config.get("quantization_config")
    is_own = isinstance(section, dict) and section.get("quant_method") == "compressed-tensors"
    groups = section.get("config_groups") if isinstance(section, dict) and is_own else None
    if not isinstance(section, dict) or not isinstance(groups, dict) or section.get("format"):
        return
    for name, group in groups.items():
        if isinstance(group, dict) and group.get("format") is None:
            fault = f"group {name!a:.40} of config_groups has no format, and the config has none"
            raise refusal(path, fault, hint="vLLM and SGLang refuse it; name the format")


def _find_target(path: Path, module: str, targets: Mapping[str, object]) -> str | None:
    """Find the target that applies, in the order of compressed-tensors: name, expression, class."""
    if module in targets:
        return module
    expressions = sorted(target for target in targets if target.startswith("re:"))
    for target in expressions:
        if matches_entry(path, module, target.removeprefix("re:")):
            return target
    is_embedding = any(mark in module.rpartition(".")[2] for mark in _EMBEDDING_MARKS)
    kind = "Embedding" if is_embedding else "Linear"
    return next((target for target in targets if "." not in target and kind in target), None)


def read_scheme(path: Path, module: str, group: Fields) -> StoredScheme:
    """Read the FP8 scheme that a group of a config gives to a module; refuse another one."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    return make_scheme(
        path,
        module,
        _read_arguments(path, module, weights),
        None if inputs is None else _read_arguments(path, module, inputs),
    )


def _read_arguments(path: Path, module: str, given: object) -> Arguments:
    """Read the arguments of one quantizer; missing keys have compressed-tensors' defaults."""
    fields: Fields = given if isinstance(given, dict) else {}
    kind, num_bits = fields.get("type", "int"), fields.get("num_bits", 8)
    if (str(kind).lower(), num_bits) != ("float", 8):
        says = f"{num_bits!a:.20} bits of {kind!a:.20}"
        says = says if isinstance(given, dict) else f"{given!a:.60}"
        raise weight_contradiction(path, module, f"the config says {says}")
    size, block, dynamic = (fields.get(k) for k in ("group_size", "block_structure", "dynamic"))
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(fields.get("strategy") or inferred).lower()
    has_groups, has_blocks = size not in (None, -1), block is not None
    is_misfit = (has_groups and strategy != "group") or (has_blocks and strategy != "block")
    fault = ""
    if fields.get("symmetric", True) is not True:
        fault = "has zero points"
    elif is_misfit:
        fault = f"is per {strategy!a:.40} with the size of groups or blocks"
    elif dynamic not in (None, True, False):
        fault = f"has dynamic {dynamic!a:.40}"
    if fault:
        raise refusal(path, f"{module}: FP8 that {fault} is not supported")
    return Arguments(
        strategy=strategy,
        dynamic=bool(dynamic),
        group_size=size if type(size) is int else None,
        block=None if block is None else read_block(path, "block_structure", block),
        has_exponents=fields.get("scale_dtype") in _EXPONENT_DTYPES,
    )


def _make_quantizer(strategy: str, *, dynamic: bool = False, **sizes: object) -> Config:
    """Make the arguments of one FP8 quantizer, as compressed-tensors spells them."""
    return {**NUMBER, "strategy": strategy, **sizes, "symmetric": True, "dynamic": dynamic}


def _make_group(targets: list[str], scheme: Scheme) -> Config:
    mx_sizes = {"group_size": MX_BLOCK[1], "scale_dtype": "torch.uint8"}
    form = "naive-quantized" if scheme.inputs is InputScaling.NONE else "float-quantized"
    if scheme.is_mx:
        form = MX_FORMAT
        weights = _make_quantizer("group", dynamic=False, **mx_sizes)
    elif scheme.weights is Granularity.BLOCK:
        weights = _make_quantizer("block", block_structure=list(scheme.block))
    else:
        weights = _make_quantizer(scheme.weights.value)
    inputs: Config | None = None
    if scheme.has_static_inputs:
        inputs = _make_quantizer("tensor")
    elif scheme.inputs is InputScaling.GROUP:
        sizes = mx_sizes if scheme.is_mx else {"group_size": GROUP_SIZE}
        inputs = _make_quantizer("group", dynamic=True, **sizes)
    elif scheme.inputs is not InputScaling.NONE:
        inputs = _make_quantizer(scheme.inputs.value, dynamic=True)
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def _make_config(job: ConfigJob) -> Config:
    """Make the config; its format is that of the first group, because TGI reads only that one."""
    groups = [_make_group(["Linear"], job.scheme)]
    for scheme, modules in job.groups.items():
        if scheme != job.scheme:
            others = [
                each for other, named in job.groups.items() if other != scheme for each in named
            ]
            groups.append(_make_group(make_targets(modules, others), scheme))
    config: Config = {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"],
        "quantization_status": "compressed",
        "ignore": _list_excluded(job),
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
    }
    if job.has_kv:
        config["kv_cache_scheme"] = _make_quantizer("tensor")
    return config


def _add_kv(path: Path, config: Fields, strategy: str) -> Config:
    """Add the scheme of the KV cache; vLLM needs config_groups for `attn_head`."""
    if not isinstance(config.get("config_groups"), dict):
        raise ExportError(
            f"{path}: config_groups is {config.get('config_groups')!a:.60}, and engines refuse it",
            hint="config_groups is an object of groups; restore the config of the quantized model",
        )
    return {**config, "kv_cache_scheme": _make_quantizer(strategy)}


def _list_excluded(job: ConfigJob) -> list[str]:
    """Name what is not quantized: `ConfigJob.excluded`, with matches under any prefix.

    A tower or projector also has one expression for all its linears. Their names are needed beside
    it where an engine calls the tower otherwise: it renames names, not expressions (vLLM 0.32.0
    models/minicpmv4_6.py). Linears in numbered layers also have an expression for the end of their
    paths. Projections that engines join are named as one too: SGLang asks for `qkv_proj` if the
    class does not say what it joins. No expression has a quantifier after a bracket, because
    `check` does not evaluate those.
    """
    joined = {name_fused_path(module) for module in job.quantized}
    names = [HEAD, *([_DRAFTERS] if job.drafter_modules else [])]
    layers = sorted({item.layer for item in job.unquantized if item.layer is not None})
    names += (f"re:(model|mtp)[.]layers[.]{layer}[.]" for layer in layers)
    for item in job.unquantized:
        ends = (item.tree,) if item.tree else _add_joined(item.ends, joined)
        names += _add_joined(item.linears, joined)
        # matches the modules whose path ends so, and those inside them
        names += (f"re:(.*[.]|){re.escape(end)}([.].*|)$" for end in ends)
    return list(dict.fromkeys(names))


def _add_joined(paths: Iterable[str], quantized: Collection[str]) -> Iterator[str]:
    """Add the weights that engines join linears into, except weights with a quantized part."""
    for path in paths:
        yield path
        whole = name_fused_path(path)
        is_quantized = any(f".{each}".endswith(f".{whole}") for each in quantized)
        if split_expert(path) is None and not is_quantized:
            yield whole
            if whole.endswith(".fused_qkv_a_proj"):
                yield f"{whole}_with_mqa"  # as SGLang 0.5.23 names it


COMPRESSED_TENSORS = Fp8Dialect(
    name="compressed-tensors",
    description="what LLM Compressor writes",
    method="compressed-tensors",
    make_finder=_make_finder,
    make_config=_make_config,
    has_groups=True,
    add_kv=_add_kv,
    kv_strategies=("tensor", "attn_head"),
    scalar_shape=(1,),
)
