"""Which scale a projection gets from an int4 source, and which none can have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8calib.errors import ExportError
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable
from fp8calib.model.projections import LinearWeight
from fp8calib.model.shapes import Layer, Linear, ModelGeometry, Part, Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.quantization.rank_weights import adopt_scales

GATE, UP = (
    Part(name=n, count=2, unit=1, first=f, per_group=2) for n, f in (("gate", 0), ("up", 2))
)
FUSED = Linear(
    module="m.0.mlp.gate_up",
    section="mlp",
    root="m.0.mlp",
    in_features=3,
    out_features=4,
    shard="column",
    parts=(GATE, UP),
    weight_name="m.0.mlp.gate_up.weight",
)
SITES = {name: Site(f"m.0.mlp.{name}", Role.WEIGHT) for name in ("gate", "up")}


def make_table(tp: int = 1) -> ScaleTable:
    """Make a table whose scales are all 9."""
    layer = Layer(index=0, module="m.0", mixer="", attention=None, linears=(FUSED,))
    geometry = ModelGeometry(architecture="", model_type="", checkpoint_dtype="", layers=(layer,))
    scale = Scale(values=torch.full((tp,), 9.0), source=ScaleSource.ALL_ZERO, is_substitute=True)
    scales = dict.fromkeys(SITES.values(), scale)
    return ScaleTable(geometry=geometry, fmt=E4M3FN, tp=tp, per_head=False, scales=scales)


def one(values: torch.Tensor) -> Iterator[LinearWeight]:
    yield LinearWeight(linear=FUSED, expert=None, values=values)


def test_a_part_with_two_scales_is_refused() -> None:
    spread = torch.tensor([0.5, 0.5, 0.25, 0.125]).unsqueeze(1).expand(4, 3)
    with pytest.raises(ExportError) as raised:
        adopt_scales(make_table(), one(torch.ones(4, 3)), one(spread))
    assert "m.0.mlp.up.weight is joined from weights with several int4 scales" in str(raised.value)
    assert "(0.125 to 0.25)" in str(raised.value)


def test_what_is_not_quantized_is_measured_rank_by_rank() -> None:
    """Zeros on one rank keep the scale of the table there; all zeros are dead, as they were."""
    weight = torch.zeros(4, 3)
    weight[0, 1] = -224.0
    found = adopt_scales(make_table(tp=2), one(weight), one(torch.zeros(4, 3))).scales
    gate, up = found[SITES["gate"]], found[SITES["up"]]
    assert gate.values.tolist() == [0.5, 9.0]
    assert (gate.source, gate.is_substitute) == (ScaleSource.ALL_ZERO, False)
    assert up.values.tolist() == [9.0, 9.0]
    assert (up.source, up.is_substitute) == (ScaleSource.ALL_ZERO, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ExportError, match=r"mlp\.gate\.weight contains NaN or infinity"):
        adopt_scales(make_table(), one(torch.full((4, 3), value)), one(torch.zeros(4, 3)))
