"""How a run uses memory, by arithmetic on shapes: the model is held whole, or streamed by layer.

`--memory` is a promise, so the sums may be too large, but not too small: where a number is not
exact, it is above what torch's allocator took for the families of `tests/zoo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8calib.checkpoint.output import require_free_space
from fp8calib.data.sequences import Batch, cut_into, find_distinct_tokens
from fp8calib.errors import UsageError
from fp8calib.machine import anonymous_bytes, available_bytes, check_gib
from fp8calib.model.geometry import Layer
from fp8calib.model.prepared import PreparedModel
from fp8calib.text import GIB, count_decimals, describe_peak, format_gib

_SLACK_BYTES = 96 * 2**20  # arenas of the allocator, threads, code that is loaded late
_ROUNDED_BYTES = 2**25  # two runs of a command differ by less: the --memory an error names works
_OWN_SHARE = 0.9  # of the available memory: other programs may grow during the run
_UNKNOWN_PROCESS_BYTES = 2**29  # interpreter and libraries, if the system does not count them
_LIVE_COPIES = 4  # tensors of a layer's largest width at once: gate, up, activation, product
_FLOAT32_BYTES = 4
GIVEN = "given by --memory"
HIDDEN_SHARE = 6
"""On a CPU hidden states that wait for the head may take 1/6 of the memory of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the memory of a run depends on."""

    prepared: PreparedModel
    """The model, without weights, in the dtype that it computes in."""
    device: str
    batches: Sequence[Batch]
    scratch: Path
    """The folder of hidden states that do not fit into memory."""
    sharers: int = 1
    """Processes that share this machine."""
    extra: Mapping[str, int] = field(default_factory=dict)
    """Further bytes, by what needs them."""
    logits_bytes: int = 0
    """What the head needs for one batch; 0 if it does not run."""
    num_models: int = 1
    """Models that run side by side: a reference and its candidates."""
    changes_weights: bool = False
    changes_inputs: bool = False
    walks: int = 1
    """How often all layers are read."""
    least_read_bytes: int = 0
    """The plan tells at least so many bytes to read, where other tensors are read too."""
    always_streams: str = ""
    """Why the model is streamed even if it fits."""
    host_bytes: int = 0
    """The most that the process may hold, interpreter and libraries included (`find_limits`)."""
    host_why: str = ""
    """Where that limit comes from: `GIVEN` or "available"."""
    process_bytes: int = 0
    """What the process holds already."""
    device_bytes: int | None = None
    """Free memory of the GPU; None where the model runs on the CPU."""

    @property
    def config(self) -> Any:
        """The config of the text decoder."""
        return self.prepared.model.config.get_text_config(decoder=True)

    @property
    def stream_width(self) -> int:
        """Elements per token between layers; all parallel residual streams (AltUp) are counted."""
        streams = _find_setting(self.config, "altup_num_inputs", "hc_mult", otherwise=1)
        return int(self.config.hidden_size) * streams


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a model is held in memory while it runs, and what that needs."""

    is_streamed: bool = False
    why: str = ""
    """Empty if there is nothing to plan: something else has placed the model, or does so."""
    num_layers: int = 0
    read_bytes: int = 0
    peak: Mapping[str, int] = field(default_factory=dict)
    """Bytes of anonymous memory by purpose."""
    limit_bytes: int = 0
    device_peak: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the GPU; empty without one."""
    models_in_a_batch: int = 1
    """The unquantized model, and the candidates that run in one batch with it."""
    scratch: Path = Path()
    """Of a streamed model: the folder of the hidden states beyond `hidden_ram_bytes`."""
    scratch_bytes: int = 0
    hidden_ram_bytes: int = 0
    hidden_gpu_bytes: int = 0
    """Hidden states up to this stay on the GPU."""
    copies_ahead: bool = False
    """Whether the next layer is copied to the GPU while a layer computes: there is room for two."""

    def as_json(self) -> dict[str, Any]:
        """Give the plan as in `--json` and report.json."""
        if not self.why:
            return {"streamed": False}
        return {
            "streamed": self.is_streamed,
            "why": self.why,
            "layers": self.num_layers,
            "read_bytes": self.read_bytes,
            "peak_bytes": sum(self.peak.values()),
            "peak_parts": dict(self.peak),
            "memory_limit_bytes": self.limit_bytes,
            "device_peak_bytes": sum(self.device_peak.values()) or None,
            "scratch_bytes": self.scratch_bytes,
            "scratch_folder": str(self.scratch) if self.scratch_bytes else None,
            "models_in_a_batch": self.models_in_a_batch if self.models_in_a_batch > 1 else None,
        }

    def describe(self) -> Iterator[str]:
        """Describe in a few lines how the model will be run."""
        if self.why:
            yield self.why
        if self.models_in_a_batch > 1:
            yield (
                f"the unquantized model and {self.models_in_a_batch - 1} of the candidates share "
                "each batch: their figures differ by rounding from those one by one"
            )
        if not self.is_streamed:
            return
        layers, read = self.num_layers, format_gib(self.read_bytes)
        yield f"it reads {read} of weights, {layers} layers, and needs {describe_peak(self.peak)}"
        if self.device_peak:
            yield f"on the GPU it needs {describe_peak(self.device_peak)}"
        if self.scratch_bytes:
            size = format_gib(self.scratch_bytes)
            yield f"{size} of hidden states are stored in {self.scratch}"


def find_limits(work: Workload, memory_gib: float | None) -> Workload:
    """Measure the available memory, and take the smaller of it and --memory.

    --memory is the limit of each process; `sharers` processes share the machine.
    """
    if memory_gib is not None:
        check_gib(memory_gib)
    free = None
    if work.device != "cpu":
        free = int(torch.cuda.mem_get_info(work.device)[0] * _OWN_SHARE)
    process = anonymous_bytes() or _UNKNOWN_PROCESS_BYTES
    most, why = process + int(available_bytes() * _OWN_SHARE) // work.sharers, "available"
    if memory_gib is not None and memory_gib * GIB <= most:
        most, why = int(memory_gib * GIB), GIVEN
    return replace(work, host_bytes=most, host_why=why, process_bytes=process, device_bytes=free)


def plan_memory(work: Workload) -> MemoryPlan:
    """Hold the model whole where it fits, else plan to stream it."""
    host, device = {"process": work.process_bytes + _SLACK_BYTES}, whole_bytes(work)
    room, where = work.device_bytes, "free on the GPU"
    if room is None:
        host, device = {**host, **device}, {}
        room, where = work.host_bytes, work.host_why
    needed = sum((device or host).values())
    decimals = count_decimals(needed, room)
    numbers = f"{format_gib(needed, decimals)}, {format_gib(room, decimals)} are {where}"
    checkpoint = work.prepared.checkpoint
    if not checkpoint.has_weights:
        numbers += "; there are no weights: sizes follow from config.json"
    if needed <= room and not work.always_streams:
        return MemoryPlan(
            num_layers=len(work.prepared.geometry.layers),
            why=f"the whole model is in memory: it needs {numbers}",
            read_bytes=checkpoint.total_size_bytes,
            peak=host,
            limit_bytes=work.host_bytes,
            device_peak=device,
        )
    why = work.always_streams or f"streaming layer by layer: the model needs {numbers}"
    return _plan_streamed(work, why)


def plan_halved(work: Workload, size: int) -> MemoryPlan:
    """Plan for batches of `size`, or for halves, quarters, ... of them if these fit better.

    They fit better if the larger ones do not fit, have to be streamed, or leave a GPU no room for a
    second layer and the hidden states, so that it waits for copies. The plan does not say which
    size it is for: a run that is out of memory halves its batches. With `size` 1 none is halved.
    """
    if size == 1:
        return plan_memory(work)
    full = None
    with suppress(UsageError):
        full = plan_memory(work)
        if not full.is_streamed:
            return full
    size //= 2
    halves = [half for batch in work.batches for half in cut_into(batch, size)]
    smaller = plan_halved(replace(work, batches=halves), size)
    if full is None or not smaller.is_streamed:
        return smaller
    mine, own = ((each.copies_ahead, each.hidden_gpu_bytes > 0) for each in (full, smaller))
    return smaller if own > mine else full


def _plan_streamed(work: Workload, why: str) -> MemoryPlan:
    # a model in memory needs none of it
    from fp8calib.calibration.streamed_weights import PartLoader  # noqa: PLC0415

    itemsize = work.prepared.model.dtype.itemsize
    loader = PartLoader(work.prepared, device=work.device)
    layers, around = loader.layers(), loader.around_layers().placed
    embedding = len(find_distinct_tokens(work.batches)) * work.config.hidden_size * itemsize
    towers = 0  # they are dropped before the first layer is read
    if any(batch.media is not None for batch in work.batches):
        part = loader.towers()
        towers = max(part.stored, part.placed) + part.step
    head = 0
    if work.logits_bytes:
        lm_head: Any = work.prepared.model.get_output_embeddings()
        head = sum(parameter.numel() * itemsize for parameter in lm_head.parameters())

    def plan_device(in_layers: int) -> dict[str, int]:
        beside = {"layers": max(in_layers, towers), **working_bytes(work)}
        # The head runs after the last layer is dropped: only what it needs beyond a layer counts.
        if (above := head + work.logits_bytes - sum(beside.values())) > 0:
            beside["head"] = above
        return {"embedding": embedding, "around the layers": around, **beside}

    host = {"process": work.process_bytes + _SLACK_BYTES}
    hidden, copies_ahead, on_gpu = hidden_bytes(work), False, 0
    stored, placed = [part.stored for part in layers], [part.placed for part in layers]
    # stored tensors are kept to restore weights that were changed
    kept = stored if work.changes_weights else [0] * len(layers)
    loading = [part.stored + part.step for part in layers]  # before a tensor is placed
    if work.device_bytes is None:
        loaded = [size + keep for size, keep in zip(placed, kept, strict=True)]
        loading += [size + part.step for size, part in zip(loaded, layers, strict=True)]
        # a layer computes while the next one is read
        device = plan_device(max(*loading, peak_of_pairs(loaded, stored)))
        host |= device
    else:
        device = plan_device(peak_of_pairs(placed, placed))
        copies_ahead = sum(device.values()) <= work.device_bytes
        if not copies_ahead:
            device = plan_device(max(placed))
        elif sum(device.values()) + hidden <= work.device_bytes:
            device["hidden states"] = on_gpu = hidden
        host["layers"] = max(peak_of_pairs(kept, loading), towers)
    _check_fits(host, device, work)

    in_ram = min(hidden, work.host_bytes - sum(host.values()))
    on_disk = 0 if on_gpu else hidden - in_ram
    require_free_space(work.scratch, on_disk * work.sharers)
    read = work.walks * (sum(stored) + head) + embedding + around
    return MemoryPlan(
        is_streamed=True,
        why=why,
        num_layers=len(layers),
        read_bytes=max(read, work.least_read_bytes),
        peak={**host, "hidden states": 0 if on_gpu else in_ram},
        limit_bytes=work.host_bytes,
        device_peak={} if work.device_bytes is None else device,
        scratch=work.scratch,
        scratch_bytes=on_disk,
        hidden_ram_bytes=in_ram,
        hidden_gpu_bytes=on_gpu,
        copies_ahead=copies_ahead,
    )


def peak_of_pairs(left: Sequence[int], taken: Sequence[int]) -> int:
    """Find the largest sum of what a layer takes and what the layer before it has left."""
    return max(sum(pair) for pair in zip([0, *left], taken, strict=False))


def _check_fits(host: Mapping[str, int], device: Mapping[str, int], work: Workload) -> None:
    rooms = [(host, work.host_bytes, "", work.host_why)]
    if work.device_bytes is not None:
        rooms.append((device, work.device_bytes, " on the GPU", "free"))
    for parts, room, place, why in rooms:
        if (needed := sum(parts.values())) <= room:
            continue
        hint = "use --device cpu" if place else "use a machine with more memory"
        if why == GIVEN:
            smallest = math.ceil((needed + _ROUNDED_BYTES) / GIB * 100) / 100
            hint = f"use --memory {smallest:.2f} or more"
        if needed - parts.get("micro-batch", 0) <= room:
            hint += ", or a smaller --batch-size or --seq-len"
        decimals = count_decimals(needed, room)
        raise UsageError(
            f"even layer by layer the model needs {describe_peak(parts, decimals)}{place}, but "
            f"{format_gib(room, decimals)} are {why}",
            hint=hint,
        )


# --- sizes ----------------------------------------------------------------------------------------


def whole_bytes(work: Workload) -> dict[str, int]:
    """Compute the bytes of a run with the whole model in memory, by what needs them."""
    model, source = work.prepared.model, work.prepared.weights
    itemsize = model.dtype.itemsize
    weights = sum(
        tensor.numel() * (itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in (*model.parameters(), *model.buffers())
    )
    inside = working_bytes(work)
    if work.changes_weights:  # the states of a group of batches wait for the head
        inside["hidden states"] = min(weights // HIDDEN_SHARE, hidden_bytes(work))
    if work.logits_bytes:
        inside["logits"] = work.logits_bytes
    # While it loads, transformers casts the largest tensor. It also has a second copy of experts
    # that it joins, because threads read their tensors ahead (a model of experts alone took twice
    # its weights). Loading ends before the first batch: only what it needs beyond a batch counts.
    largest = joined = 0
    for _, linear in work.prepared.geometry.linears():
        size_bytes = linear.in_features * linear.out_features * itemsize
        largest = max(largest, size_bytes)
        if len(source.tensor_names([linear.weight_name])) > 1:
            joined += size_bytes * max(linear.num_experts, 1)
    if (above := largest + joined - sum(inside.values())) > 0:
        inside["loading"] = above
    return {"weights": weights, **inside}


def working_bytes(work: Workload) -> dict[str, int]:
    """Compute the bytes of a run besides weights, hidden states and logits.

    A micro-batch counts inside the layer that needs most.
    """
    config, geometry = work.config, work.prepared.geometry
    itemsize = work.prepared.model.dtype.itemsize
    copies = _LIVE_COPIES * itemsize + 2 * _FLOAT32_BYTES
    if work.changes_inputs:
        copies += _LIVE_COPIES * _FLOAT32_BYTES
    widest = max(_layer_width(layer, config) for layer in geometry.layers)
    per_token = widest * copies + work.stream_width * (_LIVE_COPIES + 2) * itemsize
    heads = _num_scored_heads(work)
    per_pair = 1 + itemsize + heads * (_LIVE_COPIES * itemsize + _FLOAT32_BYTES)
    # Kernels need no mask for plain causal attention. With ALiBi in the config (falcon)
    # transformers always builds one, used or not.
    has_mask = hasattr(config, "alibi") or any(batch.mask is not None for batch in work.batches)
    windows = [each.sliding_window for _, each in geometry.attentions()]
    windows.append(getattr(config, "attention_chunk_size", None))
    shortest = min((window for window in windows if window is not None), default=math.inf)
    largest = 0
    for rows, columns in {tuple(batch.input_ids.shape) for batch in work.batches}:
        row_bytes = columns * per_token
        if heads or has_mask or shortest <= columns:
            row_bytes += columns**2 * per_pair
        if work.device == "cpu":
            row_bytes += _scan_bytes(config, columns)
        largest = max(largest, rows * row_bytes)
    sizes = {"micro-batch": largest, **work.extra}
    if work.changes_weights:  # one linear, or one expert, is quantized and measured at a time
        elements = max((x.in_features * x.out_features for _, x in geometry.linears()), default=0)
        sizes["changed weights"] = elements * _FLOAT32_BYTES * _LIVE_COPIES
    return sizes


def hidden_bytes(work: Workload) -> int:
    """Compute the bytes that wait between two layers, of all batches and models.

    They are the hidden states, K and V that later layers share, and what rows with media enter the
    decoder with.
    """
    config, geometry = work.config, work.prepared.geometry
    owners = geometry.owners()
    producers = {each.producer for _, each in geometry.attentions() if each.producer is not None}
    shared = sum(owners[index].kv_elements_per_token for index in producers)
    state = work.stream_width + shared
    # Models older than transformers' attention interface return the scores with the output.
    is_old = not work.prepared.model._supports_attention_backend
    scores = _num_scored_heads(work) if is_old and config._attn_implementation == "eager" else 0
    elements = 0
    for batch in work.batches:
        tokens = batch.input_ids.numel()
        elements += tokens * (state + scores * batch.input_ids.shape[1]) * work.num_models
        elements += 0 if batch.media is None else tokens * int(config.hidden_size)
    return int(elements * work.prepared.model.dtype.itemsize)


def _find_setting(config: Any, *names: str, otherwise: int = 0) -> int:
    """Give the first of these settings that a config has as an integer."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), otherwise)


def _num_scored_heads(work: Workload) -> int:
    """Count the heads whose attention scores are in memory at once; 0 for a fused kernel."""
    attentions = [attention for _, attention in work.prepared.geometry.attentions()]
    is_fused = work.config._attn_implementation != "eager" and all(
        each.k_head_dim == each.v_head_dim for each in attentions
    )
    return 0 if is_fused else max((each.num_heads for each in attentions), default=0)


def _layer_width(layer: Layer, config: Any) -> int:
    """Count the elements per token of a layer's largest tensor."""
    used = _find_setting(
        *(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
        otherwise=8,
    )
    attention = layer.attention
    cached = 0 if attention is None else attention.k_head_dim + attention.v_head_dim
    heads = 0 if attention is None else attention.num_heads
    # The outputs of a token's experts, and of shared experts, are in memory until they are summed.
    experts = sum(
        each.out_features * (min(used, each.num_experts) if each.num_experts else 1)
        for each in layer.linears
        if each.section == "mlp" and any(other.num_experts for other in layer.linears)
    )
    linears = (max(each.in_features, each.out_features) for each in layer.linears)
    return max(heads * cached, experts, *linears)


def _scan_bytes(config: Any, columns: int) -> int:
    """Compute the bytes that linear attention or Mamba takes for a row without its GPU kernels.

    Each head compares the tokens of a chunk with one another. Mamba 1 has neither heads nor chunks.
    """
    find = partial(_find_setting, config)
    chunk = find("mamba_chunk_size", "chunk_size", otherwise=64)  # 64: delta rule
    mamba_2 = find("mamba_n_heads", "mamba_num_heads") * chunk
    mamba_1 = find("mamba_d_state") * find("mamba_expand") * config.hidden_size
    delta = find("linear_num_value_heads") * chunk
    by_channel = find("linear_num_heads") * find("linear_head_dim") * chunk
    elements = max(mamba_2 or mamba_1, delta, by_channel)
    padded = math.ceil(columns / chunk) * chunk
    return int(padded * elements) * _FLOAT32_BYTES * _LIVE_COPIES
