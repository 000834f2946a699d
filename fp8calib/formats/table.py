"""ScaleTable: the scales of one model. `x ~= q * scale` in fp32, finite and positive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.model.geometry import Attention, ModelGeometry, Role, Site
from fp8calib.numerics.formats import Fp8Format

if TYPE_CHECKING:  # scales are recognised without torch
    import torch


ScaleSource = Literal["observed", "shared", "absent", "defaulted", "all-zero", "unseen"]
"""Where a scale comes from.

`shared`: another layer, whose cache this layer reads; `absent`: the same, where a file has no scale
for this layer. `defaulted`: 1.0, because a file has no scale for this layer. The fallback is
`all-zero`, because the amax was zero, or `unseen`, because no token reached the site.
"""
_SHARED = "reads another layer's K and V, so it carries that layer's scale"
_WHY_NOT_OBSERVED = {
    "shared": _SHARED,
    "absent": _SHARED,
    "defaulted": "the file has none, and engines use 1.0",
    "all-zero": "only zeros were seen, so its scale is the fallback",
    "unseen": "no token reached it, so its scale is the fallback",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scales of one site: fp32 [tp], or [tp, heads] per head."""

    values: torch.Tensor
    source: ScaleSource
    is_substitute: bool = False
    """Whether no value was computed from the site's own statistics."""

    @property
    def why_not_observed(self) -> str:
        """Why it was not computed from its site's statistics, with a substitute's value."""
        number = f", {float(self.values.max()):.4g}" if self.is_substitute else ""
        return f"{_WHY_NOT_OBSERVED[self.source]}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTable:
    """Scales of one model, in one format, for one tensor-parallel degree."""

    geometry: ModelGeometry
    fmt: Fp8Format
    tp: int
    per_head: bool
    scales: Mapping[Site, Scale]
    kept_amax: Mapping[Site, str] = field(default_factory=dict)
    """Sites where the rule could not be applied and the amax was used, with the reason."""
    origin: CalibrationOrigin | None = None
    """None if it was not recorded."""
    dialect: str = ""
    """The name of the dialect from which it was read: an overlay is read as `compressed-tensors`;
    empty if it was computed."""
    files: tuple[Path, ...] = ()
    """The files from which it was read."""
    has_weights: bool = False
    """These files hold FP8 weights too."""
    notes: tuple[str, ...] = ()
    """What a user should know about the reading."""

    def kv(self, attention: Attention, rank: int = 0) -> float:
        """Give the one scale that covers k and v of a layer on `rank`: the larger of the two.

        A substitute is ignored if there is a real scale: zeros fit any scale.
        """
        pair = [self.scales[attention.site(role)] for role in (Role.K, Role.V)]
        real = [scale for scale in pair if not scale.is_substitute]
        return max(float(scale.values[rank].max()) for scale in real or pair)

    def times(self, factor: float) -> ScaleTable:
        """Multiply every scale but those of exactly 1.0, which stand for none."""

        def multiply(values: torch.Tensor) -> torch.Tensor:
            return values.where(values == 1, values * factor)

        scales = {s: replace(e, values=multiply(e.values)) for s, e in self.scales.items()}
        return replace(self, scales=scales)

    def not_observed(self) -> list[tuple[Site, Scale]]:
        """List the sites whose scale was not computed from their own statistics."""
        return [item for item in self.scales.items() if item[1].source != "observed"]
