"""What scales were measured on: said in strings, read back strictly, and compared."""

from __future__ import annotations

import base64
import struct

import pytest
import torch

from fp8calib.calibration.calibration_origin import (
    SKETCH_SIZE,
    CalibrationOrigin,
    estimate_overlap,
    explain_difference,
)

MODEL, DATA = "01" * 32, "ef" * 32
NUMBERS = [-(2**63), 7, 2**63 - 1]
TEXT = base64.b64encode(struct.pack("<3q", *NUMBERS)).decode()
FIELDS = {"model": MODEL, "data": DATA, "text": TEXT}


def test_it_is_said_in_strings_and_read_back() -> None:
    measured = CalibrationOrigin(model=MODEL, data=DATA, text=torch.tensor(NUMBERS))
    assert measured.to_fields() == FIELDS
    again = CalibrationOrigin.from_fields(FIELDS)
    assert (again.model, again.data, again.text.tolist()) == (MODEL, DATA, NUMBERS)


def test_a_model_alone_says_nothing_of_a_text() -> None:
    measured = CalibrationOrigin.of_model(MODEL)
    assert measured.to_fields() == {"model": MODEL}
    assert CalibrationOrigin.from_fields({"model": MODEL}).text.tolist() == []


def test_of_many_hashes_the_smallest_are_kept() -> None:
    text = torch.arange(-1000, 1000)
    fields = CalibrationOrigin(model=MODEL, data=DATA, text=text).to_fields()
    assert CalibrationOrigin.from_fields(fields).text.tolist() == list(
        range(-1000, -1000 + SKETCH_SIZE)
    )


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
        {**FIELDS, "text": 7},
        {**FIELDS, "text": "?" * 8},
        {**FIELDS, "text": "\u00e9" * 8},
        {**FIELDS, "text": TEXT[:-4]},
        {**FIELDS, "text": base64.b64encode(struct.pack("<2q", 7, 7)).decode()},
        {**FIELDS, "text": base64.b64encode(bytes(8 * (SKETCH_SIZE + 1))).decode()},
    ],
)
def test_what_is_damaged_is_refused(fields: object) -> None:
    with pytest.raises(ValueError, match=r"not an object|fingerprint|hashes of the text"):
        CalibrationOrigin.from_fields(fields)


@pytest.mark.parametrize(
    ("text", "seen", "expected"),
    [
        ([1, 2, 3, 4], [2, 3, 9], 0.5),
        ([1, 2], [], 0.0),
        ([], [1, 2], 0.0),
        ([1, 2], [1, 2], 1.0),
    ],
)
def test_the_share_of_a_text_that_was_seen(
    text: list[int], seen: list[int], expected: float
) -> None:
    numbers = (torch.tensor(values, dtype=torch.int64) for values in (text, seen))
    assert estimate_overlap(*numbers) == expected


def test_of_a_full_sketch_only_its_range_is_compared() -> None:
    seen = torch.arange(SKETCH_SIZE) * 2
    text = torch.cat([torch.arange(0, 100), torch.arange(5000, 9000)])
    assert estimate_overlap(text, seen) == 0.5
    assert estimate_overlap(torch.arange(5000, 9000), seen) == 0.0


def test_the_sketch_estimates_what_all_hashes_would_say() -> None:
    numbers = torch.randint(-(2**62), 2**62, (40_000,), generator=torch.manual_seed(0))
    seen = numbers[:30_000].sort().values
    text = numbers[21_000:].sort().values
    assert estimate_overlap(text, seen) == pytest.approx(9 / 19, abs=1e-9)
    assert estimate_overlap(text, seen[:SKETCH_SIZE]) == pytest.approx(9 / 19, abs=0.1)


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
