"""The model of a run: a path or Hub id, or one that is in memory already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import UsageError
from fp8calib.machine.devices import choose_device
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES, choose_dtype
from fp8calib.model.live_model import (
    LiveCheckpoint,
    borrowed,
    check_live_model,
)
from fp8calib.model.load import (
    LoadedModel,
    ModelSource,
    as_unquantized,
    build_skeleton,
    load_model,
    open_source,
)
from fp8calib.model.prepared import PreparedModel, prepare
from fp8calib.quantization.sources.decoded import open_model
from fp8calib.recipe import Recipe
from fp8calib.requests.shared import Model
from fp8calib.run.forward.decoder import check_runnable


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs, in which dtype, and in how much memory."""

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    memory: float | None = None
    """GiB."""

    def check(self) -> None:
        """Refuse an unknown device map, and one that contradicts the device.

        Raises:
            UsageError: naming it.
        """
        if self.device_map not in (None, "auto"):
            raise UsageError(f"--device-map {self.device_map}: must be auto")
        if self.device_map and self.device != "auto":
            raise UsageError("--device-map auto chooses the devices itself: leave out --device")

    def refuse(self) -> None:
        """Refuse every choice, because the model is in memory already.

        Raises:
            UsageError: one was made.
        """
        for name in ("device", "dtype", "device_map", "memory"):
            if getattr(self, name) not in ("auto", None):
                raise UsageError(
                    f"{name}: the model is in memory already, where and as it is",
                    hint=f"leave {name} out, or pass the path of a checkpoint",
                )


class Placed(Protocol):
    """A request that says where the model runs."""

    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def memory(self) -> float | None: ...  # noqa: D102


def place(request: Placed) -> Placement:
    """Say where the model of a request runs."""
    return Placement(
        device=request.device,
        dtype=request.dtype,
        device_map=getattr(request, "device_map", None),
        memory=request.memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model that text runs through, before its weights are loaded or already with them."""

    name: str
    """As the user names it."""
    source: ModelSource
    checkpoint: Checkpoint
    prepared: PreparedModel
    """Without weights, unless the model is live."""
    placement: Placement
    device: str
    dtype: str
    dtype_why: str
    is_live: bool = False
    """Whether the caller holds the model in memory."""

    def load(self, progress: Progress) -> LoadedModel:
        """Give the model whole and in memory.

        Raises:
            CalibrationError: the memory is too small.
            ModelError: a weight is missing or has another shape.
        """
        if self.is_live:
            return self.prepared.model
        progress.stage("loading the model", None)
        return load_model(
            self.source,
            dtype=DTYPES[self.dtype],
            device=self.device,
            device_map=self.placement.device_map,
            checkpoint=self.checkpoint,
        )

    def describe_decoded(self) -> Iterator[str]:
        """Describe a model that is quantized already, and is decoded while it is read."""
        if self.checkpoint.form:
            yield (
                f"{self.name} is quantized already: its {self.checkpoint.form} are dequantized, "
                "and their errors are in everything that is measured; inputs are not quantized"
            )


@contextmanager
def open_run_model(
    model: Model,
    placement: Placement,
    *,
    revision: str | None,
    trust_remote_code: bool,
    if_quantized: str,
    recipe: Recipe | None = None,
    can_be_sharded: bool = False,
) -> Iterator[RunModel]:
    """Open a model to run; `if_quantized` is what to do instead of one that cannot be decoded.

    With `can_be_sharded` a model in memory may be sharded by FSDP2.

    While the context is open, a model in memory is in evaluation mode, and the caller's modes of
    torch are off: tensors of inference mode have no versions, by which changes are found; autocast
    and another default dtype would change what is computed.

    Raises:
        UsageError: a device or dtype is unknown, or was chosen for a model in memory.
        ModelError: the model cannot be read, or is not supported.
        RecipeError: a pattern of the recipe matches no module.
    """
    with _plain_torch():
        if isinstance(model, str | Path):
            yield from _open_path(
                str(model),
                placement,
                revision=revision,
                trust_remote_code=trust_remote_code,
                if_quantized=if_quantized,
                recipe=recipe,
            )
        else:
            placement.refuse()
            check_live_model(model, can_be_sharded=can_be_sharded)
            yield from _open_live(model, recipe)


@contextmanager
def _plain_torch() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_default_dtype(default)


def _open_path(
    model: str,
    placement: Placement,
    *,
    revision: str | None,
    trust_remote_code: bool,
    if_quantized: str,
    recipe: Recipe | None,
) -> Iterator[RunModel]:
    placement.check()
    device = choose_device(placement.device)
    source = open_source(model, revision=revision, trust_remote_code=trust_remote_code)
    with open_model(source.folder, if_quantized=if_quantized) as checkpoint:
        if checkpoint.form:
            source = as_unquantized(source)
        dtype, why = choose_dtype(placement.dtype, device=device, checkpoint=checkpoint)
        prepared = prepare(build_skeleton(source), checkpoint, recipe)
        if recipe is None or recipe.observe.needs_forward:
            check_runnable(prepared.model)
        yield RunModel(
            name=model,
            source=source,
            checkpoint=checkpoint,
            prepared=prepared,
            placement=placement,
            device=device,
            dtype=dtype,
            dtype_why=why,
        )


def _open_live(model: PreTrainedModel, recipe: Recipe | None) -> Iterator[RunModel]:
    with borrowed(model):
        checkpoint = LiveCheckpoint(model)
        check_runnable(model)
        yield RunModel(
            name=str(checkpoint.folder),
            source=ModelSource(
                folder=checkpoint.folder,
                config=model.config,
                raw_config=checkpoint.load_config(),
                trust_remote_code=False,
            ),
            checkpoint=checkpoint,
            prepared=prepare(model, checkpoint, recipe),
            placement=Placement(),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            dtype_why="the model's",
            is_live=True,
        )
