"""The model of a run: a path or Hub id, or one that is in memory already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.decoder import check_runnable
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.weight_index import lacks_weights
from fp8calib.commands.options import Model
from fp8calib.commands.recipe import Recipe
from fp8calib.errors import UsageError
from fp8calib.model.device import choose_device
from fp8calib.model.dtype import DTYPES, choose_dtype
from fp8calib.model.live_model import (
    ConfigCheckpoint,
    LiveCheckpoint,
    borrowed,
    check_live_model,
)
from fp8calib.model.load import (
    ModelSource,
    as_unquantized,
    build_skeleton,
    load_model,
    open_source,
)
from fp8calib.model.prepared import PreparedModel, prepare
from fp8calib.model.weight_source import WeightSource
from fp8calib.quantization.sources.decoded import open_model


class Placed(Protocol):
    """A request that names a model, and says where it runs.

    One may have `device_map` and `dry_run` too.
    """

    @property
    def model(self) -> Model: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def memory(self) -> float | None: ...  # noqa: D102
    @property
    def revision(self) -> str | None: ...  # noqa: D102
    @property
    def trust_remote_code(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model that text runs through, before its weights are loaded or already with them."""

    name: str
    """As the user names it."""
    source: ModelSource
    checkpoint: Checkpoint
    prepared: PreparedModel
    """Without weights, unless the model is live."""
    device: str
    dtype: str
    dtype_why: str
    device_map: str | None = None
    memory: float | None = None
    """GiB, as limited by the user."""
    is_live: bool = False
    """Whether the caller holds the model in memory."""

    @property
    def is_placed(self) -> bool:
        """Whether how it is held in memory is not for us to choose."""
        return self.is_live or self.device_map is not None

    def load(self, mode: MemoryPlan, progress: Progress) -> PreparedModel:
        """Give the model with its weights, or without them the one that is streamed.

        Raises:
            CalibrationError: the memory is too small.
            ModelError: a weight is missing or has another shape.
        """
        if self.is_live or mode.streaming is not None:
            return mode.prepared
        progress.stage("loading the model", None)
        model = load_model(
            self.source,
            dtype=DTYPES[self.dtype],
            device=self.device,
            device_map=self.device_map,
            checkpoint=self.checkpoint,
        )
        return replace(self.prepared, weights=WeightSource(model, self.checkpoint))

    def describe_decoded(self) -> Iterator[str]:
        """Describe a model that is quantized already, and is decoded while it is read."""
        if self.checkpoint.form:
            yield (
                f"{self.name} is quantized already: its {self.checkpoint.form} are dequantized, "
                "and their errors are in everything that is measured; inputs are not quantized"
            )


def fields_of(model: RunModel) -> dict[str, Any]:
    """Give the fields of a model to run, to make a job of it."""
    return {name: getattr(model, name) for name in RunModel.__dataclass_fields__}


@contextmanager
def open_run_model(
    request: Placed,
    *,
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
        if isinstance(request.model, str | Path):
            yield from _open_path(request, recipe, if_quantized)
        else:
            _refuse_placement(request)
            check_live_model(request.model, can_be_sharded=can_be_sharded)
            yield from _open_live(request.model, recipe)


def _refuse_placement(request: Placed) -> None:
    """Refuse to place a model that is in memory already.

    Raises:
        UsageError: naming the choice.
    """
    for name in ("device", "dtype", "device_map", "memory"):
        if getattr(request, name, None) not in ("auto", None):
            raise UsageError(
                f"{name}: the model is in memory already, where and as it is",
                hint=f"leave {name} out, or pass the path of a checkpoint",
            )


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


def _open_path(request: Placed, recipe: Recipe | None, if_quantized: str) -> Iterator[RunModel]:
    device_map = getattr(request, "device_map", None)
    _check_device_map(device_map, request)
    device = choose_device(request.device)
    is_dry = getattr(request, "dry_run", False)  # a plan needs no weights
    source = open_source(
        str(request.model),
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        needs_weights=not is_dry,
    )
    with (
        ConfigCheckpoint(as_unquantized(source))
        if is_dry and lacks_weights(source.folder)
        else open_model(source.folder, if_quantized=if_quantized)
    ) as checkpoint:
        if checkpoint.form or not checkpoint.has_weights:
            source = as_unquantized(source)
        found = prepare_run_model(request, source, checkpoint, recipe, device=device)
        yield replace(found, device_map=device_map)


def _check_device_map(device_map: str | None, request: Placed) -> None:
    """Refuse an unknown device map, and one that contradicts another option.

    Raises:
        UsageError: naming it.
    """
    if device_map not in (None, "auto"):
        raise UsageError(f"--device-map {device_map}: must be auto")
    if device_map and request.device != "auto":
        raise UsageError("--device-map auto chooses the devices itself: leave out --device")
    if device_map and request.memory is not None:
        raise UsageError(
            "--memory streams a model through one device, but --device-map spreads it over several",
            hint="leave out one of them",
        )


def prepare_run_model(
    request: Placed,
    source: ModelSource,
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    *,
    device: str,
) -> RunModel:
    """Describe how the model of an open checkpoint would run, before a weight is read.

    Raises:
        UsageError: the dtype is unknown.
        ModelError: the model is not supported, or the checkpoint is not that of its config.
        RecipeError: a pattern of the recipe matches no module.
    """
    dtype, why = choose_dtype(request.dtype, device=device, checkpoint=checkpoint)
    ignore = () if recipe is None else recipe.observe.ignore
    prepared = prepare(build_skeleton(source, dtype=DTYPES[dtype]), checkpoint, ignore)
    if recipe is None or recipe.observe.needs_forward:
        check_runnable(prepared.model)
    return RunModel(
        name=str(request.model),
        source=source,
        checkpoint=checkpoint,
        prepared=prepared,
        device=device,
        dtype=dtype,
        dtype_why=why,
        memory=request.memory,
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
            prepared=prepare(model, checkpoint, () if recipe is None else recipe.observe.ignore),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            dtype_why="the model's",
            is_live=True,
        )
