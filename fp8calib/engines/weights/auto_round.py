"""What engines refuse of a config with `quant_method: auto-round` before they read a weight.

vLLM 0.32.0 `quantization/inc/inc.py` (INCConfig), run; SGLang 0.5.23 `quantization/auto_round.py`
(AutoRoundConfig), read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.verdicts import Refusal

ACCEPTED = "auto-round: accepted"
"""The fact with the types of weights and the packing formats that a release accepts."""
AUTO_ROUND_FIX = "export it with --format llm_compressor, or fp8 where weights are in blocks"
_KINDS = {"fp8": "fp"}
_MX = "data_type mx_fp"
_GROUP = 32
_DEFAULTS = {"fp": "auto_round:fp8", "mx_fp": "auto_round:llm_compressor"}


def require_auto_round(config: Mapping[str, object], release: Release) -> None:
    """Require that a release accepts the config.

    Raises:
        Refusal: it does not start.
    """
    if (fault := next(_list_faults(config, release), None)) is not None:
        raise Refusal(f"{release.title} refuses {fault}", fix=AUTO_ROUND_FIX)


def _list_faults(config: Mapping[str, object], release: Release) -> Iterator[str]:
    accepted = release.list_values(ACCEPTED)
    named = config.get("data_type", "int")
    kind = _KINDS.get(str(named), str(named))
    if f"data_type {kind}" not in accepted and ("mx_fp" not in kind or _MX not in accepted):
        yield f"data_type {named!a:.40} of auto-round (ValueError)"
    form = config.get("packing_format") or _DEFAULTS.get(kind, "auto_round:auto_gptq")
    if f"packing_format {form}" not in accepted:
        yield f"packing_format {form!a:.60} of auto-round (ValueError)"
    if kind not in _DEFAULTS:
        return
    size = config.get("group_size")
    wanted: dict[str, object] = {"sym": True, "act_bits": 8, "act_sym": True, "act_dynamic": True}
    if kind == "fp":
        if not isinstance(size, list) or len(size) != 2:
            yield f"FP8 weights of auto-round in other groups than blocks (group_size {size!a:.40})"
            return
        wanted |= {"act_group_size": size[0], "activation_scheme": "dynamic", "fmt": "e4m3"}
    elif config.get("bits") == 8:
        wanted |= {"group_size": _GROUP, "act_group_size": _GROUP}
    else:
        return
    wanted |= {"bits": 8, "act_data_type": kind, "packing_format": _DEFAULTS[kind]}
    for key, value in wanted.items():
        if config.get(key) not in (None, value):
            yield f"auto-round's {key} {config[key]!a:.40} (AssertionError)"
