"""A model in memory: read its tensors as a checkpoint, and restore its state afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.model_config import find_quantization_configs
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.load import attend_causally
from fp8calib.model.topology import find_text_decoder, is_linear, name_class

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class LiveCheckpoint(Checkpoint):
    """The checkpoint that `save_pretrained` would write of a model, without writing it.

    Tensors are views of the model's parameters, read on the CPU. After `hold` they are copies, and
    later changes of the parameters have no effect on them. A tensor that is sharded is gathered
    when it is read: all processes read the same ones in the same order.

    A model that was built from the config in `skeleton_of`, a folder without weights, gives names
    and shapes alone.
    """

    def __init__(self, model: PreTrainedModel, *, skeleton_of: Path | None = None) -> None:
        super().__init__(skeleton_of or Path(model.name_or_path or name_class(model)))
        self.has_weights = skeleton_of is None
        config = deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [name_class(model)]
        self._config = json.loads(config.to_json_string())
        state = model.state_dict()
        for name in set(model._keys_to_ignore_on_save or ()) & state.keys():
            del state[name]
        state = remove_tied_weights_from_state_dict(state, model)
        self._live: dict[str, torch.Tensor] = {
            name: tensor.detach() for name, tensor in revert_weight_conversion(model, state).items()
        }
        self.tensors = {
            name: TensorEntry(_NAMES[x.dtype], tuple(x.shape), 0, x.numel() * x.element_size())
            for name, x in sorted(self._live.items())
        }

    def hold(self) -> None:
        """Copy every tensor to memory of its own, so that the parameters can be replaced."""
        for name, tensor in self._live.items():
            if tensor.is_inference():
                raise UsageError(
                    f"{name} was made in torch.inference_mode(), so it cannot be replaced",
                    hint="load the model outside of inference_mode, or pass its path",
                )
            self._live[name] = tensor.cpu().clone()

    def sample_bytes(self, name: str, size_bytes: int) -> bytes:
        """Read bytes as of a file; none without weights, so that config and shapes count."""
        return super().sample_bytes(name, size_bytes) if self.has_weights else b""

    def make_rows(self, name: str, rows: slice) -> torch.Tensor:
        """Give rows of a tensor on the CPU, of one without axes the only number."""
        if not self.has_weights:
            raise ModelError(
                f"{self.folder}: there are no weights, so {name} cannot be read",
                hint="a plan of the run (--dry-run) is all that a config alone gives",
            )
        tensor = self._live[name]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.reshape(tensor.shape or (1,))[rows].cpu().contiguous()


_MERGE = "merge adapters into the weights, and pass that model (PEFT: merge_and_unload)"
_UNQUANTIZED = "pass the unquantized model, or the path of a checkpoint"


def check_live_model(model: PreTrainedModel, *, can_be_sharded: bool = False) -> None:
    """Refuse a loaded model that is quantized, sharded, offloaded or has adapters.

    With `can_be_sharded` it may be sharded by FSDP2, whose forward pass gathers the weights.

    Raises:
        UsageError: it is not a model of transformers.
        ModelError: naming the reason.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inside = "pass the model inside of a wrapper (DDP, FSDP, torch.compile)"
        wrapped = _MERGE if type(model).__module__.startswith("peft.") else inside
        raise UsageError(
            f"{name} is neither a path nor a PreTrainedModel of transformers",
            hint=wrapped if isinstance(model, nn.Module) else "",
        )
    can_be_sharded = can_be_sharded and isinstance(model, FSDPModule)
    for fault, hint in _list_faults(model, can_be_sharded=can_be_sharded):
        raise ModelError(f"{name}: {fault}", hint=hint)


def _list_faults(model: PreTrainedModel, *, can_be_sharded: bool) -> Iterator[tuple[str, str]]:
    """List why a model cannot be run as it is, with what to do."""
    if getattr(model, "hf_quantizer", None) is not None or any(
        section for _, section in find_quantization_configs(model.config.to_dict())
    ):
        yield "the model in memory is quantized", _UNQUANTIZED
    if getattr(model, "_hf_peft_config_loaded", False):
        yield "the model in memory has adapters", _MERGE
    for path, module in model.named_modules():
        if hasattr(module, "base_layer"):  # PEFT wraps the linear
            yield f"{path}: {type(module).__name__} is an adapter", _MERGE
        if not is_linear(module):
            continue
        own = (*module._parameters, *module._modules)
        extra = [each for each in own if each not in ("weight", "bias")]
        if "weight" not in module._parameters:  # parametrized, weight norm, pruned
            yield (
                f"{path}: its weight is computed from {', '.join(extra) or 'other tensors'}",
                "make it a parameter first (torch: remove_parametrizations, prune.remove)",
            )
        if extra:
            yield f"{path}: beside weight and bias it has {extra[0]}", _MERGE
    if getattr(model.config, "is_encoder_decoder", False):
        yield "it is not a decoder-only language model", ""
    for parameter, value in model.named_parameters():
        # sharded along one dimension of its mesh, and not also by its heads
        placements = value.placements if isinstance(value, DTensor) else ()
        is_cut_once = sum(not each.is_replicate() for each in placements) <= 1
        is_elsewhere = isinstance(value, DTensor) and not (can_be_sharded and is_cut_once)
        if is_elsewhere or value.is_meta or not value.numel():
            where = "offloaded" if value.is_meta else "sharded over processes"
            yield (
                f"{parameter} is {where}, so the model cannot be run here",
                "gather the weights first, or pass the path of a checkpoint",
            )
        if value.dtype not in _NAMES or not value.dtype.is_floating_point:
            yield f"{parameter} is {value.dtype}: quantized", _UNQUANTIZED


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode with causal attention, uncompiled; at the end, restore it.

    The attributes, buffers and hooks of each module and the configs are restored. A compiled module
    would bypass the hooks in it, and its parameters would have other names.
    """
    with ExitStack() as stack:
        for module in [*model.modules()]:
            stack.callback(_restore, module, *_take_state(module))
            if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile()
                module._compiled_call_impl = None
            for name, child in [*module._modules.items()]:
                original = child
                while original is not None and "_orig_mod" in original._modules:  # torch.compile
                    original = original._modules["_orig_mod"]
                if original is not child:
                    module._modules[name] = original
        decoder = find_text_decoder(model)[1]
        owners = (model.config, model.config.get_text_config(decoder=True), decoder.config)
        for attributes in {id(owner): vars(owner) for owner in owners}.values():
            stack.callback(_refill, attributes, attributes.copy())
        model.eval()
        attend_causally(model)
        yield


def _take_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the attributes of a module with copies of its dicts and sets, and copies of buffers.

    Parameters stay where they are, which FSDP2 decides. A forward pass may change in place only the
    buffers that are not stored.
    """
    own = {name: value for name, value in vars(module).items() if name != "_parameters"}
    attributes = {n: v.copy() if isinstance(v, dict | set) else v for n, v in own.items()}
    copies = {
        name: value.clone()
        for name, value in module._buffers.items()
        if name in module._non_persistent_buffers_set and value is not None
    }
    return attributes, copies


def _restore(module: nn.Module, attributes: dict[str, Any], copies: dict[str, Any]) -> None:
    own = vars(module)
    for name in own.keys() - attributes.keys() - {"_parameters"}:
        del own[name]
    for name, value in attributes.items():
        if isinstance(value, dict | set) and isinstance(own.get(name), type(value)):
            _refill(own[name], value)
        else:
            own[name] = value
    for name, before in copies.items():
        buffer: Any = module._buffers[name]
        with torch.inference_mode(buffer.is_inference()):  # else it cannot be written
            buffer.copy_(before)


def _refill(container: Any, before: Any) -> None:
    """Restore a dict or set that others refer to, such as the handles of hooks."""
    container.clear()
    container.update(before)
