"""What scales were measured on: said in strings, read back strictly, and compared."""

from __future__ import annotations

import pytest

from fp8calib.calibration.calibration_origin import CalibrationOrigin, explain_difference

MODEL, DATA = "01" * 32, "ef" * 32
FIELDS = {"model": MODEL, "data": DATA, "text_start": "0123456789abcdef"}


@pytest.mark.parametrize("fields", [FIELDS, {"model": MODEL}])
def test_it_is_said_in_strings_and_read_back(fields: dict[str, str]) -> None:
    origin = CalibrationOrigin(**fields)
    assert origin.to_fields() == fields
    assert CalibrationOrigin.from_fields(fields) == origin


def test_hashes_of_the_whole_text_of_earlier_versions_are_left_out() -> None:
    assert CalibrationOrigin.from_fields(FIELDS | {"text": "AAAA"}).to_fields() == FIELDS


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        "x",
        {"model": MODEL[:-1]},
        {"model": MODEL.upper().replace("0", "A")},
        {"model": 7},
        {**FIELDS, "data": "ef"},
        {**FIELDS, "surprise": ""},
    ],
)
def test_what_is_damaged_is_refused(fields: object) -> None:
    with pytest.raises(ValueError, match=r"not an object|fingerprint"):
        CalibrationOrigin.from_fields(fields)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ("01" * 16 + "23" * 16, "different weights (01010101, here 23232323)"),
        ("23" * 16 + "01" * 16, "different config.json (01010101, here 23232323)"),
        (
            "23" * 32,
            "different config.json (01010101, here 23232323) and "
            "different weights (01010101, here 23232323)",
        ),
    ],
)
def test_the_half_that_differs_is_named(here: str, expected: str) -> None:
    assert explain_difference(MODEL, here) == expected
