"""Score a model and its FP8 candidates on the same text: log-probabilities and KL divergences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.kernel_trial import free_bytes, gpus_of
from fp8calib.calibration.memory_plan import HIDDEN_SHARE
from fp8calib.calibration.progress import Progress
from fp8calib.data.sequences import Batch
from fp8calib.errors import VerificationError
from fp8calib.machine import keep_freed_memory, return_freed_memory
from fp8calib.model.load import LoadedModel
from fp8calib.model.prepared import PreparedModel
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.emulation.shared_batch import SharedHooks, can_share, repeat
from fp8calib.verification.token_scores import (
    Logits,
    TokenScores,
    join_scores,
    open_lm_head,
    score_batch,
)

if TYPE_CHECKING:
    from fp8calib.calibration.streamed_model import StreamedModel

AT_ONCE = 8
"""Candidates of a round: their hidden states wait for the head together, and every round runs the
unquantized model again."""
_LOOK_S = 5.0
"""Scores on a GPU are looked at this often."""
_REFERENCE = "the unquantized model"
_OVERFLOW = "float16 overflows at 65504: use --dtype bfloat16 or float32"
_NO_OVERFLOW = {
    True: "the logits are NaN or inf before anything is quantized: are the model's files damaged?",
    False: "quantization turned finite numbers into them: `fp8calib show PATH` shows its scales",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of the reference and of every candidate, and what quantization did to tensors."""

    reference: TokenScores
    candidates: dict[str, TokenScores]
    hooks: dict[str, EmulationHooks]
    """By candidate: they have measured the damage."""


def score(
    model: PreparedModel | StreamedModel,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    hooks: EmulationHooks | None = None,
    *,
    progress: Progress,
    stage: str = "",
    watched: Sequence[torch.Tensor] | None = None,
    shares_batch: bool = False,
) -> Scores:
    """Score the unquantized model, and candidates by their names, on every batch.

    A model that is streamed reads each layer once for all candidates; the scores are the same as
    in memory, bit for bit. `hooks` measure tensors of the unquantized model, whose log-probability
    of tokens `watched`, [L - 1, W] of each sequence, is kept. A model in memory may share a batch
    with its candidates of K, V and q if `shares_batch`: scores then differ by rounding.

    `progress` hears of the tokens of every model and layer that runs by itself, in a `stage` of its
    own if it has a name.
    """
    if stage:
        total = (len(candidates) + 1) * _count_steps(model, batches)
        layers = 0 if isinstance(model, PreparedModel) else len(model.geometry.layers)
        progress.stage(stage, total, unit="tokens", layers=layers)
    models = [hooks or EmulationHooks(Candidate())]
    models += [(each.make_hooks or EmulationHooks)(each) for each in candidates]
    scored: list[list[TokenScores]] = []
    num_seen, looked_at = 0, time.monotonic()
    vocab_size = int(model.model.config.get_text_config(decoder=True).vocab_size)

    def add(batch: Batch, hidden: Sequence[torch.Tensor], logits: Logits) -> None:
        """Score one batch by the last hidden state [B, S, C] of every model."""
        named = None
        if watched is not None:
            named = torch.cat(list(watched[batch.first : batch.first + len(batch.lengths)]))
        scored.append(score_batch(batch, hidden[0], hidden[1:], logits, vocab_size, named))
        # each look waits for a GPU
        if hidden[0].device.type == "cpu" or time.monotonic() > looked_at + _LOOK_S:
            look()

    def look() -> None:
        """Require finite numbers."""
        nonlocal num_seen, looked_at
        new = list(zip(batches[num_seen:], scored[num_seen:], strict=False))
        sums = [each.logprobs.sum() + each.klds.sum() for _, found in new for each in found]
        if new and not bool(torch.stack(sums).isfinite().all()):  # a GPU is waited for once
            for batch, found in new:
                for own, scores in zip(models, found, strict=True):
                    _require_finite(own.candidate.name, scores, batch, model.model.dtype)
        num_seen, looked_at = len(scored), time.monotonic()

    if isinstance(model, PreparedModel):
        _run_whole(model, models, batches, progress.advance, add, shares_batch=shares_batch)
    else:
        # most models fit into memory
        from fp8calib.verification.score_streamed import run_streamed  # noqa: PLC0415

        run_streamed(model, models, batches, progress.advance, add, vocab_size)
    look()
    reference, *others = join_scores(scored, torch.device("cpu"))
    named = {own.candidate.name: own for own in models[1:]}
    return Scores(
        reference=reference,
        candidates=dict(zip(named, others, strict=True)),
        hooks=named,
    )


def score_in_rounds(
    model: PreparedModel | StreamedModel,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    *,
    progress: Progress,
    stage: str,
) -> Iterator[Scores]:
    """Score `AT_ONCE` candidates at a time, in one stage."""
    total = count_in_rounds(len(candidates)) * _count_steps(model, batches)
    progress.stage(stage, total, unit="tokens")
    for start in range(0, len(candidates), AT_ONCE):
        yield score(model, candidates[start : start + AT_ONCE], batches, progress=progress)


def count_in_rounds(num_candidates: int) -> int:
    """Count the passes over a text that candidates take in rounds, with the unquantized model's."""
    return num_candidates + -(-num_candidates // AT_ONCE)


def _count_steps(model: PreparedModel | StreamedModel, batches: Sequence[Batch]) -> int:
    """Count the tokens that a model runs: a streamed one runs them layer by layer."""
    layers = 1 if isinstance(model, PreparedModel) else len(model.geometry.layers)
    return layers * sum(batch.num_tokens for batch in batches)


def _require_finite(name: str, scores: TokenScores, batch: Batch, dtype: torch.dtype) -> None:
    good = scores.logprobs.isfinite() & scores.klds.isfinite()
    if bool(good.all()):
        return
    parts = enumerate(torch.split(good, [len(index) for index in batch.scored]), start=batch.first)
    sample = next(number for number, part in parts if not bool(part.all()))
    error = VerificationError(
        f"{name or _REFERENCE}: NaN or inf in the logits at sample {sample} (counting from 0)",
        hint=_OVERFLOW if dtype is torch.float16 else _NO_OVERFLOW[not name],
    )
    error.candidate = name
    raise error


# --- a model in memory whole ----------------------------------------------------------------------


def _run_whole(
    model: PreparedModel,
    models: Sequence[EmulationHooks],
    batches: Sequence[Batch],
    advance: Callable[[int], None],
    add: Callable[[Batch, Sequence[torch.Tensor], Logits], None],
    *,
    shares_batch: bool,
) -> None:
    """Run batches through the unquantized model and its candidates.

    Weights change once for a group of batches, whose hidden states wait in the memory that
    `find_room` finds.
    """
    keep_freed_memory()
    decoder, limit, keeps = Decoder(model.model), 0, False
    candidates = [hooks.candidate for hooks in models]
    if any(candidate.weights for candidate in candidates):
        limit, keeps = find_room(model.model, candidates)
    together = [[index] for index in range(len(models))]
    if shares_batch:
        sharing = [index for index, each in enumerate(candidates) if can_share(each)]
        together = [sharing, *(alone for alone in together if alone[0] not in sharing)]
    groups: list[list[Batch]] = []  # those of a larger batch than the limit are its own
    tokens = limit + 1
    for batch in batches:
        tokens += batch.input_ids.numel()
        if tokens > limit:
            groups.append([])
            tokens = batch.input_ids.numel()
        groups[-1].append(batch)
    for group in groups:
        hidden: list[list[torch.Tensor]] = [[] for _ in models]
        for chosen in together:
            own = [models[index] for index in chosen]
            hooks = SharedHooks(own) if len(own) > 1 else own[0]
            with emulated(model, hooks, decoder=decoder, keeps_originals=keeps) as run:
                for batch in group:
                    after = run(repeat(batch, len(own)) if len(own) > 1 else batch)
                    for index, rows in zip(chosen, after.chunk(len(own)), strict=True):
                        hidden[index].append(rows)
                    advance(batch.num_tokens * len(own))
        if len(group) > 1:  # the scores of a batch alone leave no holes worth the time
            return_freed_memory()
        with open_lm_head(model.model) as logits:
            for batch, states in zip(group, zip(*hidden, strict=True), strict=True):
                add(batch, states, logits)


def find_room(model: LoadedModel, candidates: Sequence[Candidate]) -> tuple[int, bool]:
    """Count the tokens whose hidden states, of all candidates, may wait for the head.

    On a CPU hidden states take a small part of the memory that the weights take; on a GPU half of
    what is free. Kept weights take no more than half of it before.

    Returns:
        Their number, and whether GPUs keep the weights that candidates change.
    """
    config, values = model.config.get_text_config(decoder=True), dict(model.named_parameters())
    per_token = config.hidden_size * model.dtype.itemsize * len(candidates)
    if not (gpus := gpus_of(model)):
        room = sum(p.nbytes for p in values.values()) // HIDDEN_SHARE
        return int(room // per_token), False
    free, most = {gpu: free_bytes(gpu) for gpu in gpus}, Counter[torch.device]()
    for candidate in candidates:
        changed = Counter[torch.device]()
        for parameter in (each for change in candidate.weights for each in change.parameters):
            changed[values[parameter.name].device] += values[parameter.name].nbytes
        most |= changed
    keeps = all(2 * taken <= free.get(device, 0) for device, taken in most.items())
    room = min(free[gpu] - keeps * most[gpu] for gpu in gpus) // 2
    return int(room // per_token), keeps
