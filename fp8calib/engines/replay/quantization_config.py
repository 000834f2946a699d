"""Find the quantization config of a checkpoint as engines do, and match its targets."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.model.module_paths import matches_expression, refuse_costly


def matches_target(target: object, *names: str) -> bool:
    """Check whether a target of a config is one of the names, or as `re:...` matches the start.

    Names are the path of a module, and its class where the engine compares that too.

    Raises:
        Refusal: the expression is invalid, or could take exponential time.
    """
    if not isinstance(target, str):
        return False
    if not target.startswith("re:"):
        return target in names
    pattern = target.removeprefix("re:")
    try:
        refuse_costly(pattern)
        return matches_expression(pattern, *names)
    except ValueError as error:
        fix = "name modules by their paths, or by a plain regular expression"
        raise Refusal(f"target {target!a:.60}: {error}", fix=fix) from error


METHODS_FIX = (
    "use a checkpoint in compressed-tensors (which also stores INT4 and INT8 weights), fp8, "
    "ModelOpt or Quark, or a kv-overlay of the unquantized model"
)
"""For a method of quantization beside which vLLM and SGLang have no place for KV scales."""
CONFIG_KEYS = (
    "quantization_config",
    "modelopt",
    "text_config.quantization_config",
    "compression_config",
)
"""Where vLLM looks for the quantization config, in order."""


def find_quantization(folder: ScaleFolder, *, keys: tuple[str, ...]) -> Mapping[str, object] | None:
    """Find the quantization config of a folder in the places and the order of an engine.

    Keys are `modelopt` for `hf_quant_config.json`, else those of config.json; `text_config.KEY` is
    a key of its text part.

    Raises:
        Refusal: it is not an object.
    """
    for key in keys:
        outer, _, inner = key.rpartition(".")
        section = folder.config.get(outer) if outer else folder.config
        found = section.get(inner) if isinstance(section, Mapping) else None
        if key == "modelopt":
            found = folder.modelopt
        if found is None:
            continue
        if not isinstance(found, dict):
            raise Refusal(f"{key} is not an object", fix="write it as a JSON object")
        return found
    return None


def find_modelopt_section(quantization: Mapping[str, object]) -> Mapping[str, object]:
    """Find the part of ModelOpt's config that names the algorithm: nested in its own file."""
    nested = quantization.get("quantization", quantization)
    return nested if isinstance(nested, dict) else {}
