"""What a server says of tokens while it decodes them, and of the same tokens as a prompt.

Both are its own: no arithmetic of an engine is emulated, and a difference is a fault of one of its
two paths. Half the squared difference of two log-probabilities is, to second order, what the
distributions diverge by (nats). How much they differ from one answer to the next is the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from fp8calib.plugins.server.answers import WrittenSequence
from fp8calib.plugins.server.diagnose import mean_square
from fp8calib.plugins.server.result import ServerDecodeResult
from fp8calib.verification.report import PairedResult
from fp8calib.verification.summary import compare_paired
from fp8calib.verification.tables import tell_more
from fp8calib.verification.token_scores import split_sequences

ROUNDING_RMS = 0.05
"""Root mean square, in nats, of differences that count as rounding: kernels that decode sum in
another order than those of a prompt."""


_DECODED, _NOISE = "decoded", "noise"


def assess_decoding(
    written: Sequence[WrittenSequence],
    again: Sequence[WrittenSequence],
    scored: torch.Tensor,
    scored_again: torch.Tensor,
) -> ServerDecodeResult:
    """Compare both, token by token; the first token after a prompt is the prompt's own.

    `again` are the first sequences once more. `scored` [N] are the log-probabilities of all tokens
    of `written`, each sequence as a prompt; `scored_again` those of the first sequences once more.
    """
    prompts = split_sequences(scored, [len(each.ids) for each in written])
    parts = [
        (each.logprobs - prompt[each.num_prompt - 1 :])[1:].double()
        for each, prompt in zip(written, prompts, strict=True)
    ]
    differences = torch.cat(parts)
    # a change from one answer to the next has twice the variance of an answer
    changes = [x for pair in zip(written, again, strict=False) for x in _list_changes(*pair)]
    repeated = (scored_again - scored[: len(scored_again)]).double()
    noise = (mean_square(torch.tensor(changes).double()) if changes else 0.0) / 2
    noise += mean_square(repeated) / 2
    klds = {
        _DECODED: differences.square() / 2,
        _NOISE: torch.full_like(differences, noise / 2),
    }
    lengths = [len(part) + 1 for part in parts]
    pair = compare_paired(_DECODED, _NOISE, klds, lengths, margin=ROUNDING_RMS**2 / 2)
    rms = mean_square(differences) ** 0.5
    return ServerDecodeResult(
        tokens=len(differences),
        prompt_tokens=sum(each.num_prompt for each in written),
        difference_rms=rms,
        difference_mean=float(differences.mean()),
        noise_rms=noise**0.5,
        answer=pair.answer,
        tokens_to_tell=pair.tokens_to_tell,
        sentence=_describe(pair, rms, noise**0.5),
    )


def _list_changes(one: WrittenSequence, other: WrittenSequence) -> list[float]:
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
        case "worse":
            return (
                f"Decoding and prompts do not agree: the same tokens differ by {size}, so one of "
                "the two is computed wrongly, and scores of prompts do not show it."
            )
        case "cannot-tell":
            return f"Whether decoding and prompts agree cannot be told: {size}{tell_more(pair)}."
        case _:
            return f"Decoding and prompts agree: the same tokens differ by {size}."
