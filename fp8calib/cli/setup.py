"""What commands do first that run a model: silence its library."""

from __future__ import annotations

import os
import sys


def quiet_libraries() -> None:
    """Turn off the progress bars and messages of transformers, which may not be imported yet."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()
        logging.disable_progress_bar()
