"""The sentence that says what a server does with the KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.plugins.server.diagnose import UNCHANGED, Diagnosis, ServerFinding
from fp8calib.plugins.server.faults import Fault
from fp8calib.verification.report import SCALE_ONE

_CLOSE = 0.9
"""Below this correlation, the sentence says what else there may be."""
_NOTHING = 1e-4
"""Root mean square of changes, in nats, that are those of float32. Scales that fit may change far
less than scale 1.0, which clips; so smaller changes than at 1.0 alone do not exclude FP8."""


def describe_diagnosis(
    found: Diagnosis,
    faults: Mapping[str, Fault],
    *,
    has_scales: bool,
    has_reference: bool,
    ppl_ratio: float,
    kld: str,
) -> str:
    """Describe what was found in one sentence.

    Args:
        found: the diagnosis.
        faults: those that it may name.
        has_scales: whether scales were named that the server should use.
        has_reference: whether an unquantized server was asked too.
        ppl_ratio: the server's perplexity over that of the unquantized model.
        kld: the KL divergence, in words; empty if unknown.
    """
    how = f"(correlation {found.correlation:.2f})"
    and_kld = f", {kld}" if kld else ""
    match found.finding:
        case ServerFinding.CANDIDATE if found.name in faults:
            text = f"The server behaves like {found.name} {how}: {faults[found.name].effect}."
        case ServerFinding.CANDIDATE if found.name == SCALE_ONE:
            end = "your k/v scales are not in use" if has_scales else "FP8 without scales"
            text = f"The server behaves like {SCALE_ONE} {how}: {end}."
        case ServerFinding.CANDIDATE:
            rest = "; the rest is the engine's arithmetic, or scales close to these"
            rest = "" if found.correlation >= _CLOSE else rest
            text = f"The server is explained by {found.name} {how}{rest}."
        case ServerFinding.UNQUANTIZED if has_reference and not found.size:
            text = (
                "The server and --reference-server give the same log-probabilities, bit for bit: "
                "neither has an FP8 KV cache, or both are one server."
            )
        case ServerFinding.UNQUANTIZED:
            emulated = [fit for fit in found.fits if fit.candidate != UNCHANGED]
            least = min(emulated, key=lambda fit: fit.energy)
            is_sure = has_scales or found.size < _NOTHING
            other = "" if is_sure else ", or has scales that fit it: name them with --scales"
            text = (
                f"The server behaves like the unquantized model: its KV cache is not FP8{other} "
                f"(its changes are {found.size:.2g} nats, those of {least.candidate} "
                f"{least.energy**0.5:.2g})."
            )
        case ServerFinding.OTHER_SCALES:
            text = (
                f"The server differs from {found.name} in {_list_layers(found)}, at least: it has "
                "other scales there, or it serves another checkpoint."
            )
        case ServerFinding.EQUAL:
            other = "the unquantized model" if found.other == UNCHANGED else found.other
            text = f"{found.name} and {other} explain the server equally well {how}: use more text."
        case ServerFinding.NOISE:
            text = (
                "nothing can be told: the server's answers differ more from one scoring to the "
                "next than FP8 changes them; are there several servers behind the URL?"
            )
        case ServerFinding.UNLIKE:
            more = "" if has_reference else "; is it the engine? use --reference-server"
            text = (
                f"What the server does cannot be told: it differs as much as {found.name} does, "
                f"but on other tokens {how}{more}."
            )
        case ServerFinding.NOTHING_EMULATED:
            text = (
                f"nothing was emulated: perplexity ratio {ppl_ratio:.4f} to the unquantized "
                f"server{and_kld}."
            )
        case ServerFinding.UNKNOWN:
            text = (
                f"The server differs from every candidate: perplexity ratio {ppl_ratio:.4g}"
                f"{and_kld}; look at the backend, and at the model it serves."
            )
    return text


def _list_layers(found: Diagnosis) -> str:
    *most, last = map(str, found.layers)
    return f"layers {', '.join(most)} and {last}" if most else f"layer {last}"
