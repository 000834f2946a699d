"""What a server says of tokens while it decodes them, and of the same tokens as a prompt.

Both are its own: no arithmetic of an engine is emulated, and a difference is a fault of one of its
two paths. Half the squared difference of two log-probabilities is, to second order, what the
distributions diverge by (nats). How much they differ from one answer to the next is the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from fp8calib.plugins.server.answers import ServerScores
from fp8calib.plugins.server.result import ServerDecodeResult
from fp8calib.verification.report import PairedAnswer, PairedResult
from fp8calib.verification.summary import compare_paired
from fp8calib.verification.tables import tell_more

ROUNDING_RMS = 0.05
"""Root mean square, in nats, of differences that count as rounding: kernels that decode sum in
another order than those of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A sequence whose second half a server wrote."""

    ids: torch.Tensor
    """All tokens, those of the prompt first: int64 [L]."""
    logprobs: torch.Tensor
    """Of the tokens after the prompt, as they were decoded: fp32 [L - P]."""

    @property
    def num_prompt(self) -> int:
        """The tokens of the prompt."""
        return len(self.ids) - len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingAnswers:
    """What a server wrote and scored."""

    decoded: Sequence[Decoded]
    again: Sequence[Decoded]
    """The first sequences once more."""
    scores: ServerScores
    """Of all tokens of `decoded`, each sequence as a prompt."""
    scores_again: ServerScores
    """Of the first sequences once more."""


def assess_decoding(answers: DecodingAnswers) -> ServerDecodeResult:
    """Compare both, token by token; the first token after a prompt is the prompt's own."""
    parts = [
        (one.logprobs - scores.logprobs[one.num_prompt - 1 :])[1:].double()
        for one, scores in zip(answers.decoded, answers.scores.sequences, strict=True)
    ]
    differences = torch.cat(parts)
    noise = _measure_noise(answers)
    klds = {
        _DECODED: differences.square() / 2,
        _NOISE: torch.full_like(differences, noise / 2),
    }
    lengths = [len(part) + 1 for part in parts]
    pair = compare_paired(_DECODED, _NOISE, klds, lengths, margin=ROUNDING_RMS**2 / 2)
    rms = float(differences.square().mean()) ** 0.5
    return ServerDecodeResult(
        tokens=len(differences),
        prompt_tokens=sum(one.num_prompt for one in answers.decoded),
        difference_rms=rms,
        difference_mean=float(differences.mean()),
        noise_rms=noise**0.5,
        answer=pair.answer.value,
        tokens_to_tell=pair.tokens_to_tell,
        sentence=_describe(pair, rms, noise**0.5),
    )


_DECODED, _NOISE = "decoded", "noise"


def _measure_noise(answers: DecodingAnswers) -> float:
    """Give the mean square by which one difference of both scores is noise.

    The change from one answer to the next has twice the variance of an answer.
    """
    written = [
        change
        for one, other in zip(answers.decoded, answers.again, strict=False)
        for change in _list_changes(one, other)
    ]
    pairs = zip(answers.scores.sequences, answers.scores_again.sequences, strict=False)
    scored = torch.cat([(other.logprobs - one.logprobs).double() for one, other in pairs])
    mean_written = torch.tensor(written, dtype=torch.float64).square().mean() if written else 0.0
    return float(mean_written + scored.square().mean()) / 2


def _list_changes(one: Decoded, other: Decoded) -> list[float]:
    """List the changes as long as both write the same tokens."""
    count = one.num_prompt
    rows = zip(
        one.ids[count:].tolist(),
        other.ids[count:].tolist(),
        (other.logprobs - one.logprobs).tolist(),
        strict=True,
    )
    return [change for _, _, change in takewhile(lambda row: row[0] == row[1], rows)]


def _describe(pair: PairedResult, rms: float, noise: float) -> str:
    size = f"{rms:.2g} nats (root mean square; {noise:.2g} from one answer to the next)"
    match pair.answer:
        case PairedAnswer.WORSE:
            return (
                f"Decoding and prompts do not agree: the same tokens differ by {size}, so one of "
                "the two is computed wrongly, and scores of prompts do not show it."
            )
        case PairedAnswer.CANNOT_TELL:
            return f"Whether decoding and prompts agree cannot be told: {size}{tell_more(pair)}."
        case _:
            return f"Decoding and prompts agree: the same tokens differ by {size}."
