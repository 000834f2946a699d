"""Run one batch through the text decoder of a model, without its lm_head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fp8calib.data.plan import Batch
from fp8calib.errors import CalibrationError, Fp8CalibError, ModelError
from fp8calib.model.topology.find import find_text_decoder, name_cache_argument

_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator",
    "could not create a primitive",  # oneDNN, in bfloat16: no room for its scratch pad
    "could not create a memory object",
    "could not execute a primitive",
)


class OutOfMemoryInForward(CalibrationError):  # noqa: N818 -- a state that smaller batches avoid
    """A batch did not fit into memory."""


_UNRUNNABLE: Mapping[str, str] = {
    "minimax": "its forward pass takes only a cache of its own, where K and V cannot be observed",
    "mllama_text_model": "its cross-attention layers cache K and V of images, never of text",
}
"""Text decoders that cannot be run on text alone, or not observed (transformers 5.23)."""


def check_runnable(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be run on text, before its weights are loaded.

    Raises:
        ModelError: its text decoder is known not to run, or lacks what its forward pass needs.
    """
    config = model.config.get_text_config(decoder=True)
    why = _UNRUNNABLE.get(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "hunyuan_vl_text" and not rope.get("mrope_section"):
        why = "its text decoder does not run without mrope_section in rope_parameters"
    if why is not None:
        hint = "this architecture is not supported"
        raise ModelError(f"{type(model).__name__} ({config.model_type}): {why}", hint=hint)


class Decoder:
    """Runs batches through the text decoder (never the lm_head)."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_runnable(model)
        self._decoder: Any = find_text_decoder(model)[1]
        # FSDP2 gathers weights where its outermost module is called; the lm_head gets one token.
        self._called: Any = self._decoder
        self._options: dict[str, int] = {}
        if isinstance(model, FSDPModule):
            self._called, self._options = model, {"logits_to_keep": 1}
        self._cache_argument = name_cache_argument(self._decoder)
        self.config = model.config.get_text_config(decoder=True)
        self.device = _input_device(model)
        self._growing = [m for m in self._decoder.modules() if _grows_with_length(m)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the decoder computes in."""
        dtype: torch.dtype = self._decoder.dtype
        return dtype

    def run(self, batch: Batch, cache: Any, *, traces: bool = False) -> torch.Tensor:
        """Run one batch and give its last hidden state: [B, S, C]; of FSDP2 the logits.

        `traces` records what gradients need.

        Raises:
            OutOfMemoryInForward: the batch is too large.
            CalibrationError: the forward pass failed.
        """
        mask = batch.mask
        for module in self._growing:
            _forget_lengths(module)
        try:
            with torch.set_grad_enabled(traces):
                output = self._called(
                    input_ids=batch.input_ids.to(self.device, non_blocking=True),
                    attention_mask=None
                    if mask is None
                    else mask.long().to(self.device, non_blocking=True),
                    use_cache=True,
                    **self._options,
                    **{self._cache_argument: cache},
                )
        except Fp8CalibError:
            raise
        except Exception as error:
            if _is_out_of_memory(error):
                raise _out_of_memory(batch, error) from error
            raise CalibrationError(
                f"{type(self._decoder).__name__}: its forward pass failed at sample {batch.first}: "
                f"{type(error).__name__}: {error}",
                hint="transformers runs this architecture in a way that fp8calib does not know",
            ) from error
        hidden: torch.Tensor = output[0]
        return hidden


def _grows_with_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that keeps the frequencies of the longest sequence so far.

    Transformers 5.23, `dynamic_rope_update`.
    """
    return hasattr(module, "max_seq_len_cached") and "dynamic" in str(
        getattr(module, "rope_type", "")
    )


def _forget_lengths(module: Any) -> None:
    """Give a rotary embedding the frequencies that it had before any sequence."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            module._buffers[name.replace("original_", "")] = buffer.clone()
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)


def _is_out_of_memory(error: Exception) -> bool:
    """Recognise torch's and C++'s errors, and by message those of the CPU allocator and oneDNN."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _OUT_OF_MEMORY_MESSAGES
    )


def _out_of_memory(batch: Batch, error: Exception) -> OutOfMemoryInForward:
    rows, columns = batch.input_ids.shape
    is_known = not str(error).startswith("could not")
    return OutOfMemoryInForward(
        f"out of memory at sample {batch.first}, with {rows} sequences of {columns} tokens"
        + ("" if is_known else f" ({error})"),
        hint="use a smaller --batch-size or --seq-len, --device-map auto, or --device cpu",
    )


def _input_device(model: nn.Module) -> torch.device:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(device) if device is not None else embedding.weight.device
