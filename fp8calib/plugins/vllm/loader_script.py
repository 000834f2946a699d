"""Load a checkpoint with vLLM's own classes and loaders, without reading its weights.

This file runs in vLLM's environment, as a script, and imports nothing of fp8calib:

    python loader_script.py FOLDER KV_CACHE_DTYPE TENSOR_PARALLEL_SIZE [--trust-remote-code]

Every rank is loaded in turn. The last line on stdout is one JSON object. Tensors of more than
`_MOST_ELEMENTS` are on the meta device, with the shape and dtype that the file's header gives;
smaller ones, such as scales, have their values.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

_MOST_ELEMENTS = 4096
_UNSET = -3.4028234663852886e38
"""torch.finfo(torch.float32).min."""
_WEIGHTS = (".weight", ".bias", ".w13_weight", ".w2_weight")
"""How the names of weights and biases end; the last two are those of all experts of a layer."""


def main() -> None:
    """Print what vLLM does with a folder."""
    folder, kv_cache_dtype, size = sys.argv[1:4]
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    answer: dict[str, Any] = {"stage": "import", "version": "", "rank": 0, "error": "", "trace": []}
    answer |= {"runner": "", "files": [], "missing": [], "casts": [], "scales": []}
    try:
        _load(folder, kv_cache_dtype, int(size), answer)
    except Exception as error:  # noqa: BLE001 -- whatever vLLM raises is its answer
        lines = str(error).splitlines()
        answer["error"] = f"{type(error).__name__}: {' '.join(lines)[:300]}"
        frames = traceback.extract_tb(error.__traceback__)
        answer["trace"] = [f"{_shorten(each.filename)}:{each.name}" for each in frames]
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # vLLM's threads may not end


def _shorten(file: str) -> str:
    """Give the path of a file in the environment's packages."""
    return file.rpartition("/site-packages/")[2]


def _load(folder: str, kv_cache_dtype: str, size: int, answer: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    answer["version"] = vllm.__version__
    # The processor of a model with images or audio is made with the tokenizer.
    has_tokenizer = any(Path(folder).glob("*token*")) or any(Path(folder).glob("tekken*"))
    for rank in range(size):
        answer.update(stage="config", rank=rank, files=[])
        # A config of its own: vLLM registers the layers of a rank in it.
        config = EngineArgs(
            model=folder,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=size,
            enforce_eager=True,
            skip_tokenizer_init=not has_tokenizer,
            trust_remote_code="--trust-remote-code" in sys.argv,
        ).create_engine_config()
        if config.model_config.runner_type == "generate":
            # As LLM and the server do, after the weights; it reads generation_config.json.
            SamplingParams.from_optional(**config.model_config.get_diff_sampling_param())
        answer.update(stage="model", runner=config.model_config.runner_type)
        _leave_out_kernels()
        torch.set_default_dtype(config.model_config.dtype)
        with set_current_vllm_config(config), _join_groups(rank, size), _make_mode(answer["casts"]):
            _load_rank(config, answer)
    answer["stage"] = "done"


def _load_rank(config: Any, answer: dict[str, Any]) -> None:
    from vllm.model_executor.model_loader import default_loader, get_model_loader  # noqa: PLC0415
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415

    model = initialize_model(config, model_config=config.model_config)
    answer["stage"] = "weights"
    default_loader.safetensors_weights_iterator = _make_iterator(answer["files"])
    load = model.load_weights
    loaded: set[str] = set()
    model.load_weights = lambda pairs: loaded.__ior__(set(load(pairs) or ()))
    get_model_loader(config.load_config).load_weights(model, config.model_config)
    answer["missing"] = list(_list_missing(model, loaded)) if loaded else []
    _process_without_values(model)
    answer["stage"] = "scales"
    answer["scales"].append(dict(_read_scales(model)))


def _list_missing(model: Any, loaded: set[str]) -> Iterator[str]:
    """List the weights and biases that were filled under none of their names, and unset scales."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    for parameter, aliases in found.values():
        is_left = loaded.isdisjoint(aliases) and aliases[0].endswith(_WEIGHTS)
        if is_left or (aliases[0].endswith("_scale") and _is_unset(parameter)):
            yield aliases[0]


def _is_unset(scale: Any) -> bool:
    """Check whether a part of a scale has the number that vLLM makes it with."""
    return not scale.is_meta and bool((scale.float() == _UNSET).any())


def _process_without_values(model: Any) -> None:
    """Process weights after loading where that needs no values: FP8 whose inputs have 16 bits."""
    for module in model.modules():
        scheme: Any = getattr(module, "scheme", None)
        if type(scheme).__name__ == "CompressedTensorsW8A16Fp8":
            scheme.process_weights_after_loading(module)


class _NoKernel:
    """Stands for the kernel of a linear, which no loader uses."""

    def __init__(self, *_: object, **__: object) -> None:
        self.config = SimpleNamespace()

    def input_quant_key(self) -> None:
        """Take inputs that are not quantized yet."""

    def process_weights_after_loading(self, _: object) -> None:
        """Leave weights as they are."""


def _leave_out_kernels() -> None:
    """Look for no kernels of linears: a CPU has none for FP8 blocks, w8a16, MXFP8 and NVFP4."""
    from vllm.model_executor.kernels import linear  # noqa: PLC0415

    put: dict[object, object] = {
        maker: _NoKernel
        for name, maker in vars(linear).items()
        if name.startswith("init_") and name.endswith("_linear_kernel")
    }
    put[linear.choose_mp_linear_kernel] = lambda *_, **__: _NoKernel
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in put:
                setattr(module, name, put[value])


@contextmanager
def _join_groups(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a server; torch's fake backend stands for the others, which do not run."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415

    new_group = dist.new_group
    changes = {
        (dist, "new_group"): lambda ranks, **_: new_group(ranks, backend=dist.Backend.FAKE),
        (parallel_state, "_node_count"): lambda _: 1,
        (parallel_state, "init_model_parallel_group"): _make_group,
    }
    with ExitStack() as stack:
        for (module, name), put in changes.items():
            stack.enter_context(mock.patch.object(module, name, put))
        dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=size)
        parallel_state.init_distributed_environment(
            size, rank, local_rank=rank, backend=dist.Backend.FAKE
        )
        parallel_state.initialize_model_parallel(size)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _make_group(group_ranks: list[list[int]], local_rank: int, backend: str, **_: object) -> Any:
    """Make a group that has no queue of messages, and no shared memory."""
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.distributed.device_communicators import base_device_communicator  # noqa: PLC0415

    group = parallel_state.GroupCoordinator(group_ranks, local_rank, backend, False)
    group.device_communicator = base_device_communicator.DeviceCommunicatorBase(
        group.cpu_group, group.device, group.device_group
    )
    return group


def _make_mode(casts: list[str]) -> Any:
    """Make the mode that puts every large new tensor on the meta device.

    It notes where stored integers become floats: exponents, say, that are taken for scales.
    """
    import torch  # noqa: PLC0415
    from torch.overrides import TorchFunctionMode  # noqa: PLC0415

    makers = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
    sized = {*makers}

    def count(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
        size = named.get("size", arguments)
        size = size[0] if size and isinstance(size[0], (tuple, list, torch.Size)) else size
        number = 1
        for each in size:
            number *= int(each) if isinstance(each, int) else 1
        return number

    def is_on_meta(source: Any) -> bool:
        return isinstance(source, torch.Tensor) and source.is_meta  # copy_ takes a number too

    class LargeOnMeta(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
                stored, taken = args[1].dtype, args[0].dtype
                if stored in (torch.uint8, torch.int8) and taken.is_floating_point:
                    casts.append(f"{stored} to {taken}")
            if function in sized and count(args, kwargs) > _MOST_ELEMENTS:
                kwargs["device"] = "meta"
            elif function is torch.Tensor.copy_ and is_on_meta(args[1]) and not args[0].is_meta:
                # A part of a large tensor: only its shape is known.
                args[1].expand_as(args[0])
                return args[0]
            return function(*args, **kwargs)

    return LargeOnMeta()


def _make_iterator(files: list[str]) -> Any:
    """Make what vLLM reads safetensors files with; it notes the files that vLLM chose."""
    import torch  # noqa: PLC0415
    from vllm.model_executor.model_loader import weight_utils  # noqa: PLC0415

    order = getattr(weight_utils, "_natural_sort_key", None)
    dtypes = _list_dtypes()

    def iterate(
        paths: Iterable[str], *_: object, **__: object
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(paths, key=order):
            files.append(Path(path).name)
            data, header = _read_header(Path(path))
            for name, entry in header.items():
                number = 1
                for size in entry["shape"]:
                    number *= size
                if number > _MOST_ELEMENTS:
                    yield (
                        name,
                        torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]], device="meta"),
                    )
                else:
                    start, stop = (data + offset for offset in entry["data_offsets"])
                    # Not by mmap, which needs as much address space as the file is long.
                    raw = bytearray(_read_bytes(Path(path), start, stop))
                    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0)
                    dtype = dtypes[entry["dtype"]]
                    typed = flat.view(dtype) if raw else flat.to(dtype)
                    yield name, typed.reshape(entry["shape"])

    return iterate


def _list_dtypes() -> dict[str, Any]:
    """Give torch's dtypes by their names in safetensors files."""
    import torch  # noqa: PLC0415

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    }


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Read where a file's data starts, and the header; fail where the file is incomplete."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise OSError(f"{path.name} is incomplete, or has bytes that no tensor owns")
    return 8 + length, header


def _read_bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _read_scales(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the scales that each attention layer multiplies K and V by."""
    for name, module in model.named_modules():
        if not hasattr(module, "_k_scale"):
            continue
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
        yield name, {role: _list_numbers(getattr(module, f"_{role}_scale")) for role in "kv"}


def _list_numbers(scale: Any) -> list[str]:
    """Spell numbers; JSON has neither NaN nor infinity."""
    return [str(each) for each in scale.detach().float().flatten().tolist()]


if __name__ == "__main__":
    main()
