"""A small llama that needs scales in one layer, and servers of it with planted faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.data.plan import Batch
from fp8calib.engines.registry import find_emulated
from fp8calib.fp8.formats import E4M3FN
from fp8calib.geometry.sites import Site
from fp8calib.model.load import build_skeleton, load_model, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.weight_source import WeightSource
from fp8calib.quantization.sources.decoded import open_model
from fp8calib.run.forward.lm_head import open_lm_head
from fp8calib.scales.scale_table import Scale, ScaleSource
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.emulation.kv import emulate_kv, make_unscaled_table
from tests import zoo
from tests.verification.server.fake import Predict

LAYERS = 3
NEEDS_SCALES = 1
VOCABULARY = 96


def save_model(folder: Path, *, seed: int = 0) -> None:
    """Save a llama whose keys and values exceed 448 in one layer; attention matters in it."""
    model = zoo.build(
        "llama",
        seed=seed,
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=256,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                width = 1.0 if "embed" in name else 1.2 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) * width)
        for index, layer in enumerate(model.model.layers):
            attention, is_large = layer.self_attn, index == NEEDS_SCALES
            keys, values = (256.0, 512.0) if is_large else (8.0, 4.0)
            attention.k_proj.weight.mul_(keys)
            attention.q_proj.weight.mul_(1.5 / keys)
            attention.v_proj.weight.mul_(values)
            attention.o_proj.weight.div_(values)
    model.save_pretrained(folder)


class Runner:
    """Runs the model under an emulation, one sequence at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, engine: str = "vllm") -> None:
        source = open_source(str(folder), revision=None, trust_remote_code=False, if_quantized=None)
        self.numerics = find_emulated(engine)[1]
        with open_model(source.folder, if_quantized="") as checkpoint:
            self.geometry = prepare(build_skeleton(source), checkpoint).geometry
            self._model = load_model(source, dtype=dtype, device="cpu", device_map=None)
            self._originals = WeightSource(self._model, checkpoint)

    def predict(self, emulation: Emulation) -> Predict:
        """Give what a server with this emulation predicts."""

        def run(ids: Sequence[int]) -> torch.Tensor:
            tokens = torch.tensor([list(ids)])
            batch = Batch(first=0, input_ids=tokens, lengths=(len(ids),), quarter=0)
            hooks = EmulationHooks(emulation.quantizers)
            with emulated(
                self._model, self.geometry, emulation, hooks, originals=self._originals
            ) as forward:
                hidden = forward(batch)
            with open_lm_head(self._model) as head:
                return torch.log_softmax(head.logits(hidden[0]).float(), -1)

        return run

    def emulate(self, scales: Mapping[Site, float] | None) -> Emulation:
        """Emulate the KV cache with these scales; None: 1.0."""
        table = make_unscaled_table(self.geometry, E4M3FN)
        if scales is not None:
            table = replace(table, scales={**table.scales, **_make_scales(scales)})
        return Emulation(quantizers=emulate_kv(table, self.numerics))


def _make_scales(scales: Mapping[Site, float]) -> dict[Site, Scale]:
    return {
        site: Scale(values=torch.tensor([value]), source=ScaleSource.OBSERVED)
        for site, value in scales.items()
    }
