"""What `show` read: statistics, or scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import AliasGenerator, ConfigDict, Field

from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.overview import Overview
from fp8calib.results.record import Record, Result
from fp8calib.stats.calibration_stats import StatsHeader, StatsShard
from fp8calib.stats.saturation import PositionSaturation, Saturation


class _Row(Record):
    """A row of a table, whose keys are the titles of its columns."""

    model_config = ConfigDict(
        alias_generator=AliasGenerator(serialization_alias=lambda name: name.replace("_", " "))
    )


class LayerRow(_Row):
    """K, V and q of a layer; None where there is none, or nothing was observed."""

    layer: int
    mixer: str
    k_amax: float | None = None
    k_scale: float | None = None
    v_amax: float | None = None
    v_scale: float | None = None
    q_amax: float | None = None
    q_scale: float | None = None
    tokens: int | None = None


class LinearRow(_Row):
    """The input and the weight of a linear."""

    linear: str
    input_amax: float | None
    input_scale: float | None
    weight_amax: float | None
    weight_scale: float | None
    tokens: int | None


class Positions(Record):
    """The amax of each site by ranges of positions."""

    first: tuple[int, ...]
    amax: Mapping[str, tuple[float, ...]]


class HeaderShown(StatsHeader):
    """The run that statistics belong to, without the shapes of the model."""

    geometry: ModelGeometry = Field(exclude=True)


class StatsShown(Result):
    """Statistics: every layer and linear, and how early the final amax was reached."""

    header: HeaderShown
    part: StatsShard | None
    """Null for the statistics of a whole run."""
    layers: tuple[LayerRow, ...]
    linears: tuple[LinearRow, ...]
    experts: Mapping[str, tuple[int, ...]]
    """The tokens that reached each expert, by layer."""
    positions: Positions
    saturation: Saturation | None
    position_saturation: PositionSaturation | None
    unfit_queries: tuple[int, ...]
    """The layers that need a q scale."""

    def overview(self) -> Overview:
        """Name the model and the text."""
        header = self.header
        return Overview(
            f"StatsShown: {header.geometry.architecture}, {header.num_tokens:,} tokens in "
            f"{header.num_sequences} sequences"
        )


class ScalesShown(Result):
    """The scales of a file, exactly as stored."""

    path: Path
    scales: Mapping[str, tuple[float | str, ...] | str]
    """NaN and infinities are text, because JSON has none; a large tensor is only described."""

    def overview(self) -> Overview:
        """Count them."""
        return Overview(f"ScalesShown: {len(self.scales):,} scales of {self.path}")
