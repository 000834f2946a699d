"""`modelopt`: one algorithm for all linears, or one for each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from fp8calib import __version__
from fp8calib.checkpoint.model_config import MODELOPT_CONFIG_NAME
from fp8calib.errors import ExportError
from fp8calib.formats.fp8.dialect import NUMBER, Config, ConfigJob, Fp8Dialect
from fp8calib.formats.fp8.quantization_config import (
    Fields,
    FindScheme,
    StoredScheme,
    read_list,
    unless_ignored,
    weight_contradiction,
)
from fp8calib.model.module_paths import split_expert
from fp8calib.numerics.schemes import SCHEMES

_ALGORITHMS = {
    "fp8-static": "FP8",
    "fp8-dynamic": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
}
OLD_BLOCK_ALGORITHM = "FP8_BLOCK_SCALES"
"""An older name of `FP8_PB_WO`: vLLM 0.32.0 (`modelopt.py`) and SGLang 0.5.23 accept it only in
mixed precision, vLLM only for experts."""
_READ_ALGORITHMS = {
    **{algorithm: scheme for scheme, algorithm in _ALGORITHMS.items()},
    "FP8_PB_WO": "fp8-block",
    OLD_BLOCK_ALGORITHM: "fp8-block",
}
"""`FP8_PB_WO` was made for weights alone; engines quantize its inputs by groups of 128 (vLLM 0.32.0
`modelopt.py:resolve`)."""
_PRODUCER = {"name": "fp8calib", "version": __version__}


def read_algorithm(name: object) -> StoredScheme | None:
    """Find the scheme of a ModelOpt `quant_algo`; None if it is not FP8."""
    found = _READ_ALGORITHMS.get(str(name).upper())
    return None if found is None else StoredScheme.of(SCHEMES[found])


def _make_finder(path: Path, config: Fields) -> FindScheme:
    """Read ModelOpt's config, from config.json or hf_quant_config.json."""
    inner = config.get("quantization")
    fields = inner if isinstance(inner, dict) else config
    ignored = read_list(path, fields, "exclude_modules", "ignore")
    layers = fields.get("quantized_layers")
    by_layer = layers if isinstance(layers, dict) else {}
    algorithm = fields.get("quant_algo")

    def find(module: str) -> StoredScheme:
        own = _find_layer(module, by_layer) if algorithm == "MIXED_PRECISION" else algorithm
        scheme = read_algorithm(own)
        if scheme is None:
            raise weight_contradiction(path, module, f"its quant_algo is {own!a:.40}")
        return scheme

    return unless_ignored(path, ignored, fnmatchcase, find)


def _find_layer(module: str, layers: Fields) -> object:
    """Find the algorithm of `module`, or of the nearest module above it that the config lists."""
    place = module
    while place and place not in layers:
        place = place.rpartition(".")[0]
    fields = layers.get(place)
    return fields.get("quant_algo") if isinstance(fields, dict) else None


def _list_excluded(job: ConfigJob) -> list[str]:
    """Name what is not quantized.

    SGLang 0.5.23 looks for the module of all experts of a layer, not for single ones
    (`modelopt_quant.py`, is_layer_excluded); vLLM 0.32.0 takes both.
    """
    excluded, quantized = (
        dict.fromkeys(expert[0] for expert in map(split_expert, names) if expert is not None)
        for names in (job.excluded, job.quantized)
    )
    inside = (f"{module}.*" for module in job.drafter_modules)
    return [*job.excluded, *inside, *(each for each in excluded if each not in quantized)]


def _make_config(job: ConfigJob) -> Config:
    config: Config = {
        "quant_method": "modelopt",
        "quant_algo": _ALGORITHMS[job.scheme.name],
        "ignore": _list_excluded(job),
        "producer": _PRODUCER,
    }
    if job.scheme.has_static_inputs:
        fixed = {"dynamic": False, **NUMBER}
        group = {"input_activations": fixed, "weights": fixed, "targets": ["Linear"]}
        config["config_groups"] = {"group_0": group}
    if job.has_kv:
        config["kv_cache_scheme"] = {"dynamic": False, **NUMBER}
    return config


def _make_own_file(job: ConfigJob) -> Config:
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": _ALGORITHMS[job.scheme.name],
            "kv_cache_quant_algo": "FP8" if job.has_kv else None,
            "exclude_modules": _list_excluded(job),
        },
    }


def _add_kv(path: Path, config: Fields, strategy: str) -> Config:  # noqa: ARG001 -- always tensor
    """Add the KV cache to its own file, or to a section of config.json: nested like it, or flat."""
    nested = config.get("quantization")
    is_flat = path.name != MODELOPT_CONFIG_NAME and not isinstance(nested, dict)
    section = config if is_flat else nested if isinstance(nested, dict) else {}
    if not section.get("quant_algo"):
        raise ExportError(
            f"{path}: the ModelOpt config has no quant_algo, and vLLM and SGLang refuse such a "
            "checkpoint",
            hint="if only its KV cache is quantized, write a kv-overlay of the unquantized model; "
            "otherwise export the model with ModelOpt again",
        )
    if is_flat:
        return {**config, "kv_cache_scheme": {"dynamic": False, **NUMBER}}
    return {**config, "quantization": {**section, "kv_cache_quant_algo": "FP8"}}


MODELOPT = Fp8Dialect(
    name="modelopt",
    description="what ModelOpt writes",
    method="modelopt",
    has_variants=True,
    own_file=MODELOPT_CONFIG_NAME,
    make_finder=_make_finder,
    make_config=_make_config,
    make_own_file=_make_own_file,
    add_kv=_add_kv,
    expressible=tuple(_ALGORITHMS),
    names_kv_by_projection=True,
)
