"""Load a folder with the transformers that is installed, on the meta device, and run the model.

transformers itself chooses the class and the files, renames tensors, joins experts and compares
names and shapes. No weight is read: what it gets from a file is an empty tensor of the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8calib.checkpoint.tensor_file import LazyTensor, TensorFile
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.errors import shorten


def load_on_meta(
    folder: ScaleFolder,
) -> tuple[torch.nn.Module, Mapping[str, Any], Mapping[str, Collection[str]], Mapping[str, str]]:
    """Load a folder as `from_pretrained` with `dtype="auto"` does.

    Returns:
        The model, what transformers reports of loading it, by file that it opened, in order: the
        tensors that filled a parameter, or a part of one; and the parameter that a tensor fills
        alone.

    Raises:
        Refusal: transformers fails; the reason is its error.
        Unjudged: it fails for what this machine lacks, or would run code of the model.
    """
    opened: dict[str, _OpenFile] = {}
    faults: list[Any] = []
    filled: dict[str, str] = {}
    with (
        _as_on_cpu(),
        _observe(opened, faults, filled),
        # it draws numbers for parameters that are missing, and takes half of the time
        mock.patch(f"{_MODEL}.initialize_weights"),
    ):
        try:
            model, loading = _find_class(folder.config).from_pretrained(
                folder.path,
                device_map="meta",
                dtype="auto",
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except ImportError as error:  # of this machine, not of the checkpoint
            raise Unjudged(f"a package is not installed here ({_describe(error)})") from error
        except Exception as error:  # whatever the engine raises is its answer
            if "trust_remote_code" in str(error):
                raise Unjudged(_OWN_CODE) from error
            why = _describe_fault(faults[0]) if faults else ""
            raise Refusal(why or _describe(error), fix=_FIX) from error
    return model, loading, {file: each.read for file, each in opened.items()}, filled


_OWN_CODE = "the model has code of its own, which check does not run"
_FIX = "the reason is transformers' own error: write the checkpoint or its config again"
_NUM_TOKENS = 8
_KERNELS = "transformers.integrations."
"""Where the modules are that transformers puts in the place of linears on a GPU."""
_LACKING = ("Config' object has no attribute", "'NoneType'")
"""What errors say where a config lacks a value."""


def find_run_error(model: torch.nn.Module) -> str:
    """Say which module fails in a forward pass, and how; empty where none does.

    A failure that the model also has without quantization comes from the meta device, unless its
    config lacks a value. Of such a model, each linear runs by itself. Modules of kernels run on no
    meta device.
    """
    modules = model.modules()
    has_kernels = any(type(each).__module__.startswith(_KERNELS) for each in modules)
    error = "" if has_kernels else _run(model)
    if error or has_kernels:
        plain: Any = type(model)
        config: Any = deepcopy(model.config)
        config.__dict__.pop("quantization_config", None)
        with torch.device("meta"):
            built = plain._from_config(config)
        dtypes = {name: each.dtype for name, each in model.named_parameters()}
        for name, each in built.named_parameters():  # the text model's may be another than experts'
            dtype = dtypes.get(name, each.dtype)
            each.data = each.to(dtype if dtype.itemsize > 1 else each.dtype)
        plain_error = _run(built)
        if any(mark in plain_error for mark in _LACKING):
            return plain_error
        if error and plain_error:
            return _run_linears(model)
    return error


def _run_linears(model: Any) -> str:
    """Run each linear on inputs of the first parameter's dtype, as `_run` does a model."""
    linears = (each for each in model.named_modules() if isinstance(each[1], torch.nn.Linear))
    for name, module in linears if model.dtype.itemsize > 1 else ():
        given = torch.empty(1, module.in_features, dtype=model.dtype, device="meta")
        try:
            with _as_on_cpu():
                module(given)
        except Exception as error:  # noqa: BLE001 -- the engine's answer
            return f"{shorten(name)} fails with {_describe(error)}"
    return ""


def _run(model: Any) -> str:
    """Run a model; say which module fails, and how; empty where none does."""
    entered = [model]

    def leave(*_: object) -> None:
        entered.pop()

    hooks = torch.nn.modules.module
    with (
        _as_on_cpu(),
        torch.no_grad(),
        mock.patch(f"{_DECOMPRESSION}.from_accelerate", create=True),  # knows no meta device
        hooks.register_module_forward_pre_hook(lambda module, _: entered.append(module)),
        hooks.register_module_forward_hook(leave),
    ):
        try:
            model.set_experts_implementation("batched_mm")  # does not depend on numbers
            model(torch.empty(1, _NUM_TOKENS, dtype=torch.long, device="meta"))
        except Exception as error:  # noqa: BLE001 -- the engine's answer
            names = {module: name for name, module in model.named_modules()}
            failed = names.get(entered[-1]) or type(entered[-1]).__name__
            return f"{shorten(failed)} fails with {_describe(error)}"
    return ""


_MODEL = "transformers.modeling_utils.PreTrainedModel"
_DECOMPRESSION = "compressed_tensors.compressors.model_compressors.model_compressor"


class _DtypesOfCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse operations of several dtypes, as a CPU does and the meta device does not."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        dtypes = {each.dtype for each in tensors if each.is_floating_point()}
        name = function.overloadpacket.__name__
        is_refused = name in _PRODUCTS or (
            name not in _CASTS and any(each.itemsize == 1 for each in dtypes)
        )
        if len(dtypes) > 1 and is_refused:
            raise RuntimeError(f"{name} of {' and '.join(sorted(map(str, dtypes)))}")
        return function(*args, **(kwargs or {}))


_PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
_CASTS = ("copy_", "_to_copy")


def _find_class(config: Mapping[str, object]) -> Any:
    """Find the class that loads a model: a causal language model, else the one of the config."""
    import transformers  # noqa: PLC0415 -- slow
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    return getattr(transformers, first, transformers.AutoModelForCausalLM)


def _describe(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def _describe_fault(info: Any) -> str:
    """Describe the first tensor that transformers could not load; its error names none."""
    for name, shape, wanted in sorted(info.mismatched_keys):
        sizes = f"{list(shape)}, the parameter {list(wanted)}"
        return f"{shorten(name)} has shape {sizes}: size mismatch (RuntimeError)"
    for name, why in info.conversion_errors.items():
        last = next((line for line in reversed(why.splitlines()) if line.strip()), "").strip()
        return f"{shorten(name)} cannot be converted (RuntimeError): {last[:300]}"
    return ""


@contextmanager
def _as_on_cpu() -> Iterator[None]:
    """Refuse what a CPU refuses, and silence what transformers says: the report says it."""
    import loguru  # noqa: PLC0415 -- comes with compressed-tensors
    from transformers.utils import logging  # noqa: PLC0415 -- slow

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    loguru.logger.disable("compressed_tensors")
    try:
        with (
            warnings.catch_warnings(),
            redirect_stderr(StringIO()),
            _DtypesOfCpu(),  # type: ignore[no-untyped-call]
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        loguru.logger.enable("compressed_tensors")
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def _observe(
    opened: dict[str, _OpenFile], faults: list[Any], filled: dict[str, str]
) -> Iterator[None]:
    """Let transformers open files without their tensors' values, and note what it tells."""
    from transformers import core_model_loading, modeling_utils  # noqa: PLC0415 -- slow

    log, find_name = modeling_utils.log_state_dict_report, core_model_loading.rename_source_key

    def report(*arguments: Any, **named: Any) -> None:
        faults.append(named["loading_info"])
        log(*arguments, **named)

    def open_file(file: str, *_: object, **__: object) -> _OpenFile:
        path = Path(file)
        return opened.setdefault(path.name, _OpenFile(path))

    def rename(tensor: str, *arguments: Any, **named: Any) -> tuple[str, str | None]:
        parameter, converted = find_name(tensor, *arguments, **named)
        if converted is None:
            filled[tensor] = parameter
        return parameter, converted

    with (
        mock.patch.multiple(modeling_utils, safe_open=open_file, log_state_dict_report=report),
        mock.patch.object(core_model_loading, "rename_source_key", rename),
    ):
        yield


class _OpenFile(nullcontext["_OpenFile"]):
    """A file as `safetensors.safe_open` gives it, whose tensors are empty."""

    def __init__(self, path: Path) -> None:
        super().__init__(self)
        with TensorFile(path) as file:
            self._tensors, self._metadata = file.tensors, file.metadata
        self.read: set[str] = set()

    def metadata(self) -> Mapping[str, str] | None:
        """Give the metadata of the header; None if it has none."""
        return self._metadata or None

    def keys(self) -> list[str]:
        """List the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> LazyTensor:
        """Give a tensor without numbers, which is made when it is read."""
        entry = self._tensors[name]

        def make() -> torch.Tensor:
            self.read.add(name)
            return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")

        return LazyTensor(entry, make)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Give an empty tensor."""
        return self.get_slice(name)[...]
