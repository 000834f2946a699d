"""Let the unquantized model write text: seeded, at temperature 1, from the whole distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.errors import VerificationError
from fp8calib.model.load import LoadedModel
from fp8calib.model.topology import name_cache_argument

NUM_GIVEN = 16
"""Tokens of every sequence that begin the text."""
SAMPLING_SEED = 0
_AT_ONCE = 16


def count_given(sequences: Sequence[torch.Tensor]) -> int:
    """Count the tokens that every sequence gives: half of the shortest, at most `NUM_GIVEN`."""
    return max(min(NUM_GIVEN, min(map(len, sequences)) // 2), 1)


def write_text(
    model: LoadedModel, sequences: Sequence[torch.Tensor], progress: Progress
) -> tuple[torch.Tensor, ...]:
    """Replace every sequence, but for its first tokens, by what the model writes."""
    generator = torch.Generator().manual_seed(SAMPLING_SEED)
    given = count_given(sequences)
    progress.stage("writing text", sum(map(len, sequences)), unit="tokens")
    written: list[torch.Tensor] = []
    for start in range(0, len(sequences), _AT_ONCE):
        some = sequences[start : start + _AT_ONCE]
        longest = max(map(len, some))
        ids = torch.stack([sequence[:given] for sequence in some])
        ids = _continue(model, ids, longest, generator, progress)
        written += [row[: len(old)] for row, old in zip(ids, some, strict=True)]
    return tuple(written)


def _continue(
    model: LoadedModel,
    ids: torch.Tensor,
    length: int,
    generator: torch.Generator,
    progress: Progress,
) -> torch.Tensor:
    """Continue ids [B, L] to `length` tokens."""
    cache, new = None, ids.to(model.device)
    argument = name_cache_argument(model)
    while ids.shape[1] < length:
        with torch.inference_mode():
            output = model(input_ids=new, use_cache=True, **{argument: cache})
        cache = getattr(output, argument)
        weights = torch.softmax(output.logits[:, -1].float(), -1).cpu()
        if not bool(weights.isfinite().all()):
            raise VerificationError(
                "the unquantized model gives NaN or inf while it writes text",
                hint="use --dtype bfloat16 or float32",
            )
        drawn = torch.multinomial(weights, 1, generator=generator)
        ids, new = torch.cat([ids, drawn], 1), drawn.to(model.device)
        progress.advance(len(ids))
    return ids
