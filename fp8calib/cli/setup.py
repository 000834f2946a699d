"""What commands do first that run a model: silence its library."""

from __future__ import annotations


def quiet_libraries() -> None:
    """Turn off the progress bars and messages of transformers."""
    import transformers  # noqa: PLC0415

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
