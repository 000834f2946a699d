"""Each kind of error has the exit code of the contract."""

from fp8calib.errors import (
    CalibrationError,
    DataError,
    ExportError,
    Fp8CalibError,
    ModelError,
    RecipeError,
    UsageError,
    VerificationError,
    shorten,
    suggest,
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


def test_a_message_is_one_line_that_can_be_printed() -> None:
    error = UsageError("a\nb\x1b[2J\ud800 \u202eé", hint="c\td")

    assert error.message == r"a\nb\x1b[2J\ud800 \u202eé"
    assert str(error) == error.message
    assert error.hint == r"c\td"


def test_names_are_cut_and_escaped() -> None:
    assert shorten("model.k_scale") == "model.k_scale"
    assert shorten("a\nb") == r"a\nb"
    assert shorten("\0" * 10**6) == r"\x00" * 50


def test_the_same_name_in_other_case_is_suggested_first() -> None:
    assert suggest("MXFP8", ["mxfp8", "mxfp8-a16"]) == "did you mean mxfp8?"
    assert suggest("MXFP", ["mxfp8", "mxfp8-a16"]).startswith("did you mean mxfp8")
