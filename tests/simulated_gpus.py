"""Simulated GPUs: tensors whose device is `cuda:N`, computed on the CPU.

Like real GPUs, they refuse operations on tensors of two devices, and reading the memory of the
device from the host, so tests see where every tensor is. Kernels and speed are those of the CPU.

Streams compute at once, but the order that they promise is checked: reading what another stream
wrote without waiting for it is an error, and so is freeing what another stream may still read.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import accelerate as placing

from fp8calib.calibration import reductions
from fp8calib.verification.emulation import emulate, probabilities

ROOM_BYTES = 64 << 30
_CPU = torch.device("cpu")
_NUMBERS = {int, float, bool, type(None), torch.dtype}
_TAKE_BOTH = {torch.ops.aten.copy_, torch.ops.aten.to, torch.ops.aten._to_copy}
_DIVIDED = {torch.ops.aten.div.Tensor: torch.mul, torch.ops.aten.div_.Tensor: torch.Tensor.mul_}
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""
_run_thread = threading.Thread.run
_infer_device_map = placing.infer_auto_device_map


class Stream:
    """A stream: the number of its last operation, and of those of others that it waits for."""

    current = threading.local()

    def __init__(self, _device: torch.device | None = None) -> None:
        self.seen: dict[Stream, int] = {self: 0}

    def record_event(self) -> Event:
        """Follow all operations so far."""
        return Event(dict(self.seen))

    def wait_event(self, event: Event) -> None:
        """Run later operations behind those that an event follows."""
        for stream, time in event.seen.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def is_behind(self, stream: Stream, time: int) -> bool:
        """Whether it waits for an operation of a stream."""
        return self.seen.get(stream, 0) >= time


class Event:
    """What was recorded in a stream."""

    def __init__(self, seen: Mapping[Stream, int]) -> None:
        self.seen = seen

    def synchronize(self) -> None:
        """Do nothing: operations are finished when they are launched."""


class _Room:
    """The memory of a tensor and its views, which belongs to a stream."""

    broken: ClassVar[list[str]] = []

    def __init__(self, stream: Stream) -> None:
        self.home = stream
        self.used: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()
        self.written = (stream, 0)

    def use(self, stream: Stream) -> None:
        if not stream.is_behind(*self.written):
            self.broken.append("a stream reads what it does not wait for")
        self.used[stream] = stream.seen[stream]

    def __del__(self) -> None:
        for stream, time in self.used.items():
            if stream not in self.recorded and not self.home.is_behind(stream, time):
                self.broken.append("memory is freed while another stream may read it")


_default_stream = Stream()


def _current_stream(_device: object = None) -> Stream:
    return getattr(Stream.current, "stream", _default_stream)


@contextmanager
def _use_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current.stream = _current_stream(), stream
    try:
        yield
    finally:
        Stream.current.stream = before


class OnGpu(torch.Tensor):
    """A tensor on a simulated GPU; `held` has its numbers."""

    held: torch.Tensor
    room: _Room
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device, room: _Room) -> OnGpu:  # noqa: D102
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held, made.room = held, room
        return made

    def record_stream(self, stream: Stream) -> None:
        """Free the memory behind what a stream does until then."""
        self.room.recorded.add(stream)

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held!r}, device={self.device})"

    def tolist(self) -> Any:
        """Copy to the host, which torch refuses for a subclass."""
        return self.held.tolist()

    def data_ptr(self) -> int:
        """Identify tensors, as accelerate does to find tied weights."""
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class _Simulation(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out what torch.compile needs, which takes as long as an operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


@contextmanager
def simulated_gpus(
    count: int, *, room_bytes: int = ROOM_BYTES, has_kernels: bool = False
) -> Iterator[None]:
    """Make torch and accelerate find simulated GPUs.

    Args:
        count: the number of GPUs.
        room_bytes: the bytes of a model that accelerate puts on each, when it spreads one.
        has_kernels: run the kernels of Triton, in its interpreter, which is slow.
    """
    _set_guard()
    properties = SimpleNamespace(total_memory=ROOM_BYTES, major=9, minor=0)
    as_gpus = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "synchronize": lambda _device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _device=None: (ROOM_BYTES, ROOM_BYTES),
        "memory_allocated": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "get_device_properties": lambda _device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "Stream": Stream,
        "current_stream": _current_stream,
        "stream": _use_stream,
    }
    room = {**dict.fromkeys(range(count), room_bytes), "cpu": 0}
    future = torch.__future__
    before = (future.get_overwrite_module_params_on_conversion(), torch._C._only_lift_cpu_tensors())
    future.set_overwrite_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mock.patch.multiple(torch.cuda, **as_gpus),
            mock.patch.object(placing, "get_max_memory", return_value=room),
            mock.patch.object(placing, "infer_auto_device_map", _infer),
            mock.patch.object(threading.Thread, "run", _run),
            _simulated_kernels() if has_kernels else nullcontext(),
            _chosen(has_kernels=has_kernels),
            _Simulation(),
        ):
            yield
        assert not _Room.broken, _Room.broken[0]
    finally:
        _Room.broken.clear()
        future.set_overwrite_module_params_on_conversion(before[0])
        torch._C._set_only_lift_cpu_tensors(before[1])


@contextmanager
def gpu(*, has_kernels: bool = False) -> Iterator[None]:
    """Use the GPU of this machine, or a simulated one."""
    if torch.cuda.is_available():
        with _chosen(has_kernels=has_kernels):
            yield
    else:
        with simulated_gpus(1, has_kernels=has_kernels):
            yield


@contextmanager
def _chosen(*, has_kernels: bool) -> Iterator[None]:
    def has_kernel(device: torch.device) -> bool:
        return has_kernels and device.type == "cuda"

    with (
        mock.patch.object(reductions, "has_kernel", lambda _, device: has_kernel(device)),
        mock.patch.object(emulate, "has_emulation_kernel", has_kernel),
        mock.patch.object(emulate, "has_probability_kernel", has_kernel),
        mock.patch.object(probabilities, "has_probability_kernel", has_kernel),
    ):
        yield


@contextmanager
def _simulated_kernels() -> Iterator[None]:
    from fp8calib.calibration import kernels  # noqa: PLC0415 -- it needs Triton

    launch = kernels.launch

    def launch_held(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        held = [each.held if isinstance(each, OnGpu) else each for each in arguments]
        launch(kernel, grid, *held, **constants)

    with mock.patch.object(kernels, "launch", launch_held):
        yield


def _infer(*args: Any, **kwargs: Any) -> dict[str, int | str]:
    """Replace accelerate's device 0 by `cuda:0`: a CPU build of torch does not accept 0."""
    found = _infer_device_map(*args, **kwargs)
    return {name: f"cuda:{at}" if isinstance(at, int) else at for name, at in found.items()}


def _run(thread: threading.Thread) -> None:
    """Run a thread on simulated GPUs: the modes of torch are per thread."""
    with _Simulation():
        _run_thread(thread)


@cache
def _set_guard() -> None:
    """Register a device guard that does nothing, which a CPU build of torch lacks."""
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        places = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", *places, str(source), "-lc10"]
        subprocess.run([*command, "-o", str(library)], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _dispatch(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation on the CPU, and mark its results as being on the GPU."""
    tensors: list[torch.Tensor] = []
    devices: list[torch.device] = []
    held_args = [_bring(each, tensors, devices) for each in args]
    held_kwargs = {name: _bring(each, tensors, devices) for name, each in kwargs.items()}
    home = _find_home(func, tensors, devices)
    if home.type == "cuda":
        found = _compute_as_cuda(func, args, held_args, held_kwargs)
    else:
        found = func(*held_args, **held_kwargs)
    known = {id(leaf.held): leaf for leaf in tensors if isinstance(leaf, OnGpu)}
    stream = _current_stream()
    stream.seen[stream] += 1
    for leaf in known.values():
        leaf.room.use(stream)

    def find_room(tensor: torch.Tensor) -> _Room:
        address = tensor.untyped_storage().data_ptr()
        same = (x.room for x in known.values() if x.held.untyped_storage().data_ptr() == address)
        room = next(same, None) or _Room(stream)
        room.written = stream, stream.seen[stream]
        return room

    def place(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if home.type != "cuda":
            return tensor.clone() if id(tensor) in known else tensor
        if (same := known.get(id(tensor))) is not None and same.device == home:
            find_room(tensor)
            return same
        is_given = same is not None or any(tensor is each for each in tensors)
        copied = tensor.clone() if is_given else tensor
        return OnGpu(copied, home, find_room(copied))

    return _map(place, found)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change every leaf of results, in a third of the time of torch's pytree."""
    if isinstance(value, tuple | list):
        return type(value)([_map(change, each) for each in value])
    return change(value)


def _bring(value: Any, tensors: list[torch.Tensor], devices: list[torch.device]) -> Any:
    """Bring arguments to the CPU, and list the tensors and devices among them."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.held if isinstance(value, OnGpu) else value
    if isinstance(value, tuple | list):
        return type(value)([_bring(each, tensors, devices) for each in value])
    if isinstance(value, torch.device):
        devices.append(value)
        return _CPU if value.type == "cuda" else value
    return value


def _compute_as_cuda(func: Any, args: Any, held: Any, kwargs: Any) -> Any:
    """Compute the operations that CUDA computes differently."""
    if func is torch.ops.aten.histc.default:  # the CPU's counts no integers
        return func(held[0].float(), *held[1:], **kwargs).to(held[0].dtype)
    divided = _DIVIDED.get(func)
    if divided is not None and held[0].is_floating_point() and not isinstance(args[1], OnGpu):
        # By a number of the host's: times its reciprocal (ATen's BinaryDivTrueKernel.cu).
        return divided(held[0], torch.tensor(float(args[1])).reciprocal())
    return func(*held, **kwargs)


def _find_home(
    func: Any, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> torch.device:
    """Find the device of an operation's results.

    Raises:
        RuntimeError: its tensors are of several devices.
    """
    for device in devices:
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    if func.overloadpacket in _TAKE_BOTH:
        return tensors[0].device
    homes = {each.device for each in tensors if each.ndim or each.device.type != "cpu"}
    if len(homes) > 1:
        named = ", ".join(sorted(map(str, homes)))
        raise RuntimeError(f"{func}: all tensors have to be on one device, not on {named}")
    return homes.pop() if homes else _CPU
