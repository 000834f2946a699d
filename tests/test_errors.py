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
    first_line,
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


def test_an_error_carries_its_message_and_hint() -> None:
    error = UsageError("what and where", hint="what to do")
    assert (str(error), error.message, error.hint) == (
        "what and where",
        "what and where",
        "what to do",
    )
    assert UsageError("what").hint == ""


def test_a_message_is_one_line_that_can_be_printed() -> None:
    error = UsageError("a\nb\x1b[2J\ud800 \u202eé", hint="c\td")

    assert error.message == r"a\nb\x1b[2J\ud800 \u202eé"
    assert str(error) == error.message
    assert error.hint == r"c\td"


def test_a_message_of_megabytes_keeps_its_ends() -> None:
    message = UsageError(f"first {'x' * 10**7} last").message

    assert len(message) == 4005
    assert message.startswith("first xxx")
    assert message.endswith("xxx last")


def test_names_are_cut_and_escaped() -> None:
    assert shorten("model.k_scale") == "model.k_scale"
    assert shorten("a\nb") == r"a\nb"
    assert shorten("\0" * 10**6) == r"\x00" * 50


def test_the_same_name_in_other_case_is_suggested_first() -> None:
    assert suggest("MXFP8", ["mxfp8", "mxfp8-a16"]) == "did you mean mxfp8?"
    assert suggest("MXFP", ["mxfp8", "mxfp8-a16"]).startswith("did you mean mxfp8")


def test_a_sentence_that_goes_on_in_the_next_line_is_left_out() -> None:
    text = (
        "\nA needs B, which was not found. Check out the instructions on the\ninstallation page: x"
    )
    assert first_line(ImportError(text)) == "A needs B, which was not found."
    assert first_line(ValueError("one. two three\nFour")) == "one. two three"
    assert first_line(ValueError("no sentence\ngoes on")) == "no sentence"
    assert first_line(ValueError()) == "ValueError"
