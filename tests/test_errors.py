"""Each kind of error has the exit code of the contract."""

from __future__ import annotations

from fp8calib.errors import (
    CalibrationError,
    DataError,
    ExportError,
    Fp8CalibError,
    ModelError,
    RecipeError,
    UsageError,
    VerificationError,
)


def test_kinds_and_exit_codes_are_those_of_the_contract() -> None:
    classes = [
        Fp8CalibError,
        UsageError,
        RecipeError,
        ModelError,
        DataError,
        CalibrationError,
        ExportError,
        VerificationError,
    ]
    assert {error.exit_code: error.kind for error in classes} == {
        1: "bug",
        2: "usage",
        3: "recipe",
        4: "model",
        5: "data",
        6: "calibration",
        7: "export",
        8: "verification",
    }


def test_an_error_carries_its_message_and_hint() -> None:
    error = UsageError("what and where", hint="what to do")
    assert (str(error), error.message, error.hint) == (
        "what and where",
        "what and where",
        "what to do",
    )
    assert UsageError("what").hint == ""
