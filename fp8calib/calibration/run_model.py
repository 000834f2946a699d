"""A model that text runs through: what is known of it before its weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.model.device import DTYPES
from fp8calib.model.load import ModelSource, load_model
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.weight_source import WeightSource


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

    def load(self, progress: Progress) -> PreparedModel:
        """Give the model with its weights."""
        if self.is_live:
            return self.prepared
        progress.stage("loading the model", None)
        model = load_model(
            self.source,
            dtype=DTYPES[self.dtype],
            device=self.device,
            device_map=self.device_map,
            checkpoint=self.checkpoint,
        )
        return replace(self.prepared, model=model, weights=WeightSource(model, self.checkpoint))

    def describe(self, engine: str = "") -> str:
        """Describe how it computes, on its device or in an engine."""
        return f"computing in {self.dtype} on {engine or self.device} ({self.dtype_why})"

    def list_warnings(self) -> Iterator[str]:
        """Warn of weights that are decoded while they are read, and of tensors without a place."""
        if self.checkpoint.form:
            yield (
                f"{self.name} is quantized already: its {self.checkpoint.form} are dequantized, "
                "and their errors are in everything that is measured; inputs are not quantized"
            )
        if names := ", ".join(self.prepared.leftovers):
            yield f"{self.name}: not parameters of the model, so not loaded: {names}"
