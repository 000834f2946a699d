"""Which emulated candidate explains what a server changes, token by token: numbers in, verdict out.

A change is the log-probability of a token minus that by the unquantized model: fp64 [N].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from fp8calib.plugins.server.faults import Fault
from fp8calib.plugins.server.result import ExplanationResult
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.summary import standard_error

UNCHANGED = "unquantized"
"""The candidate that changes nothing."""
_SURE = 3.0
"""One candidate's squared residual must be below another's by this many standard errors."""
_EXPLAINED = 0.5
"""A candidate that explains this share of the squared changes explains the server."""
_RELATED = 0.3
"""So does one with this correlation whose own changes are about as large: engines compute in other
orders and dtypes, which turns many roundings around."""
_LARGER = 2.0
"""The most that squared changes may exceed a candidate's there, and that what a fault leaves may
exceed the squared changes of all roundings."""
_FAR_LESS = 8.0
"""Squared changes that are fewer than those of any candidate by this factor come from no FP8 cache,
even if they are related: 16 bits round, too, and disturb the same tokens."""
_CLOSE = 0.98
"""Where a larger share is explained, faults are not tried."""
_ARITHMETIC = 0.1
"""Nor where the rest is a smaller share of the squared changes of roundings: two correct engines
in float32 leave some 8 %, so a fault that adds no more cannot be told from their arithmetic."""
_ROUNDINGS = 0.25
"""The most that a mix-up of scales may leave, as a share of the squared changes of all roundings.
Another model's scales that clip in the same layers leave more: they round other values."""
_ABOVE_NOISE = 4.0
"""Squared changes that are not this many times those of a repetition are noise."""
_LAYERS_SHARE = 0.2
"""Share of what a candidate leaves that faults of layers have to explain together."""
_LAYERS_SHARE_RELATED = 0.35
"""The same where a candidate is related to the server, but explains less than half."""
_OTHER_WEIGHT = 0.35
"""Half of the difference to 1.0 is left where a layer has another scale (`_list_other_layers`)."""
_SURE_OTHER = 5.0
"""Standard errors of it; there are many layers."""
_SURE_CORRELATION = 0.9
"""Below this correlation, the sentence says what else there may be."""
_NOTHING = 1e-4
"""Root mean square of changes, in nats, that are those of float32. Scales that fit may change far
less than scale 1.0, which clips; so smaller changes than at 1.0 alone do not exclude FP8."""
_NOTABLE = 0.1
"""A layer is named if it explains this share of what the most important one does."""


class ServerFinding(StrEnum):
    """What a server does with the KV cache."""

    CANDIDATE = "candidate"
    """As a candidate, or as a candidate with a fault."""
    UNQUANTIZED = "unquantized"
    OTHER_SCALES = "other-scales"
    """As a candidate, but for some layers: it has other scales there, or other weights."""
    UNKNOWN = "unknown"
    """It differs from every candidate."""
    UNLIKE = "unlike"
    """It differs as much as the candidates do, but on other tokens; the cause is unknown."""
    EQUAL = "equal"
    """Two candidates explain it equally well."""
    NOTHING_EMULATED = "nothing-emulated"
    """There is no candidate to compare with."""
    NOISE = "noise"
    """The candidates change less than the server does from one scoring to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found, and by how much."""

    finding: ServerFinding
    name: str
    """The candidate that explains the server, or comes closest."""
    other: str = ""
    """The candidate that explains it equally well."""
    layers: tuple[int, ...] = ()
    """Layers whose scales differ from those of the candidate."""
    fits: tuple[ExplanationResult, ...] = ()
    """Candidates, the best first."""
    size: float = 0.0
    """Root mean square of the server's changes, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of the server and of candidates on the same tokens."""

    server: torch.Tensor
    candidates: Mapping[str, torch.Tensor]
    lengths: Sequence[int]
    """The number of tokens of every sequence."""
    noise: float = 0.0
    """Mean square of the changes from one scoring of the server to the next."""

    def find(self, name: str) -> torch.Tensor:
        """Give the changes of a candidate."""
        return torch.zeros_like(self.server) if name == UNCHANGED else self.candidates[name]

    def fit(self, name: str) -> ExplanationResult:
        """Compare a candidate with the server."""
        changes = self.find(name)
        return ExplanationResult(
            candidate=name,
            correlation=correlate(self.server, changes),
            residual_rms=math.sqrt(mean_square(self.server - changes)),
            energy=mean_square(changes),
        )

    def is_less(self, one: str, other: str) -> bool:
        """Tell whether the squared residual of `one` is below that of `other`, beyond doubt."""
        left, most = (self.server - self.find(name) for name in (one, other))
        difference = most.square() - left.square()
        error, _ = standard_error(difference, self.lengths)
        return error is not None and float(difference.mean()) > _SURE * error


def mean_square(values: torch.Tensor) -> float:
    """Give the mean of the squares."""
    return float(values.square().mean())


def correlate(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Give Pearson's correlation; None if one does not vary."""
    a, b = one - one.mean(), other - other.mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else None


def diagnose(changes: Changes) -> Diagnosis:
    """Find the candidate that explains the server's changes best."""
    if not changes.candidates:
        size = math.sqrt(mean_square(changes.server))
        return Diagnosis(finding=ServerFinding.NOTHING_EMULATED, name="", size=size)
    names = (UNCHANGED, *changes.candidates)
    fits = sorted(map(changes.fit, names), key=lambda fit: fit.residual_rms)
    return _judge(changes, fits, fits[0])


def explain_with_faults(
    found: Diagnosis,
    changes: Changes,
    base: str,
    faults: Mapping[str, Fault],
    effects: Mapping[str, torch.Tensor],
) -> Diagnosis:
    """Try faults of the candidate `base` too; all on some of the sequences.

    `effects` are the changes of those that were run. A fault is named only if it explains the
    server better than every candidate, beyond doubt; one of all layers only if it leaves no more
    than roundings: other layers cannot be named beside it.
    """
    layers = {name: layer for name in effects if (layer := faults[name].layer) is not None}
    everything = replace(changes, candidates={**changes.candidates, **effects})
    fits = sorted(map(changes.fit, (UNCHANGED, *changes.candidates)), key=lambda f: f.residual_rms)
    tried = [n for n in effects if n in layers or _leaves_roundings(everything, base, n, faults)]
    if not tried:
        return found
    fault = min(map(everything.fit, tried), key=lambda fit: fit.residual_rms)
    if everything.is_less(fault.candidate, fits[0].candidate):
        judged = _judge(everything, [fault, *fits], fault)
        if judged.finding is ServerFinding.CANDIDATE:
            found = replace(judged, fits=(fault, *found.fits))
    if (found.name in effects and found.name not in layers) or not layers:
        return found
    if found.finding is ServerFinding.CANDIDATE and found.name in {base, *layers}:
        others = _list_other_layers(everything, base, found.name, layers, faults)
        return _conclude_others(found, base, others) if others else found
    is_related = found.finding is ServerFinding.CANDIDATE
    if is_related and _explains_most(found.fits[0], found.size**2):
        return found
    share, names = _sum_of_faults(everything, base, layers)
    if share < (_LAYERS_SHARE_RELATED if is_related else _LAYERS_SHARE):
        return found
    return _conclude_others(found, base, [layers[name] for name in names])


def _conclude_others(found: Diagnosis, base: str, layers: Sequence[int]) -> Diagnosis:
    layers = tuple(sorted(set(layers)))
    return replace(found, finding=ServerFinding.OTHER_SCALES, name=base, layers=layers)


def _list_other_layers(
    changes: Changes,
    base: str,
    found: str,
    layers: Mapping[str, int],
    faults: Mapping[str, Fault],
) -> list[int]:
    """List the layers whose scales are neither those of `base` nor 1.0, beyond one with a fault.

    Another scale rounds other values. Where a layer has the scales of `base`, nothing of the
    difference that 1.0 makes there is in what is left; with 1.0, all of it; with any other scale,
    half: its roundings of `base` are missing, and those of 1.0 are not there either.
    """
    own = layers.get(found)
    start = changes.find(base)
    if own is not None and not _leaves_roundings(changes, base, found, faults):
        return [own]
    lost = [name for name, layer in layers.items() if faults[name].is_lost and layer != own]
    if not lost:
        return []
    effects = torch.stack([changes.find(name) - start for name in lost], 1)
    left = changes.server - changes.find(found)
    weights, errors = _regress(effects, left)
    others = [
        layers[name]
        for name, weight, error in zip(lost, weights.tolist(), errors.tolist(), strict=True)
        if weight > _OTHER_WEIGHT and weight > _SURE_OTHER * error
    ]
    return [*others, *([own] if own is not None and others else [])]


def _leaves_roundings(changes: Changes, base: str, name: str, faults: Mapping[str, Fault]) -> bool:
    """Tell whether a fault of `base` leaves only roundings; else the server clips otherwise."""
    most = _ROUNDINGS if faults[name].is_mixup else _LARGER
    return changes.fit(name).residual_rms ** 2 <= most * mean_square(changes.find(base))


def _regress(effects: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit `left` [N] by `effects` [N, F]; give the weights, and their standard errors."""
    weights = torch.linalg.lstsq(effects, left.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    variance = mean_square(left - effects @ weights)
    inverse = torch.linalg.pinv(effects.T @ effects, hermitian=True)
    return weights, (variance * inverse.diagonal().clamp(min=0)).sqrt()


def _judge(
    changes: Changes, fits: Sequence[ExplanationResult], best: ExplanationResult
) -> Diagnosis:
    squares = mean_square(changes.server)

    def conclude(finding: ServerFinding, name: str, other: str = "") -> Diagnosis:
        return Diagnosis(
            finding=finding, name=name, other=other, fits=tuple(fits), size=math.sqrt(squares)
        )

    emulated = [fit for fit in fits if fit.candidate != UNCHANGED]
    closest = emulated[0].candidate
    energies = [fit.energy for fit in emulated]
    if max(energies) <= _ABOVE_NOISE * changes.noise:
        return conclude(ServerFinding.NOISE, closest)
    if _is_explained(best, squares):
        rivals = [fit.candidate for fit in fits if fit.candidate != best.candidate]
        rival = next((name for name in rivals if not changes.is_less(best.candidate, name)), "")
        return conclude(
            ServerFinding.EQUAL if rival else ServerFinding.CANDIDATE, best.candidate, rival
        )
    if squares <= min(energies) / _FAR_LESS:
        return conclude(ServerFinding.UNQUANTIZED, UNCHANGED)
    is_related = any((fit.correlation or 0.0) >= _RELATED for fit in emulated)
    noise = _ABOVE_NOISE * changes.noise
    if squares <= max(min(energies) / _LARGER, noise) and not is_related:
        if min(energies) <= min(noise, squares):
            smallest = min(emulated, key=lambda fit: fit.energy)
            return conclude(ServerFinding.EQUAL, smallest.candidate, UNCHANGED)
        return conclude(ServerFinding.UNQUANTIZED, UNCHANGED)
    is_alike = squares <= _LARGER * max(energies)
    return conclude(ServerFinding.UNLIKE if is_alike else ServerFinding.UNKNOWN, closest)


def _is_explained(best: ExplanationResult, squares: float) -> bool:
    """Tell whether a candidate explains changes of this mean square."""
    if best.candidate == UNCHANGED:
        return False
    is_alike = (best.correlation or 0.0) >= _RELATED and squares <= _LARGER * best.energy
    return is_alike or _explains_most(best, squares)


def _explains_most(fit: ExplanationResult, squares: float) -> bool:
    return fit.residual_rms**2 <= (1 - _EXPLAINED) * squares


def needs_faults(found: Diagnosis) -> bool:
    """Tell whether faults may explain the server better."""
    if found.finding in {ServerFinding.UNKNOWN, ServerFinding.UNLIKE}:
        return True
    roundings = min(fit.energy for fit in found.fits if fit.candidate != UNCHANGED)
    enough = max((1 - _CLOSE) * found.size**2, _ARITHMETIC * roundings)
    return found.finding is ServerFinding.CANDIDATE and found.fits[0].residual_rms ** 2 > enough


def _sum_of_faults(changes: Changes, base: str, names: Collection[str]) -> tuple[float, list[str]]:
    """Explain what `base` leaves by a sum of faults: the share explained, and the main ones."""
    start = changes.find(base)
    left = changes.server - start
    table = torch.stack([changes.find(name) - start for name in names], 1)
    weights, _ = _regress(table, left)
    share = 1 - mean_square(left - table @ weights) / mean_square(left)
    sizes = (table * weights).square().mean(0)
    notable = (sizes > _NOTABLE * sizes.max()).tolist()
    return share, [name for name, is_main in zip(names, notable, strict=True) if is_main]


def describe_diagnosis(
    found: Diagnosis,
    faults: Mapping[str, Fault],
    *,
    has_scales: bool,
    has_reference: bool,
    ppl_ratio: float,
    kld: str,
) -> str:
    """Describe what was found in one sentence, which may name one of the faults.

    `has_scales` says whether scales were named that the server should use, `has_reference` whether
    an unquantized server was asked too. `kld` is the KL divergence in words; empty if unknown.
    """
    correlations = {fit.candidate: fit.correlation for fit in found.fits}
    correlation = correlations.get(found.name) or 0.0
    how = f"(correlation {correlation:.2f})"
    and_kld = f", {kld}" if kld else ""
    match found.finding:
        case ServerFinding.CANDIDATE if found.name in faults:
            text = f"The server behaves like {found.name} {how}: {faults[found.name].effect}."
        case ServerFinding.CANDIDATE if found.name == SCALE_ONE:
            end = "your k/v scales are not in use" if has_scales else "FP8 without scales"
            text = f"The server behaves like {SCALE_ONE} {how}: {end}."
        case ServerFinding.CANDIDATE:
            rest = "; the rest is the engine's arithmetic, or scales close to these"
            rest = "" if correlation >= _SURE_CORRELATION else rest
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
