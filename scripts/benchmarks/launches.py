"""Count the operations that observation and emulation add to a forward pass on a GPU.

Started by `scripts/bench --launches`, which needs no GPU: without one, simulated GPUs take the same
path. An operation that returns a view, or memory without values, launches no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, BatchView
from fp8calib.calibration.decoder import Decoder
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.recorder import Recorder
from fp8calib.data.sequences import Batch
from fp8calib.engines.arithmetic import read_numerics
from fp8calib.engines.registry import find_emulated
from fp8calib.model.geometry import Linear, ModelGeometry, Role, Site
from fp8calib.model.topology import find_geometry
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, open_emulation_hooks
from fp8calib.verification.emulation.fake_quantize import Quantizer
from scripts.benchmarks.options import make_parser
from tests import zoo
from tests.simulated_gpus import gpu

HAS_KERNELS = find_spec("triton") is not None
_WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}
_TENSORS_OF_A_KERNEL = 64
"""Pairs of tensors in one kernel of a `_foreach` operation (ATen's MultiTensorApply.cuh)."""
_REDUCTIONS = {"_foreach_norm", "_foreach_max"}
"""These take two kernels more, before and after (ATen's ForeachReduceOp.cu)."""
_WAITING = {"_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "_unique2"}
"""The host waits for what these compute; so it does for copies from and to the GPU that block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Kernels that were launched, the bytes that they read, and how often the host waited."""

    launches: int
    bytes_read: int
    waits: int

    def __sub__(self, other: Work) -> Work:
        return Work(
            launches=self.launches - other.launches,
            bytes_read=self.bytes_read - other.bytes_read,
            waits=self.waits - other.waits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationWork:
    """The work of one batch: of the decoder alone, and what observation adds to it."""

    decoder: Work
    observation: Work
    with_histograms: Work
    """What observation adds in a batch whose values enter the histograms."""
    activation_bytes: int
    """The size of the observed tensors, each counted once."""

    @property
    def reads_per_byte(self) -> float:
        """Bytes read per byte of activation, if one batch in eight has histograms."""
        read = 7 * self.observation.bytes_read + self.with_histograms.bytes_read
        return read / 8 / self.activation_bytes


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the operations on one kind of device while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._launches = 0
        self._bytes_read = 0
        self._waits = 0
        self._stack = ExitStack()

    @property
    def work(self) -> Work:
        """What was counted so far."""
        return Work(launches=self._launches, bytes_read=self._bytes_read, waits=self._waits)

    def __enter__(self) -> Self:
        """Count the launches of our own kernels too."""
        if HAS_KERNELS:
            kernels = import_module("fp8calib.calibration.kernels")
            launch = kernels.launch

            def count(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
                self._launches += 1
                self._bytes_read += _num_bytes(arguments[0])
                launch(kernel, grid, *arguments, **constants)

            self._stack.enter_context(mock.patch.object(kernels, "launch", count))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        found = func(*args, **(kwargs or {}))
        given = self._tensors((args, kwargs))
        if self._launches_kernel(func) and (given or self._tensors(found)):
            name = func.overloadpacket.__name__
            is_many = name.startswith("_foreach")
            self._launches += -(-len(args[0]) // _TENSORS_OF_A_KERNEL) if is_many else 1
            self._launches += 2 * (name in _REDUCTIONS)
            read = self._tensors(found) if name == "index" else given
            self._bytes_read += sum(map(_num_bytes, read))
        self._waits += self._makes_wait(func, args, kwargs or {}, found)
        return found

    def _makes_wait(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any
    ) -> bool:
        name = func.overloadpacket.__name__
        if name.startswith("index"):  # a mask of places is counted first
            return any(x.dtype is torch.bool for x in self._tensors(args[1]))
        if name in {"copy_", "_to_copy"}:
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
            source = args[1] if name == "copy_" else args[0]
            return blocks and bool(self._tensors(source)) != bool(self._tensors(found))
        return name in _WAITING and bool(self._tensors(args))

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        leaves = torch.utils._pytree.tree_leaves(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    @staticmethod
    def _launches_kernel(func: Any) -> bool:
        returned = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        return not is_view and func.overloadpacket.__name__ not in _WITHOUT_KERNEL


def _num_bytes(x: torch.Tensor) -> int:
    """Compute the bytes of a tensor; what an expanded axis repeats counts once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * x.itemsize


def count_observation(
    model: PreTrainedModel, geometry: ModelGeometry, *, seq_len: int, query: bool = False
) -> ObservationWork:
    """Count the work of calibration for one sequence at a time, from its second batch on.

    The decoder alone runs with a cache that stores nothing, as the observed one does.
    """
    recorder = _ActivationRecorder(HISTOGRAM_SEQUENCES + 1)
    decoder, attentions = Decoder(model), geometry.owners()

    def count(first: int) -> Work:
        batch, counter = _make_batch(model, first, seq_len), WorkCounter(decoder.device)
        with counter:
            view = BatchView(shape=(1, seq_len), lengths=batch.lengths, first=first)
            recorder.begin_batch(view)
            decoder.run(batch, HookedCache(decoder.config, attentions, (), recorder))
            recorder.end_batch()
        return counter.work

    with open_hooks(model, geometry, recorder, query=query, inputs=True):
        _, *counted = [count(first) for first in (0, 1, HISTOGRAM_SEQUENCES)]
    plain = _count_decoder(model, geometry, _make_batch(model, 0, seq_len))
    return ObservationWork(
        decoder=plain,
        observation=counted[0] - plain,
        with_histograms=counted[1] - plain,
        activation_bytes=recorder.num_bytes // 3
        + _cached_values(geometry, query=query) * seq_len * decoder.dtype.itemsize,
    )


def _count_decoder(model: PreTrainedModel, geometry: ModelGeometry, batch: Batch) -> Work:
    decoder, attentions = Decoder(model), geometry.owners()
    unhooked = {attention.module for attention in attentions.values()}
    cache = HookedCache(decoder.config, attentions, unhooked, Recorder(1))
    counter = WorkCounter(decoder.device)
    with counter:
        decoder.run(batch, cache)
    return counter.work


def count_emulation(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    quantizers: Mapping[Site, Quantizer],
    *,
    seq_len: int,
    is_padded: bool = False,
) -> Work:
    """Count what emulating `quantizers` adds to one sequence, from the second batch on.

    A padded batch has two.
    """
    decoder, attentions = Decoder(model), geometry.owners()
    hooks = EmulationHooks(Candidate(quantizers=quantizers))

    def make_batch() -> Batch:
        return _make_batch(model, 0, seq_len, is_padded=is_padded)

    def count() -> Work:
        batch, counter = make_batch(), WorkCounter(decoder.device)
        with counter:
            hooks.begin_batch(batch)
            decoder.run(batch, HookedCache(decoder.config, attentions, (), hooks))
            hooks.end_batch()
        return counter.work

    with open_emulation_hooks(model, geometry, hooks):
        _, second = count(), count()
    return second - _count_decoder(model, geometry, make_batch())


def make_emulations(geometry: ModelGeometry) -> dict[str, dict[Site, Quantizer]]:
    """Make what vLLM quantizes: K, V and q, the probabilities P too, and inputs in two ways."""
    table = make_unscaled_table(geometry, E4M3FN)
    cache = emulate_kv(table, find_emulated("vllm")[1])
    sites = [Site(linear.module, Role.INPUT) for _, linear in geometry.linears()]
    static = Quantizer(fmt=E4M3FN, scale=torch.tensor(0.05), by_reciprocal=True)
    dynamic = Quantizer(
        fmt=E4M3FN,
        scale=Granularity.TOKEN,
        smallest_scale=read_numerics("vllm").smallest_dynamic_scale,
        by_reciprocal=True,
    )
    made = (
        {site: each for site, each in cache.items() if site.role is not Role.P},
        cache,
        dict.fromkeys(sites, static),
        dict.fromkeys(sites, dynamic),
    )
    return dict(zip(EMULATIONS, made, strict=True))


def _make_batch(
    model: PreTrainedModel, first: int, seq_len: int, *, is_padded: bool = False
) -> Batch:
    lengths = (seq_len, seq_len // 2) if is_padded else (seq_len,)
    ids = torch.arange(seq_len).remainder(model.config.get_text_config().vocab_size)
    return Batch(first=first, input_ids=ids.repeat(len(lengths), 1), lengths=lengths)


def _cached_values(geometry: ModelGeometry, *, query: bool) -> int:
    """Count the values of K and V of a token, and those of q."""
    cached = geometry.owners().values()
    values = sum(each.num_kv_heads * (each.k_head_dim + each.v_head_dim) for each in cached)
    if query:
        values += sum(each.num_heads * each.k_head_dim for _, each in geometry.attentions())
    return values


class _ActivationRecorder(Recorder):
    """Also sums the sizes of the inputs of linears, those that several read counted once."""

    def __init__(self, num_sequences: int) -> None:
        super().__init__(num_sequences)
        self.num_bytes = 0
        self._last: list[torch.Tensor] = []

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Add the input of a linear."""
        self._add(x)
        return super().on_input(linear, x)

    def on_expert_input(
        self, linears: Sequence[Linear], index: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Add the input of gate and up."""
        self._add(hidden)
        return super().on_expert_input(linears, index, hidden)

    def on_expert_down(
        self, linear: Linear, index: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Add the input of down."""
        self._add(rows)
        return super().on_expert_down(linear, index, rows)

    def _add(self, x: torch.Tensor) -> None:
        if not any(x is seen for seen in self._last):
            self.num_bytes += x.numel() * x.itemsize
            self._last = [*self._last[-3:], x]


MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "mixtral": {},
    "qwen3_next": {},
    "deepseek_v3": {},
}
"""A dense model, a mixture of experts, a hybrid and one with latent attention: the tests' small
configurations. What is added to a layer does not depend on its sizes."""
SEQ_LEN = 512
EMULATIONS = ("kv", "kv + P", "w8a8 static", "w8a8 dynamic")


def count_all(
    families: Iterable[str] = MODELS, seq_len: int = SEQ_LEN
) -> Iterator[tuple[str, ObservationWork, Mapping[str, Work]]]:
    """Count the work of observation and of emulations, in bfloat16 on a GPU or a simulated one."""
    for family in families:
        sizes = {"max_position_embeddings": SEQ_LEN, **MODELS[family]}
        model = zoo.build(family, **sizes).to(torch.bfloat16)
        names = {name: name for name, _ in model.named_parameters()}
        geometry = find_geometry(model, names, checkpoint_dtype="bfloat16")[0]
        with gpu(has_kernels=HAS_KERNELS):
            model.to("cuda:0")
            emulations = {
                name: count_emulation(model, geometry, quantizers, seq_len=seq_len // 8)
                for name, quantizers in make_emulations(geometry).items()
            }
            yield family, count_observation(model, geometry, seq_len=seq_len), emulations


def main() -> None:
    """Count, and print a line for every model."""
    parser = make_parser("--launches", __doc__)
    parser.parse_args()
    names = ("observed", "histograms", *EMULATIONS)
    print(
        f"{'model':14}{'decoder':>8}{''.join(f'{name:>14}' for name in names)}{'reads a byte':>14}"
    )
    for family, work, emulations in count_all():
        added = [work.observation, work.with_histograms, *emulations.values()]
        shares = "".join(f"{each.launches / work.decoder.launches:14.0%}" for each in added)
        print(f"{family:14}{work.decoder.launches:8}{shares}{work.reads_per_byte:14.2f}")


if __name__ == "__main__":
    main()
