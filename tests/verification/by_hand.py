"""FP8 by hand: torch's casts, a cache that quantizes, and models with replaced weights.

The computations share no code with the product; only the opening of models does.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.engines.arithmetic import Numerics
from fp8calib.formats.compute import compute_linear_scales
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import ModelGeometry, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.topology import find_geometry
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.rules import AMAX
from fp8calib.numerics.schemes import Scheme
from fp8calib.quantization.calibrated_scales import find_input_scale
from fp8calib.quantization.select import Selection, find_selection
from fp8calib.quantization.settings import PlanSettings
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, emulated
from fp8calib.verification.emulation.weights import changed_weights, emulate_planned, emulate_stored
from fp8calib.verification.score import Scores, score

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
}
NUMPY = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
E4M3 = torch.float8_e4m3fn
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Subject:
    """A tiny model, and what the product needs to know about it."""

    model: PreTrainedModel
    geometry: ModelGeometry
    originals: WeightSource
    selection: Selection

    @property
    def prepared(self) -> PreparedModel:
        """The model in memory whole, as the product scores it."""
        return PreparedModel(
            model=self.model,
            checkpoint=self.originals.source,
            geometry=self.geometry,
            unobserved={},
            weights=self.originals,
            ignored=frozenset(),
        )


def score_all(
    subject: Subject,
    candidates: Mapping[str, Candidate],
    batches: Sequence[Batch],
    advance: Callable[[int], None] = lambda _tokens: None,
) -> Scores:
    """Score candidates by the product, in a model that is in memory whole."""
    named = [replace(each, name=name) for name, each in candidates.items()]
    progress: Any = SimpleNamespace(stage=lambda *_, **__: None, advance=advance)
    return score(subject.prepared, named, batches, progress=progress)


@contextmanager
def opened(model: PreTrainedModel, folder: Path) -> Iterator[Subject]:
    """Write `model` as a checkpoint and open it; the model in memory is `model` itself."""
    model.save_pretrained(folder)
    with Checkpoint.open(folder) as checkpoint:
        yield make_subject(model, checkpoint)


def make_subject(model: PreTrainedModel, checkpoint: Checkpoint) -> Subject:
    """Find what the product needs to know about a model and its checkpoint."""
    source = WeightSource(model, checkpoint)
    geometry, _ = find_geometry(model, source.single_tensors, checkpoint_dtype="float32")
    return Subject(model, geometry, source, find_selection(checkpoint))


def emulate_scheme(
    subject: Subject, scheme: Scheme, numerics: Numerics, *, stats: RunStats | None = None
) -> Candidate:
    """Ask the product what an engine makes of a plan of one scheme."""
    settings = PlanSettings(scheme=scheme, dialect=COMPRESSED_TENSORS)
    return emulate_plan(subject, settings, numerics, stats=stats)


def emulate_plan(
    subject: Subject,
    settings: PlanSettings,
    numerics: Numerics,
    *,
    stats: RunStats | None = None,
) -> Candidate:
    """Ask the product what an engine makes of what `quantize` would write."""
    scale_input = None
    if stats is not None:
        table = compute_linear_scales(stats, E4M3FN)
        scale_input = partial(find_input_scale, stats, table, AMAX)
    return emulate_planned(
        settings,
        subject.selection,
        subject.geometry,
        subject.originals,
        numerics,
        scale_input=scale_input,
    )


def emulate_checkpoint(
    subject: Subject, checkpoint: Fp8Checkpoint, numerics: Numerics
) -> Candidate:
    """Ask the product what an engine makes of a checkpoint."""
    source, original = WeightSource(subject.model, checkpoint), subject.originals.source
    return emulate_stored(checkpoint, original, subject.geometry, source, numerics)


def hold_weights(subject: Subject, candidate: Candidate) -> dict[str, torch.Tensor]:
    """Copy every parameter while the weights of a candidate are in the model."""
    with changed_weights(subject.model, candidate.weights, subject.originals, {}, {}):
        return {name: p.detach().clone() for name, p in subject.model.named_parameters()}


def make_table(
    subject: Subject,
    values: Mapping[Site, torch.Tensor | float],
    *,
    tp: int = 1,
    per_head: bool = False,
    fmt: Fp8Format = E4M3FN,
) -> ScaleTable:
    """Wrap scales; a number is that of a whole tensor."""
    scales = {
        site: Scale(
            values=torch.tensor([value]) if isinstance(value, float) else value,
            source="observed",
        )
        for site, value in values.items()
    }
    return ScaleTable(geometry=subject.geometry, fmt=fmt, tp=tp, per_head=per_head, scales=scales)


def make_batch(lengths: list[int], *, seed: int = 11, first: int = 0) -> Batch:
    """Draw random sequences and pad them on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(first=first, input_ids=padded, lengths=tuple(lengths))


def padding_mask(batch: Batch) -> torch.Tensor | None:
    """Return 1 at tokens and 0 at padding: int64 [B, L]; None if nothing is padded."""
    width = max(batch.lengths)
    if min(batch.lengths) == width:
        return None
    return torch.tensor([[int(place < n) for place in range(width)] for n in batch.lengths])


def plain_forward(model: PreTrainedModel, batch: Batch, cache: Any = None) -> torch.Tensor:
    """Run the model without its head: the last hidden state [B, L, C]."""
    with torch.no_grad():
        hidden: torch.Tensor = model.base_model(
            input_ids=batch.input_ids,
            attention_mask=padding_mask(batch),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
    return hidden


def emulate(
    subject: Subject, emulation: Candidate, *batches: Batch, hooks: EmulationHooks | None = None
) -> list[torch.Tensor]:
    """Run batches through the product's emulation."""
    hooks = hooks or EmulationHooks(emulation)
    with emulated(subject.prepared, hooks) as run:
        return [run(batch) for batch in batches]


PLAIN = Numerics(name="plain")
PADDED = make_batch([5, 20, 13])
FULL = make_batch([20, 20], seed=12)
BATCHES = (PADDED, FULL)


# --- casts -------------------------------------------------------------------------------------


def cast(x: torch.Tensor, scale: Any, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Divide in fp32, clamp, cast to torch's 8-bit dtype and back, multiply."""
    largest = LARGEST[dtype]
    codes = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return (codes.float() * scale).to(x.dtype)


def search_down(x: torch.Tensor, scale: Any, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Find the nearest value toward zero in the list of ml_dtypes' values."""
    values = np.arange(256, dtype=np.uint8).view(NUMPY[dtype]).astype(np.float32)
    magnitudes = np.unique(values[np.isfinite(values) & (values >= 0)])
    scaled = (x.float() / scale).numpy()
    below = magnitudes[np.searchsorted(magnitudes, np.abs(scaled), side="right") - 1]
    return torch.from_numpy(np.copysign(below, scaled)) * scale


def tensor_scale(*tensors: torch.Tensor) -> float:
    """Compute the scale that fits all `tensors`, rounded to fp32."""
    largest = max(float(x.abs().max()) for x in tensors)
    return float(np.float32(largest) / np.float32(448))


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Compute a scale for each row of the last dimension."""
    return x.float().abs().amax(-1, keepdim=True) / torch.tensor(448.0)


def cast_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantize each row of the last dimension with its own scale."""
    return cast(x, row_scales(x).clamp(min=2.0**-126))


def cast_groups(x: torch.Tensor) -> torch.Tensor:
    """Quantize 128 channels at a time, piece by piece."""
    return torch.cat([cast_rows(piece) for piece in x.split(128, -1)], -1)


def cast_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Quantize a weight [out, in] 128 x 128 at a time, piece by piece."""
    strips = []
    for strip in weight.split(128, 0):
        pieces = [cast(piece, tensor_scale(piece)) for piece in strip.split(128, 1)]
        strips.append(torch.cat(pieces, 1))
    return torch.cat(strips, 0)


def cast_mx(x: torch.Tensor) -> torch.Tensor:
    """Quantize 32 channels at a time by powers of two: MXFP8, exponents found by counting."""
    pieces = []
    for piece in x.split(32, -1):
        scales = [
            2.0 ** max(ceil_log2(value / 448), -126)
            for value in piece.abs().amax(-1).double().flatten().tolist()
        ]
        pieces.append(cast(piece, torch.tensor(scales).reshape(*piece.shape[:-1], 1)))
    return torch.cat(pieces, -1)


def ceil_log2(x: float) -> int:
    """Find the smallest power of two that is not less, by counting."""
    exponent = -200
    while 2.0**exponent < x:
        exponent += 1
    return exponent


# --- K, V and q --------------------------------------------------------------------------------


class HandCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """transformers' cache, whose layers store quantized K and V."""

    def __init__(self, config: Any, changes: Mapping[int, tuple[Change, Change]]) -> None:
        super().__init__(config=config)
        self._changes = changes
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Quantize, then store."""
        self.seen[layer_idx] = (key.clone(), value.clone())
        change_key, change_value = self._changes[layer_idx]
        return super().update(change_key(key), change_value(value), layer_idx, *args, **kwargs)


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


@contextmanager
def changed_queries(model: PreTrainedModel, changes: list[Change]) -> Iterator[None]:
    """Change q as torch's kernel or the family's eager function receives it, in layer order."""
    kernel = functional.scaled_dot_product_attention
    family = sys.modules[type(model).__module__]
    eager = getattr(family, "eager_attention_forward", None)
    queue: list[Change] = []

    def next_change() -> Change:
        if not queue:
            queue.extend(changes)
        return queue.pop(0)

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return kernel(next_change()(query), *args, **kwargs)

    def attend_eagerly(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager(module, next_change()(query), *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attend))
        if eager is not None:
            stack.enter_context(patch.object(family, "eager_attention_forward", attend_eagerly))
        yield
    assert not queue


# --- models whose weights are replaced -----------------------------------------------------------


ROUTERS = ("gate", "router", "shared_expert_gate", "modality_router", "in_proj_ba")
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass
class Recipe:
    """What a scheme does, by hand: weights [out, in] and inputs."""

    weight: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
    """Given the weight and all of its fused group."""
    inputs: Callable[[str], Change] = field(default=lambda _name: _leave)
    """Given a module's path."""


def _leave(x: torch.Tensor) -> torch.Tensor:
    return x


def quantize_by_hand(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    copy = deepcopy(model)
    originals = dict(model.named_modules())
    for name, module in copy.named_modules():
        if name.rpartition(".")[2] in (*ROUTERS, "lm_head") or "unembed" in name:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            group = [_out_in(member) for member in _fused_with(name, originals)]
            replaced = recipe.weight(_out_in(originals[name]), group)
            module.weight.data = replaced.T.contiguous() if _is_conv(module) else replaced
            if not _is_in_a_layer(name):
                continue  # no hook sees its inputs
            change = recipe.inputs(name)
            module.register_forward_pre_hook(
                lambda _module, args, change=change: (change(args[0]), *args[1:])
            )
        elif is_experts(module):
            _replace_experts(name, module, recipe)
    return copy


def _is_in_a_layer(name: str) -> bool:
    return re.search(r"\.(layers|h)\.\d+\.", name) is not None


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, Conv1D)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of all experts of a layer."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter)


def _out_in(module: Any) -> torch.Tensor:
    return module.weight.detach().T if _is_conv(module) else module.weight.detach()


def _fused_with(name: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    parent, _, last = name.rpartition(".")
    names = next((group for group in FUSED if last in group), (last,))
    return [modules[f"{parent}.{n}"] for n in names if f"{parent}.{n}" in modules]


def _replace_experts(name: str, experts: Any, recipe: Recipe) -> None:
    """Run every expert alone, in a loop, on quantized rows and weights."""
    is_gpt_oss = type(experts).__name__ == "GptOssExperts"
    first = [
        quantize_expert(weight, recipe, flip=True)
        if is_gpt_oss
        else quantize_gate_up(weight, recipe)
        for weight in experts.gate_up_proj.detach()
    ]
    down = [
        quantize_expert(weight, recipe, flip=is_gpt_oss) for weight in experts.down_proj.detach()
    ]
    change_first, change_down = (recipe.inputs(f"{name}.{n}") for n in ("gate_proj", "down_proj"))

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        quantized = change_first(hidden)
        for expert in range(len(first)):
            tokens, slots = (index == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            both = linear(quantized[tokens], first[expert])
            if is_gpt_oss:
                both = both + experts.gate_up_proj_bias[expert]
                gate, up = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
                rows = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
            else:
                gate, up = both.chunk(2, -1)
                rows = experts.act_fn(gate) * up
            out = linear(change_down(rows), down[expert])
            out = out + experts.down_proj_bias[expert] if is_gpt_oss else out
            result.index_add_(0, tokens, out * weights[tokens, slots, None])
        return result

    experts.forward = forward


def quantize_expert(weight: torch.Tensor, recipe: Recipe, *, flip: bool) -> torch.Tensor:
    """Quantize the weight of one expert, which is [in, out] where `flip` says so."""
    weight = weight.T if flip else weight
    return recipe.weight(weight, [weight])


def quantize_gate_up(weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Quantize gate and up of one expert, which a checkpoint stores as two weights."""
    parts = list(weight.chunk(2))
    return torch.cat([recipe.weight(part, parts) for part in parts])
