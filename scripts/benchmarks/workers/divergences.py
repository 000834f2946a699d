"""Score FP8 checkpoints as `fp8calib verify` does, all on the same passes of the unquantized model.

python -m scripts.benchmarks.workers.divergences MODEL DTYPE OUT --texts FILE --checkpoints DIR

Reads token ids. Writes {text: {checkpoint: {name: [one sum per sequence]}}} to OUT, again after
every few sequences. It measures no damage, emulates no KV cache, and reads each weight once per
group of sequences: so it takes a fraction of the time of one `verify` per text.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.engines.registry import find_emulated
from fp8calib.fp8.encode import decode_rows, encode_rows
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import MX_BLOCK
from fp8calib.geometry.model_geometry import Linear
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.load import LoadedModel, load_model, open_source
from fp8calib.model.prepared import PreparedModel, prepare
from fp8calib.run.forward.lm_head import open_lm_head
from fp8calib.scales.from_amax import SMALLEST_EXPONENT, power_of_two_scale_of
from fp8calib.stats.fingerprint import fingerprint_model
from fp8calib.verification.candidates import (
    Target,
    build_checkpoint,
    open_candidate,
)
from fp8calib.verification.compare.token_scores import TokenScores, score_batch, split_sequences
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.emulation.fake_quantize import Quantizer
from scripts.benchmarks.workers.timing import load_batches

_GROUP = 8
"""Sequences of each text between two writes of the results; a checkpoint is read once for them."""
_BATCH = 2

Found = dict[str, dict[str, dict[str, list[float]]]]


class Inputs(EmulationHooks):
    """Quantizes inputs of linears, and does not measure the damage."""

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input of a linear, once for all that read the same tensor."""
        quantizer = self._quantizers.get(Site(linear.module, Role.INPUT))
        if quantizer is None:
            return x
        for seen, version, used, quantized, _ in self._inputs:
            if seen is x and version == x._version and used.is_same(quantizer):
                return quantized
        rows = x.reshape(-1, x.shape[-1])
        quantized = self.quantize(quantizer, rows).to(x.dtype).reshape(x.shape)
        self._inputs[:] = [(x, x._version, quantizer, quantized, quantized)]
        return quantized

    def quantize(self, quantizer: Quantizer, rows: torch.Tensor) -> torch.Tensor:
        """Quantize inputs as the engine does."""
        return quantizer.fake(rows).values


class SaturatingInputs(Inputs):
    """Quantizes inputs with the exponents of the OCP specification, whatever the engine does."""

    def quantize(self, quantizer: Quantizer, rows: torch.Tensor) -> torch.Tensor:
        """Quantize blocks of 32, of which the largest values saturate."""
        if quantizer.block != MX_BLOCK:
            return super().quantize(quantizer, rows)
        blocks = rows.reshape(len(rows), -1, MX_BLOCK[1])
        amax = blocks.abs().amax(-1, keepdim=True)
        scale = power_of_two_scale_of(amax, E4M3FN, smallest=SMALLEST_EXPONENT, saturates=True)
        return decode_rows(encode_rows(blocks, scale)).mul_(scale).flatten(-2)


class Scorer:
    """A loaded model and the checkpoints that are compared with it."""

    def __init__(
        self,
        model: LoadedModel,
        prepared: PreparedModel,
        emulations: Mapping[str, Emulation],
        inputs: type[Inputs] = Inputs,
    ) -> None:
        self._inputs = inputs
        self._model = model
        self._prepared = prepared
        self._emulations = emulations
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def score(self, batches: Sequence[Batch]) -> Iterator[dict[str, TokenScores]]:
        """Score every checkpoint on each batch."""
        emulations = (Emulation(), *self._emulations.values())
        hidden = [self._run(emulation, batches) for emulation in emulations]
        with open_lm_head(self._model) as head:
            for batch, (first, *others) in zip(batches, zip(*hidden, strict=True), strict=True):
                scores = score_batch(batch, first, others, head.logits, self._vocab_size)
                yield dict(zip(("reference", *self._emulations), scores, strict=True))

    def _run(self, emulation: Emulation, batches: Sequence[Batch]) -> list[torch.Tensor]:
        with emulated(
            self._model,
            self._prepared.geometry,
            emulation,
            self._inputs(emulation.quantizers),
            originals=self._prepared.weights,
        ) as run:
            return [run(batch) for batch in batches]


@torch.no_grad()
def main(
    model: str,
    dtype: str,
    out: Path,
    texts: list[Path],
    checkpoints: list[str],
    engine: str,
    saturating_inputs: bool,
) -> None:
    """Score group by group, and write what is found so far after each."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: Found = defaultdict(dict)
    with ExitStack() as stack:
        inputs = SaturatingInputs if saturating_inputs else Inputs
        scorer = open_scorer(model, dtype, checkpoints, engine, stack, inputs)
        batches = {text.stem: make_batches(text) for text in texts}
        step = _GROUP // _BATCH
        for first in range(0, max(map(len, batches.values())), step):
            group = [
                (t, each) for t, all_ in batches.items() for each in all_[first : first + step]
            ]
            scores = scorer.score([batch for _, batch in group])
            for (text, batch), found_scores in zip(group, scores, strict=True):
                add(found[text], batch, found_scores)
            out.write_text(json.dumps(found))


def open_scorer(
    model: str,
    dtype: str,
    checkpoints: list[str],
    engine: str,
    stack: ExitStack,
    inputs: type[Inputs],
) -> Scorer:
    """Load the model, and open the checkpoints as an engine loads them."""
    numerics = find_emulated(engine)[1]
    source = open_source(model)
    loaded = load_model(source, dtype=getattr(torch, dtype), device="cpu", device_map=None)
    checkpoint = stack.enter_context(Checkpoint.open(source.folder))
    prepared = prepare(loaded, checkpoint)
    target = Target(
        checkpoint=checkpoint,
        fingerprint=fingerprint_model(source.raw_config, checkpoint),
        geometry=prepared.geometry,
    )
    emulations = {
        name: build_checkpoint(
            open_candidate(name, target, numerics), loaded, target, numerics
        ).emulation
        for name in checkpoints
    }
    return Scorer(loaded, prepared, emulations, inputs)


def make_batches(tokens: Path) -> list[Batch]:
    """Read sequences of one length."""
    rows = torch.cat(load_batches(tokens, "cpu"))
    starts = range(0, len(rows), _BATCH)
    parts = [(first, rows[first : first + _BATCH]) for first in starts]
    return [
        Batch(first=first, input_ids=ids, lengths=(ids.shape[1],) * len(ids), quarter=0)
        for first, ids in parts
    ]


def add(
    found: dict[str, dict[str, list[float]]], batch: Batch, scores: dict[str, TokenScores]
) -> None:
    """Add the sums of each sequence of a batch."""
    reference = scores.pop("reference")
    for name, each in scores.items():
        values = {
            "kld": each.klds,
            "loss": reference.logprobs - each.logprobs,
            "agree": each.agrees,
            "tokens": torch.ones(len(each.klds)),
        }
        sums = found.setdefault(name, {key: [] for key in values})
        for key, value in values.items():
            parts = split_sequences(value.double(), batch.lengths)
            sums[key] += [float(part.sum()) for part in parts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--checkpoints", nargs="+", required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--saturating-inputs", action="store_true")
    main(**vars(parser.parse_args()))
