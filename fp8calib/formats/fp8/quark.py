"""`quark`: linears by name, then by class, then all others."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    make_scheme,
    read_block,
    read_list,
    unless_ignored,
    weight_contradiction,
)


def _make_finder(path: Path, config: Fields) -> FindScheme:
    """Read Quark's config: linears by name, then by class, then all others."""
    ignored = read_list(path, config, "exclude")
    by_name, by_class = (
        section if isinstance(section := config.get(key), dict) else {}
        for key in ("layer_quant_config", "layer_type_quant_config")
    )
    of_linears = (by_class[name] for name in by_class if "Linear" in name)
    fallback = next(of_linears, config.get("global_quant_config"))

    def find(module: str) -> StoredScheme:
        named = (by_name[pattern] for pattern in by_name if fnmatchcase(module, pattern))
        fields = next(named, fallback)
        if not isinstance(fields, dict) or fields.get("weight") is None:
            raise weight_contradiction(path, module, f"the config says {fields!a:.60}")
        weights, inputs = fields["weight"], fields.get("input_tensors")
        return make_scheme(
            path,
            module,
            _read_spec(path, module, weights),
            None if inputs is None else _read_spec(path, module, inputs),
        )

    return unless_ignored(path, ignored, fnmatchcase, find)


_QUARK_STRATEGIES = {
    "per_tensor": "tensor",
    "per_channel": "channel",
    "per_block": "block",
    "per_group": "group",
}


def _read_spec(path: Path, module: str, spec: object) -> Arguments:
    """Read Quark's spec of one tensor."""
    fields = spec[0] if isinstance(spec, list) and len(spec) == 1 else spec
    if not isinstance(fields, dict) or fields.get("dtype") != "fp8_e4m3":
        raise weight_contradiction(path, module, f"the config says {fields!a:.60}")
    strategy = _QUARK_STRATEGIES.get(str(fields.get("qscheme")), str(fields.get("qscheme")))
    size, block = fields.get("group_size"), fields.get("block_size")
    is_dynamic = fields.get("is_dynamic") is True
    if is_dynamic and strategy == "channel":
        strategy = "token"
    return Arguments(
        strategy=strategy,
        dynamic=is_dynamic,
        group_size=size if type(size) is int else None,
        block=None if block is None else read_block(path, "block_size", block),
    )


def names_outputs(config: Fields) -> bool:
    """Tell whether Quark reads `k_proj.output_scale`: if its config quantizes these outputs.

    vLLM and SGLang read `self_attn.k_scale` whatever the config says, because every attention layer
    gets a KV cache method (their `quark.py`), and they do so in more architectures.
    """
    export = config.get("export")
    return isinstance(export, dict) and bool(export.get("kv_cache_group"))


QUARK = Fp8Dialect(
    name="quark", description="what Quark writes", method="quark", make_finder=_make_finder
)
