"""Text as it is served: a prompt, then tokens one at a time over the quantized cache.

Where attention of a prompt reads K, V and q in 16 bits, before they are stored, one pass computes
what steps would: a query of the prompt sees them as they were, a later one sees what the cache
returns. What enters the cache is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fp8calib.data.sequences import Batch
from fp8calib.errors import VerificationError
from fp8calib.model.geometry import Attention, Role
from fp8calib.plugins.server.result import ServedResult
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks
from fp8calib.verification.emulation.probabilities import AttentionCall
from fp8calib.verification.score import Scores
from fp8calib.verification.summary import average, compare_paired
from fp8calib.verification.tables import describe_pair
from fp8calib.verification.token_scores import select_lengths

_HINT = "leave out --decode"
_AS_PROMPT = "a prompt"
_SERVED, _PROMPT = "\0served:{}", "\0prompt:{}"
"""The names of what runs beside a candidate."""


def count_prompt(length: int) -> int:
    """Count the tokens of a sequence that are its prompt: half of them."""
    return max(length // 2, 1)


def find_decoded(lengths: Sequence[int]) -> torch.Tensor:
    """Tell which scored tokens a decoding step predicts: bool [N], sequences in order.

    The prompt itself predicts the first token after it.
    """
    parts = [torch.arange(length - 1) >= count_prompt(length) for length in lengths]
    return torch.cat(parts)


class ServedHooks(EmulationHooks):
    """Lets the queries of a prompt see K, V and q in 16 bits, and later ones the quantized cache.

    Raises:
        VerificationError: a layer attends to others than its cache returned, or without a hook.
    """

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate)
        self._stored: Any = WeakIdKeyDictionary()
        """The K that a cache returned -> K and V before; None if they were not changed."""
        self._queries: dict[str, torch.Tensor] = {}
        self._waiting: set[str] = set()
        self.attends = True

    def begin_batch(self, batch: Batch) -> None:
        """Find the prompt of every sequence."""
        super().begin_batch(batch)
        ends = torch.tensor([count_prompt(length) for length in batch.lengths])
        self._prompt = torch.arange(batch.input_ids.shape[1]) < ends[:, None]
        self._waiting.clear()

    def end_batch(self) -> None:
        """Refuse a layer whose attention no hook saw."""
        super().end_batch()
        self._queries.clear()
        for module in sorted(self._waiting):
            raise VerificationError(
                f"--decode: {module} computes attention without a hook, so its prompt cannot be "
                "told from later tokens",
                hint=_HINT,
            )

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize K and V, and keep what they were as long as they live."""
        stored = super().on_kv(attention, key, value)
        is_changed = stored[0] is not key or stored[1] is not value
        if is_changed and stored[0] is key:  # the dictionary holds its values, not its keys
            stored = key.view_as(key), stored[1]
        self._stored[stored[0]] = (key, value) if is_changed else None
        self._waiting.add(attention.module)
        return stored

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Quantize q, and keep what it was until attention runs."""
        self._queries[attention.module] = query
        return super().on_query(attention, query)

    def attend(self, attention: Attention, call: AttentionCall) -> Any:
        """Run attention twice, and take the rows of the prompt from the one in 16 bits."""
        self._waiting.discard(attention.module)
        query = self._queries.pop(attention.module)
        if call.key not in self._stored:
            raise VerificationError(
                f"--decode: {attention.module} attends to other K than its cache returns, so its "
                "prompt cannot be told from later tokens",
                hint=_HINT,
            )
        before = self._stored[call.key]
        if before is None and call.query is query:
            return super().attend(attention, call)
        key, value = before or (call.key, call.value)
        prompt = replace(call, query=query, key=key, value=value).run()[0]
        later, *others = super().attend(attention, call)
        assert self._prompt is not None  # noqa: S101 -- of every batch
        is_prompt = self._prompt.to(later.device)[:, :, None, None]
        return torch.where(is_prompt, prompt, later), *others


def list_served(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """List what runs beside candidates of an engine whose prompts are computed in 16 bits."""
    for candidate in candidates:
        if candidate.has_cache:
            yield replace(candidate, name=_SERVED.format(candidate.name), make_hooks=ServedHooks)
            others = {
                site: quantizer
                for site, quantizer in candidate.quantizers.items()
                if site.role not in {Role.K, Role.V, Role.Q, Role.P}
            }
            if others or candidate.weights:  # else a prompt is the unquantized model's
                yield replace(candidate, name=_PROMPT.format(candidate.name), quantizers=others)


def compare_served(
    candidates: Sequence[Candidate], scores: Scores, lengths: Sequence[int]
) -> tuple[ServedResult, ...]:
    """Compare both scores of each candidate with a KV cache, on tokens that steps predict."""
    decoded = find_decoded(lengths)
    kept = select_lengths(decoded, lengths)
    results = []
    for candidate in candidates:
        if not candidate.has_cache:
            continue
        served = scores.candidates.get(_SERVED.format(candidate.name))
        klds = {candidate.name: scores.candidates[candidate.name].klds}
        klds[_AS_PROMPT] = klds[candidate.name]
        if served is not None:
            prompt = scores.candidates.get(_PROMPT.format(candidate.name), scores.reference)
            klds = {candidate.name: served.klds, _AS_PROMPT: prompt.klds}
        chosen = {name: each[decoded] for name, each in klds.items()}
        pair = compare_paired(candidate.name, _AS_PROMPT, chosen, kept)
        means = {name: average(each, kept) for name, each in chosen.items()}
        text = "a prompt is read from the cache too: decoding computes the same."
        if served is not None:
            text = f"attention of a prompt is in 16 bits; decoding {describe_pair(pair)}."
            if pair.answer == "worse":
                text += " Scores of prompts do not show what it costs."
        results.append(
            ServedResult(
                candidate=candidate.name,
                tokens=int(decoded.sum()),
                is_same=served is None,
                prompt_kld=means[_AS_PROMPT][0],
                prompt_kld_se=means[_AS_PROMPT][1],
                decode_kld=means[candidate.name][0],
                decode_kld_se=means[candidate.name][1],
                difference=pair,
                sentence=f"{candidate.name}: {text}",
            )
        )
    return tuple(results)
