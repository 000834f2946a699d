"""Scales brought to other formats, ranks and heads, with numbers worked out by hand."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from fp8calib.errors import ExportError, UsageError
from fp8calib.formats.convert import convert_table, explain_conversion, fits_heads
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import Attention, ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, Fp8Format
from tests.formats.handmade import make_attention, make_geometry

FOUR_HEADS = make_geometry([make_attention(0, num_heads=8, num_kv_heads=4)])
TWO_HEADS = make_geometry([make_attention(0)])


def _table(
    values: Mapping[Role, Sequence[float]],
    *,
    per_head: bool = False,
    fmt: Fp8Format = E4M3FN,
) -> ScaleTable:
    attention = _attention(FOUR_HEADS)
    tensors = {role: torch.tensor(numbers) for role, numbers in values.items()}
    return ScaleTable(
        geometry=FOUR_HEADS,
        fmt=fmt,
        tp=1 if per_head else len(tensors[Role.K]),
        per_head=per_head,
        scales={
            attention.site(role): Scale(
                values=tensor.unsqueeze(0) if per_head else tensor, source="shared"
            )
            for role, tensor in tensors.items()
        },
    )


def _attention(geometry: ModelGeometry) -> Attention:
    attention = geometry.layers[0].attention
    assert attention is not None
    return attention


def _values(table: ScaleTable, role: Role = Role.K) -> list[float]:
    tensor = table.scales[_attention(table.geometry).site(role)].values
    assert tensor.shape[0] == table.tp
    assert tensor.dim() == (2 if table.per_head else 1)
    return tensor.flatten().tolist()


def _pair(*numbers: float) -> dict[Role, Sequence[float]]:
    return {Role.K: numbers, Role.V: tuple(2 * number for number in numbers)}


@pytest.mark.parametrize(
    ("tp", "expected"),
    [(1, [4.0]), (2, [2.0, 4.0]), (4, [1, 2, 3, 4]), (8, [1, 1, 2, 2, 3, 3, 4, 4])],
)
def test_a_rank_takes_the_largest_of_its_heads(tp: int, expected: list[float]) -> None:
    table = _table(_pair(1, 2, 3, 4), per_head=True)
    fitted = convert_table(table, fmt=E4M3FN, tp=tp, per_head=False)
    assert (fitted.tp, fitted.per_head, fitted.fmt) == (tp, False, E4M3FN)
    assert _values(fitted) == expected
    assert _values(fitted, Role.V) == [2 * number for number in expected]
    whose = "a layer's heads" if tp == 1 else "the heads on its rank"
    (note,) = explain_conversion(table, fitted)
    assert note == f"scales per head became one: the largest of {whose}"


def test_ranks_that_the_heads_cannot_lie_on_become_their_largest() -> None:
    table = _table(_pair(1.0, 5.0, 2.0))
    fitted = convert_table(table, fmt=E4M3FN, tp=2, per_head=False)
    assert _values(fitted) == [5.0, 5.0]
    (note,) = explain_conversion(table, fitted)
    assert note.endswith("do not fit the model's heads: the largest is used everywhere")


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (2, True), (4, True), (3, False)])
def test_degrees_that_fit_are_told_from_those_that_do_not(tp: int, fits: bool) -> None:
    assert fits_heads(TWO_HEADS, tp) is fits
    if not fits:
        with pytest.raises(UsageError, match=f"--tp {tp}"):
            convert_table(_table(_pair(1.0)), fmt=E4M3FN, tp=tp, per_head=False)


def test_what_a_change_of_format_costs_is_said() -> None:
    fnuz = _table(_pair(0.25), fmt=E4M3FNUZ)
    halved = convert_table(fnuz, fmt=E4M3FN, per_head=False)
    assert tuple(explain_conversion(fnuz, halved)) == (
        "the scales for e4m3fnuz are halved for e4m3fn, so that dequantized values stay the same",
        "values in the top 6.7 % of the range of e4m3fnuz clip",
    )
    plain = _table(_pair(0.25))
    (note,) = explain_conversion(plain, convert_table(plain, fmt=E4M3FNUZ, per_head=False))
    assert note.startswith("the scales for e4m3fn are doubled for e4m3fnuz")


def test_scales_at_the_ends_of_fp32_stay_scales() -> None:
    smallest = _table(_pair(2.0**-126), fmt=E4M3FNUZ)
    assert _values(convert_table(smallest, fmt=E4M3FN, per_head=False)) == [2.0**-126]
    tiny = _table(_pair(2.0**-140))
    assert _values(convert_table(tiny, fmt=E4M3FN, per_head=False)) == [2.0**-140]
    largest = _table({Role.K: (3e38,), Role.V: (1.0,)})
    with pytest.raises(ExportError, match=r"self_attn\.k: 3e\+38 cannot"):
        convert_table(largest, fmt=E4M3FNUZ, per_head=False)


@pytest.mark.parametrize(
    ("found", "tp", "per_head", "note"),
    [
        ((1.0, 2.0), 1, False, "2 ranks became 1: each is the largest of the rank's heads"),
        ((1.0, 2.0), 1, True, "2 ranks became the scales of the heads on each rank"),
        ((1.0, 2.0), 4, False, "2 ranks became 4: each is the largest of the rank's heads"),
    ],
)
def test_what_became_of_ranks_and_heads_is_said(
    found: Sequence[float], tp: int, per_head: bool, note: str
) -> None:
    table = _table(_pair(*found))
    fitted = convert_table(table, fmt=E4M3FN, tp=tp, per_head=per_head)
    assert list(explain_conversion(table, fitted)) == [f"the scales of {note}"]


def test_nothing_is_said_where_nothing_was_done() -> None:
    for table in (
        _table(_pair(1.0)),
        _table(_pair(1.0, 2.0)),
        _table(_pair(1, 2, 3, 4), per_head=True),
    ):
        fitted = convert_table(table, fmt=E4M3FN, tp=table.tp, per_head=table.per_head)
        assert not list(explain_conversion(table, fitted))
        assert fitted.scales == table.scales


def test_what_one_scale_for_k_and_v_loses_is_said() -> None:
    same = _table({Role.K: (1.0, 2.0), Role.V: (1.0, 2.0)})
    assert not list(explain_conversion(same, same, joins_kv=True, has_query=False))
    table = _table({**_pair(1.0), Role.Q: (1.0,)})
    unequal, query = explain_conversion(table, table, joins_kv=True, has_query=False)
    assert unequal.endswith("in 1 of 1 layers they differ")
    assert query == "q_scale is left out: this format cannot store it"
