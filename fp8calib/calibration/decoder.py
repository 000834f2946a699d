"""Run one batch through the text decoder of a model, without its lm_head.

A row with media runs through the whole model up to the decoder (its towers, projectors, masks and
positions), which is then called with the arguments that the model gave to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fp8calib.data.sequences import Batch
from fp8calib.errors import CalibrationError, Fp8CalibError, ModelError
from fp8calib.model.topology import find_text_decoder, name_cache_argument

_OUT_OF_MEMORY_MESSAGES = (  # of the CPU's allocator
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
    """Refuse a model that cannot be run on text, before its weights are loaded."""
    config = model.config.get_text_config(decoder=True)
    why = _UNRUNNABLE.get(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "hunyuan_vl_text" and not rope.get("mrope_section"):
        why = "its text decoder does not run without mrope_section in rope_parameters"
    if why is not None:
        hint = "this architecture is not supported"
        raise ModelError(f"{type(model).__name__} ({config.model_type}): {why}", hint=hint)


DecoderCall = tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]
"""The arguments of the text decoder for a row with media, by place and by keyword, and the keywords
of the cache, which every call gets anew."""


class ForwardIsDone(BaseException):  # no Exception, so that no model handles it
    """Ends a forward pass early."""


class Decoder:
    """Runs batches through the text decoder (never the lm_head)."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_runnable(model)
        self.find_call: Callable[[Batch], DecoderCall | None] = lambda _batch: None
        """Gives what `prepare` gave for a batch, where that is stored."""
        self._model: Any = model
        self._decoder: Any = find_text_decoder(model)[1]
        # FSDP2 gathers weights where its outermost module is called; the lm_head gets one token.
        self._called: Any = self._decoder
        self._options: dict[str, int] = {}
        if isinstance(model, FSDPModule):
            self._called, self._options = model, {"logits_to_keep": 1}
        self._cache_argument = name_cache_argument(self._decoder)
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = cast("torch.dtype", self._decoder.dtype)
        embedding: Any = model.get_input_embeddings()
        hook = getattr(embedding, "_hf_hook", None)  # accelerate's, of --device-map auto
        device = getattr(hook, "execution_device", None)
        self.device = embedding.weight.device if device is None else torch.device(device)
        # rotary embeddings that keep the frequencies of the longest sequence so far
        # (transformers 5.23, `dynamic_rope_update`)
        self._growing = [
            module
            for module in self._decoder.modules()
            if hasattr(module, "max_seq_len_cached")
            and "dynamic" in str(getattr(module, "rope_type", ""))
        ]

    @torch.no_grad()
    def run(self, batch: Batch, cache: Any) -> torch.Tensor:
        """Run one batch and give its last hidden state: [B, S, C]; of FSDP2 the logits.

        Raises:
            OutOfMemoryInForward: the batch is too large.
            CalibrationError: the forward pass failed.
        """
        for module in self._growing:  # they get the frequencies they had before any sequence
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name.endswith("original_inv_freq"):
                    module._buffers[name.replace("original_", "")] = buffer.clone()
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, module.original_max_seq_len)
        mask = batch.mask
        if mask is not None:
            mask = mask.long().to(self.device, non_blocking=True)
        with self._explained(batch):
            if batch.media is None:
                output = self._called(
                    input_ids=copy_ids(batch.input_ids, self.device),
                    attention_mask=mask,
                    use_cache=True,
                    **{self._cache_argument: cache},
                    **self._options,
                )
            elif self._called is not self._decoder:  # FSDP2
                output = self._called(**self._media_inputs(batch, cache), **self._options)
            else:
                args, kwargs, caches = self.find_call(batch) or self.prepare(batch, cache)
                output = self._decoder(*args, **(kwargs | dict.fromkeys(caches, cache)))
            hidden: torch.Tensor = output[0]
            return hidden

    @contextmanager
    def _explained(self, batch: Batch) -> Iterator[None]:
        """Explain the error of a forward pass."""
        try:
            yield
        except Fp8CalibError:
            raise
        except Exception as error:
            told = isinstance(error, RuntimeError) and any(
                words in str(error) for words in _OUT_OF_MEMORY_MESSAGES
            )
            if told or isinstance(error, torch.OutOfMemoryError | MemoryError):
                rows, columns = batch.input_ids.shape
                raise OutOfMemoryInForward(
                    f"out of memory at sample {batch.first}, with {rows} sequences of {columns} "
                    "tokens",
                    hint="use a smaller --batch-size or --seq-len, --device-map auto, or --device "
                    "cpu",
                ) from error
            raise CalibrationError(
                f"{type(self._decoder).__name__}: its forward pass failed at sample {batch.first}: "
                f"{type(error).__name__}: {error}",
                hint="transformers runs this architecture in a way that fp8calib does not know",
            ) from error

    def _media_inputs(self, batch: Batch, cache: Any) -> dict[str, Any]:
        assert batch.media is not None  # noqa: S101 -- the caller looked
        ids = batch.input_ids.to(self.device)
        accepted: set[str] = set()  # by the model, or the model inside it that gets them
        for module in (self._model, self._model.base_model):
            parameters = signature(module.forward).parameters
            accepted |= parameters.keys()
            if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters.values()):
                break
        inputs: dict[str, Any] = {}
        for name, tensor in batch.media.load().items():
            if name in accepted:
                dtype = self._model.dtype if tensor.is_floating_point() else tensor.dtype
                inputs[name] = tensor.to(self.device, dtype)
            elif tensor.is_floating_point():
                raise ModelError(
                    f"{type(self._model).__name__} does not take {name}, which the processor makes "
                    f"of {batch.media.row.origin}",
                    hint="the processor belongs to another model",
                )
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "use_cache": True,
            name_cache_argument(self._model): cache,
            **inputs,
        }

    @torch.no_grad()
    def prepare(self, batch: Batch, cache: Any) -> DecoderCall:
        """Run what comes before the decoder on a row with media; it raises what `run` does."""
        caught: list[DecoderCall] = []

        def catch(*args: Any, **kwargs: Any) -> None:
            caches = tuple(name for name, value in kwargs.items() if value is cache)
            kept = {name: value for name, value in kwargs.items() if name not in caches}
            caught.append((args, kept, caches or (self._cache_argument,)))
            raise ForwardIsDone

        is_caught = replaced_forward(self._decoder, catch)
        with self._explained(batch), is_caught, suppress(ForwardIsDone):
            self._model(**self._media_inputs(batch, cache))
        if caught:
            return caught[0]
        raise ModelError(
            f"{type(self._model).__name__}: its forward pass does not call its text decoder",
            hint="this architecture is not supported",
        )


def copy_ids(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy token ids to a device, where `EmbeddingRows` needs not wait for them."""
    copied = ids.to(device, non_blocking=True)
    if copied is not ids and not copied.is_inference():
        vars(copied)["on_host"] = copied._version, ids
    return copied


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module while the context is open; hooks of the module still run."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
