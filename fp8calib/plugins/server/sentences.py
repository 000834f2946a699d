"""The sentence that says what a server does with the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8calib.plugins.server.diagnose import UNQUANTIZED, Diagnosis, ServerFinding
from fp8calib.plugins.server.hypotheses import Fault
from fp8calib.verification.report import SCALE_ONE

_CLOSE = 0.9
"""Below this correlation, the sentence says what else there may be."""
_NOTHING = 1e-4
"""Root mean square of changes, in nats, that are those of float32. Scales that fit may change far
less than scale 1.0, which clips; so smaller changes than at 1.0 alone do not exclude FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a sentence refers to."""

    faults: Mapping[str, Fault]
    """Faults by the name in the diagnosis."""
    has_scales: bool
    """Whether scales were named that the server should use."""
    has_reference: bool
    """Whether an unquantized server was asked too."""
    ppl_ratio: float
    kld: str
    """The KL divergence, in words; empty if unknown."""


def describe_diagnosis(found: Diagnosis, context: Context) -> str:
    """Describe what was found in one sentence."""
    how = f"(correlation {found.correlation:.2f})"
    match found.finding:
        case ServerFinding.CANDIDATE:
            return f"the server {_describe_candidate(found, how, context)}."
        case ServerFinding.UNQUANTIZED if context.has_reference and not found.size:
            return (
                "the server and --reference-server give the same log-probabilities, bit for bit: "
                "neither has an FP8 KV cache, or both are one server."
            )
        case ServerFinding.UNQUANTIZED:
            plain = _describe_plain(found, context)
            return f"the server behaves like the unquantized model: {plain}."
        case ServerFinding.OTHER_SCALES:
            return (
                f"the server differs from {found.name} in {_list_layers(found)}, at least: it has "
                "other scales there, or it serves another checkpoint."
            )
        case _:
            return _describe_doubt(found, how, context)


def _describe_doubt(found: Diagnosis, how: str, context: Context) -> str:
    match found.finding:
        case ServerFinding.EQUAL:
            return (
                f"{_name(found.name)} and {_name(found.other)} explain the server equally well "
                f"{how}: use more text."
            )
        case ServerFinding.NOISE:
            return (
                "nothing can be told: the server's answers differ more from one scoring to the "
                "next than FP8 changes them; are there several servers behind the URL?"
            )
        case ServerFinding.UNLIKE:
            more = "" if context.has_reference else "; is it the engine? use --reference-server"
            return (
                f"what the server does cannot be told: it differs as much as {found.name} does, "
                f"but on other tokens {how}{more}."
            )
        case ServerFinding.NOTHING_EMULATED:
            kld = f", {context.kld}" if context.kld else ""
            return (
                f"nothing was emulated: perplexity ratio {context.ppl_ratio:.4f} to the "
                f"unquantized server{kld}."
            )
        case _:
            kld = f", {context.kld}" if context.kld else ""
            return (
                f"the server differs from every candidate: perplexity ratio "
                f"{context.ppl_ratio:.4g}{kld}; look at the backend, and at the model it serves."
            )


def _name(candidate: str) -> str:
    return "the unquantized model" if candidate == UNQUANTIZED else candidate


def _describe_candidate(found: Diagnosis, how: str, context: Context) -> str:
    name = found.name
    fault = context.faults.get(name)
    if fault is None and name != SCALE_ONE:
        close = found.correlation >= _CLOSE
        rest = "" if close else "; the rest is the engine's arithmetic, or scales close to these"
        return f"is explained by {name} {how}{rest}"
    if fault is None:
        end = "your k/v scales are not in use" if context.has_scales else "FP8 without scales"
        return f"behaves like {SCALE_ONE} {how}: {end}"
    return f"behaves like {name} {how}: {fault.effect}"


def _describe_plain(found: Diagnosis, context: Context) -> str:
    least = min((fit for fit in found.fits if fit.name != UNQUANTIZED), key=lambda fit: fit.energy)
    changes = f"{found.size:.2g} nats, those of {least.name} {least.energy**0.5:.2g}"
    is_sure = context.has_scales or found.size < _NOTHING
    other = "" if is_sure else ", or has scales that fit it: name them with --scales"
    return f"its KV cache is not FP8{other} (its changes are {changes})"


def _list_layers(found: Diagnosis) -> str:
    *most, last = map(str, found.layers)
    return f"layers {', '.join(most)} and {last}" if most else f"layer {last}"
