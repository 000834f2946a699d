"""All dialects of FP8 checkpoints. Every list of them is made from here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.errors import UsageError, refusal, suggest
from fp8calib.formats.fp8.auto_round import AUTO_ROUND, AUTO_ROUND_MX
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.modelopt import MODELOPT
from fp8calib.formats.fp8.quantization_config import Fields, FindScheme
from fp8calib.formats.fp8.quark import QUARK
from fp8calib.formats.fp8.uniform import AUTOFP8, FBGEMM, FINEGRAINED, MXFP8
from fp8calib.numerics.schemes import Granularity, Scheme

FP8_DIALECTS: dict[str, Fp8Dialect] = {
    dialect.name: dialect
    for dialect in (
        *(COMPRESSED_TENSORS, AUTOFP8, FINEGRAINED, MODELOPT, MXFP8, QUARK, FBGEMM),
        *(AUTO_ROUND, AUTO_ROUND_MX),
    )
}
"""All dialects by name; of several with one method, `load_finder` gives the first."""


def list_written_fp8() -> tuple[Fp8Dialect, ...]:
    """List the dialects that can be written: the formats of `quantize --format`."""
    return tuple(each for each in FP8_DIALECTS.values() if each.make_config is not None)


def find_written(name: str, scheme: Scheme) -> Fp8Dialect:
    """Find the dialect that `--format` names, if it can express `scheme`.

    Raises:
        UsageError: there is none that can be written, or it cannot.
    """
    written = {each.name: each for each in list_written_fp8()}
    dialect = written.get(name)
    if dialect is not None and scheme.name in dialect.schemes:
        return dialect
    fault = f"--format {name}: unknown format"
    hint = suggest(name, written, what="formats")
    if dialect is not None:
        others = ", ".join(each.name for each in written.values() if scheme.name in each.schemes)
        fault = f"--format {name} cannot express --scheme {scheme.name}"
        hint = f"{name} writes {', '.join(dialect.schemes)}; {scheme.name} can be written as "
        hint += others
    raise UsageError(fault, hint=hint)


def list_scale_names(*, of_inputs: bool = False) -> tuple[str, ...]:
    """List the names that dialects give the scales of weights, or of inputs."""
    fields = ("input_scale_name",) if of_inputs else ("scale_name", "block_scale_name")
    return _list_names(tuple(FP8_DIALECTS), *fields)


@cache  # by names, because a dialect may be registered after the first call
def _list_names(dialects: tuple[str, ...], *fields: str) -> tuple[str, ...]:
    chosen = (getattr(FP8_DIALECTS[name], field) for name in dialects for field in fields)
    return tuple(dict.fromkeys(chosen))


def load_finder(folder: Path, config: Fields) -> tuple[Fp8Dialect, FindScheme]:
    """Find a checkpoint's dialect by its config, and the function that gives a linear's scheme.

    Raises:
        ModelError: there is no quantization config, or its method is not supported.
    """
    path = folder / CONFIG_NAME
    dialects = FP8_DIALECTS.values()
    section = next((section for _, section in find_quantization_configs(config)), None)
    owners = (each for each in dialects if each.own_file and (folder / each.own_file).is_file())
    if section is None and (owner := next(owners, None)) is not None:
        path = folder / owner.own_file
        document = load_json_object(path, parse=parse_unique_keys)
        section = {**document, "quant_method": owner.method}
    if section is None:
        hint = "engines learn from it how inputs are quantized; copy the checkpoint's config"
        raise refusal(path, "the weights are FP8, but there is no quantization_config", hint=hint)
    method = section.get("quant_method")
    dialect = next((each for each in dialects if each.has_method(method)), None)
    if dialect is None:
        known = ", ".join(dict.fromkeys(each.method for each in dialects))
        raise refusal(
            path, f"quant_method is {method!a:.40}", hint=f"supported FP8 methods: {known}"
        )
    return dialect, dialect.make_finder(path, section)


def refine_dialect(dialect: Fp8Dialect, scales: Mapping[str, Granularity]) -> Fp8Dialect:
    """Choose between the dialects of one method: by `scales`, granularities by the scales' names.

    Returns:
        The dialect that gives a scale its name, if `dialect`, the first of the method, does not.
    """
    others = (each for each in FP8_DIALECTS.values() if each.method == dialect.method)
    unknown = [item for item in scales.items() if not dialect.gives_name(*item)]
    own = (each for each in others if any(each.gives_name(*item) for item in unknown))
    return next(own, dialect)
