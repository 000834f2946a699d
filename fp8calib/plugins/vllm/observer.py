"""What observes a model in vLLM's workers: a class whose methods `collective_rpc` calls.

vLLM adds the class to its workers (`worker_extension_cls`). Arguments and answers are plain JSON
values or bytes, which its message format carries between processes. Modules have vLLM's names.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy as copy_shallow
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.reductions import observe_expert_input, observe_input, reduce_tokens
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.model.geometry import Role, Site
from fp8calib.model.module_paths import list_paths


class Observer:
    """The methods of a worker that observe its part of the model."""

    def fp8calib_describe(self, tensors: RankTensors, drafted: RankTensors) -> str:
        """Describe this rank and its modules, and where the loader puts each tensor.

        Args:
            tensors: of the checkpoint: name, dtype as safetensors spells it, and shape.
            drafted: those of the drafter's checkpoint.

        Returns:
            JSON: the ranks, `modules` by name, and `loads`: tensors by the parameter that they
            fill. A drafter's attention names its own `site`.
        """
        from vllm.distributed import get_pp_group, get_tp_group  # noqa: PLC0415
        from vllm.version import __version__  # noqa: PLC0415

        model = _find_models(self)[""]
        loads, problem = _trace_loader(model, tensors)
        if problem:  # methods of quantization replace parameters after loading
            with suppress(Exception):  # else the first answer stands
                again, stopped = _trace_loader(_build_unloaded(self), tensors)
                loads, problem = (loads, problem) if stopped else (again, "")
        return json.dumps(
            {
                "version": __version__,
                "tp": [get_tp_group().rank_in_group, get_tp_group().world_size],
                "pp": [get_pp_group().rank_in_group, get_pp_group().world_size],
                "modules": {
                    name: found
                    for name, module in model.named_modules()
                    if (found := _describe_module(module)) is not None
                }
                | dict(_describe_drafter(self, drafted)),
                "loads": loads,
                "problem": problem,
            }
        )

    def fp8calib_observe(self, modules: Sequence[str], num_sequences: int) -> None:
        """Observe those of these modules that this rank has, in a run of so many sequences."""
        vars(self)["_fp8calib"] = [
            _Observation(model, prefix, set(modules), num_sequences)
            for prefix, model in _find_models(self).items()
        ]

    def fp8calib_expect(self, sequences: Sequence[SequenceKey]) -> None:
        """Expect sequences in this order."""
        for observation in vars(self)["_fp8calib"]:
            observation.expected.extend(map(tuple, sequences))

    def fp8calib_collect(self) -> bytes:
        """Give all statistics so far, as a safetensors file; its metadata has counts and faults."""
        with torch.inference_mode():
            return _collect(vars(self)["_fp8calib"])


SequenceKey = tuple[int, int, int]
"""Of a sequence: global index, length, checksum of the ids."""


def checksum(ids: torch.Tensor) -> int:
    """Compute a checksum of token ids [S]."""
    return zlib.crc32(ids.to("cpu", torch.int64).numpy().tobytes())


RankTensors = Sequence[tuple[str, str, Sequence[int]]]
_DRAFTER = "drafter."


def _find_models(worker: Any) -> dict[str, nn.Module]:
    """Give the model, and the drafter if this rank has one, by the prefix of modules' names."""
    drafter = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    found = {_DRAFTER: drafter} if isinstance(drafter, nn.Module) else {}
    return {"": worker.model_runner.get_model(), **found}


def _describe_drafter(worker: Any, tensors: RankTensors) -> Iterator[tuple[str, dict[str, Any]]]:
    """Describe a drafter's attention, and name it as its checkpoint does."""
    model = _find_models(worker).get(_DRAFTER)
    if model is None:
        return
    loads = _trace_loader(model, tensors)[0]
    config = worker.vllm_config.speculative_config.draft_model_config
    for name, module in model.named_modules():
        found = _describe_module(module)
        if found is not None and found["kind"] in ("heads", "latent"):
            around = f"{name.rpartition('.')[0]}."
            names = (each for path in loads if path.startswith(around) for each in loads[path])
            shared = set[str].intersection(*({*list_paths(each)} for each in names))
            site = max(shared, key=len)
            whole = 1 if found["kind"] == "latent" else config.get_total_num_kv_heads()
            more = {"num_kv_heads_whole": whole, "head_size": module.head_size}
            yield _DRAFTER + name, {**found, "site": site, **more}


def _build_unloaded(worker: Any) -> nn.Module:
    """Build the model again without memory, as it is before weights are loaded."""
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    config = copy_shallow(worker.vllm_config)
    config.compilation_config = copy_shallow(config.compilation_config)
    # modules enter themselves by name, and refuse a name that is there already
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
        model: nn.Module = initialize_model(config)
    return model


# --- what is there --------------------------------------------------------------------------------


def _describe_module(module: Any) -> dict[str, Any] | None:
    """Describe a module that can be observed; None for others."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention  # noqa: PLC0415
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415

    if isinstance(module, Attention | MLAAttention):
        is_latent = isinstance(module, MLAAttention)
        return {
            "kind": "latent" if is_latent else "heads",
            "num_heads": module.num_heads,
            "num_kv_heads": 1 if is_latent else module.num_kv_heads,
            "reads": getattr(module, "kv_sharing_target_layer_name", None),
        }
    if isinstance(module, LinearBase):
        part = getattr(module, "input_size_per_partition", module.input_size)
        return {"kind": "linear", "inputs": module.input_size, "inputs_here": part}
    if is_fused_experts(module):
        return {"kind": "experts", "num_experts": module.moe_config.num_experts}
    return None


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module routes tokens to experts and runs them."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface  # noqa: PLC0415

    return isinstance(module, MoERunnerInterface)


class _Named(torch.Tensor):
    """A tensor without values that knows which tensors of the checkpoint it is made from."""

    held: frozenset[str]
    on_copy: Callable[[torch.Tensor, frozenset[str]], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], _Named):
            args[1].on_copy(args[0], args[1].held)  # a buffer, or a parameter without a loader
            return args[0]
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        sources = [each for each in _flatten([args, kwargs]) if isinstance(each, _Named)]
        for each in _flatten([made]):
            if isinstance(each, _Named):
                each.held = frozenset().union(*map(_names_of, sources))
                each.on_copy = sources[0].on_copy
        return made


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        elif isinstance(value, dict):
            yield from _flatten(value.values())
        else:
            yield value


def _names_of(value: Any) -> frozenset[str]:
    return getattr(value, "held", frozenset()) if isinstance(value, _Named) else frozenset()


def _trace_loader(model: Any, tensors: RankTensors) -> tuple[dict[str, list[str]], str]:
    """Ask the model's own loader which parameter each tensor goes into; nothing is loaded.

    Returns:
        The tensors by parameter, and why the loader stopped early; empty if it did not.
    """
    loads = defaultdict[str, set[str]](set)

    def record(path: str, *args: Any, **kwargs: Any) -> bool:
        loads[path].update(*map(_names_of, _flatten([args, kwargs])))
        return True

    def make(name: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device="meta")
        named: _Named = tensor.as_subclass(_Named)
        named.held, named.on_copy = frozenset({name}), copy
        return named

    places = {
        each.untyped_storage().data_ptr(): path
        for path, each in (*model.named_buffers(), *model.named_parameters())
    }

    def copy(target: torch.Tensor, names: frozenset[str]) -> None:
        loads[places.get(target.untyped_storage().data_ptr(), "")] |= names

    before = [(each, dict(vars(each))) for each in model.parameters()]
    problem = ""
    try:
        for path, parameter in model.named_parameters():
            held = "_weight_loader" if "_weight_loader" in vars(parameter) else "weight_loader"
            setattr(parameter, held, partial(record, path))
        model.load_weights((name, make(name, dtype, shape)) for name, dtype, shape in tensors)
    except Exception as error:  # noqa: BLE001 -- whatever a loader raises is its answer
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        for parameter, attributes in before:
            vars(parameter).clear()
            vars(parameter).update(attributes)
    return {path: sorted(names) for path, names in loads.items()}, problem


# --- the observation ------------------------------------------------------------------------------


def _wrap(
    module: nn.Module, before: Callable[..., None], after: Callable[[], None] | None = None
) -> None:
    """Show the arguments of a module's forward pass.

    Hooks of torch do not see those of vLLM's modules whose `forward` is called directly.
    """
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        output = run(*args, **kwargs)
        if after is not None:
            after()
        return output

    module.forward = forward


class _Observation:
    """What one worker observes: one sequence a step of the engine."""

    def __init__(
        self, model: nn.Module, prefix: str, observed: set[str], num_sequences: int
    ) -> None:
        self._is_drafter = bool(prefix)
        self.expected = deque[SequenceKey]()
        self.faults: list[str] = []
        self.recorder = Recorder(num_sequences)
        self._has_batch = False
        _wrap(model, self._begin, self._end)
        for path, module in model.named_modules():
            name = prefix + path
            if name not in observed:
                continue
            found = _describe_module(module)
            kind = "" if found is None else found["kind"]
            if kind == "experts":
                routing = _Routing(module)
                show = partial(self._see, partial(self._see_experts, name, routing))
                _wrap(module, routing.begin, show)
                continue
            see: dict[str, Callable[..., None]] = {
                "heads": self._see_heads,
                "latent": self._see_latent,
                "linear": self._see_input,
            }
            _wrap(module, partial(self._see, partial(see[kind], name, module)))

    def _begin(self, *_: Any, **kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context  # noqa: PLC0415

        self._has_batch = False
        if get_forward_context().attn_metadata is None:  # the engine runs nothing real
            return
        positions = kwargs["positions"].flatten()  # three rows of equal ones with images
        length = kwargs["positions"].shape[-1]
        if not self.expected:
            self.faults.append(f"a step of {length} tokens that nobody asked for")
            return
        first, expected, digest = self.expected.popleft()
        ids = kwargs.get("input_ids")
        if length != expected or int(positions[0]):
            self.faults.append(
                f"sequence {first} has {expected} tokens, and the engine ran a step of {length} "
                f"that begins at position {int(positions[0])}"
            )
            return
        # a drafter gets each token's successor
        if ids is not None and not self._is_drafter and checksum(ids) != digest:
            self.faults.append(f"sequence {first}: the engine ran other tokens")
            return
        self.recorder.begin_batch(BatchView(shape=(1, length), lengths=(length,), first=first))
        self._has_batch = True

    def _end(self) -> None:
        if self._has_batch:
            self.recorder.end_batch()
            self._has_batch = False

    def _see(self, see: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._has_batch:
            see(*args, **kwargs)

    def _see_heads(
        self,
        name: str,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> None:
        self._record_heads(name, Role.Q, query, module.num_heads)
        if module.kv_sharing_target_layer_name is None and key is not None and value is not None:
            self._record_heads(name, Role.K, key, module.num_kv_heads)
            self._record_heads(name, Role.V, value, module.num_kv_heads)

    def _see_latent(
        self,
        name: str,
        module: Any,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        self._record_heads(name, Role.Q, q, module.num_heads)
        self._record_heads(name, Role.K, kv_c_normed, 1)
        self._record_heads(name, Role.V, k_pe, 1)

    def _record_heads(self, name: str, role: Role, x: torch.Tensor, num_heads: int) -> None:
        heads = x.reshape(len(x), num_heads, -1).transpose(0, 1).unsqueeze(0)
        seen = reduce_tokens(self.recorder.batch, heads, num_heads, 0 if role is Role.Q else 1)
        self.recorder.record(Site(name, role), seen)

    def _see_input(self, name: str, _module: nn.Module, x: torch.Tensor, *_: Any) -> None:
        site = Site(name, Role.INPUT)
        self.recorder.record(site, observe_input(self.recorder.batch, site, x))

    def _see_experts(self, name: str, routing: _Routing) -> None:
        hidden, index = routing.find()
        site, num_experts = Site(name, Role.INPUT), routing.module.moe_config.num_experts
        seen = observe_expert_input(self.recorder.batch, site, hidden, index, num_experts)
        self.recorder.record(site, seen)


def _collect(observations: Sequence[_Observation]) -> bytes:
    """Give the statistics so far, of the model and a drafter."""
    recorders = [each.recorder for each in observations]
    bad = [str(bad[0]) for each in recorders if (bad := each.find_nonfinite()) is not None]
    faults = [fault for each in observations for fault in each.faults]
    if any(each.sequences != recorders[0].sequences for each in recorders):
        faults.append("its drafter ran other sequences")
    found = {site: stats for each in recorders for site, stats in each.stats().items()}
    metadata = {
        "counts": json.dumps({str(site): stats.count for site, stats in found.items()}),
        "sequences": json.dumps(recorders[0].sequences),
        "faults": json.dumps(faults),
        "nonfinite": "".join(bad[:1]),
    }
    tensors = {
        f"{site}/{name}": tensor.contiguous()
        for site, stats in found.items()
        for name, tensor in stats.tensors.items()
    }
    saved: bytes = save(tensors, metadata)
    return saved


class _Routing:
    """The input of a layer's experts, and the experts that the engine chose for each token."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._index: torch.Tensor | None = None
        """The engine's choice [N, K]; None if its kernel chooses."""
        self._select = module.router.select_experts
        module.router.select_experts = self._watch

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        _, self._index = chosen = self._select(*args, **kwargs)
        return chosen

    def begin(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Keep the arguments of a forward pass."""
        self._arguments, self._index = (hidden_states, router_logits, input_ids), None

    def find(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the input [N, C] and the experts, int64 [N, K], of the pass that has run."""
        assert self._arguments is not None  # noqa: S101 -- a pass has run
        hidden, logits, input_ids = self._arguments
        # The classes' own `forward` shows nothing, so that only the engine's calls count.
        if self.module.routed_input_transform is not None:
            transform = self.module.routed_input_transform
            made = type(transform).forward(transform, hidden)
            hidden = made[0] if isinstance(made, tuple) else made
        if self._index is None:
            if self.module.gate is not None:
                logits, _ = type(self.module.gate).forward(self.module.gate, hidden)
            _, self._index = self._select(
                hidden_states=hidden, router_logits=logits, input_ids=input_ids
            )
        return hidden, self._index.long()
