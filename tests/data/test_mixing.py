"""Tests of fp8calib.data.mixing."""

from collections.abc import Iterator

import pytest

from fp8calib.data.rows import Row
from fp8calib.data.sources import mix_rows


def rows(name: str, count: int) -> Iterator[Row]:
    return (Row(f"{name}{index}") for index in range(count))


def mix(*sources: tuple[str, int, float | None], seed: int = 0) -> list[str]:
    mixed = mix_rows([(rows(name, count), weight) for name, count, weight in sources], seed=seed)
    return [row.origin for row in mixed]


def test_sources_without_weights_follow_one_another() -> None:
    assert mix(("b", 2, None), ("a", 3, None), seed=5) == ["b0", "b1", "a0", "a1", "a2"]


# random.Random(0).random() starts 0.844, 0.758, 0.421, 0.259, 0.511, 0.405, 0.784, 0.303:
# b when the number is at or above a's share.
@pytest.mark.parametrize(
    ("weight_a", "weight_b", "expected"),
    [
        (1.0, 1.0, "b0 b1 a0 a1 b2 a2 b3 a3"),
        (1.0, None, "b0 b1 a0 a1 b2 a2 b3 a3"),
        (3.0, 1.0, "b0 b1 a0 a1 a2 a3 b2 b3"),
        (1.0, 3.0, "b0 b1 b2 b3 a0 a1 a2 a3"),
        (4.0, 0.4, "a0 a1 a2 a3 b0 b1 b2 b3"),
    ],
)
def test_weighted_sources_are_drawn_by_the_seed_and_used_up(
    weight_a: float, weight_b: float | None, expected: str
) -> None:
    assert " ".join(mix(("a", 4, weight_a), ("b", 4, weight_b))) == expected


def test_the_seed_changes_the_order_between_sources_but_not_inside_them() -> None:
    orders = {tuple(mix(("a", 9, 1.0), ("b", 9, 1.0), seed=seed)) for seed in range(4)}
    assert len(orders) == 4
    for order in orders:
        assert [name for name in order if name[0] == "a"] == [f"a{index}" for index in range(9)]


def test_many_rows_come_in_proportion_to_the_weights() -> None:
    first = mix(("a", 4000, 3.0), ("b", 4000, 1.0))[:4000]
    assert 2900 < sum(name[0] == "a" for name in first) < 3100


def test_rows_are_read_one_at_a_time() -> None:
    source = rows("a", 3)
    mixed = mix_rows([(source, 2.0)])
    assert next(mixed).origin == "a0"
    assert next(source).origin == "a1"
