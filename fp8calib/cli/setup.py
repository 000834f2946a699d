"""What commands do first: refuse unknown names and paths, silence libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.cli.names import refuse_unknown_names
from fp8calib.data.specs import parse_spec

_PATH_HINTS = {
    "path": "name a checkpoint folder or a JSON file",
    "quantized_model": "name a checkpoint folder or a file of scales",
    "stats": "calibrate writes stats.safetensors",
}
"""The fields that are one path, with the hint where there is none."""
_LOCAL_HINTS = {
    "file": "name statistics or scales",
    "shards": "name the output folder of a shard, or its stats.safetensors",
}
"""The same of paths that are never on the Hub, one or several."""


def refuse_missing(settings: Any) -> None:
    """Refuse unknown names and missing inputs before the libraries are imported, in seconds.

    What may be on the Hub is left to the command.

    Raises:
        UsageError: naming an option, a file or a folder.
        ModelError: naming a model.
        DataError: naming a data file.
    """
    refuse_unknown_names(settings)
    for name in ("model", "base"):
        if (model := getattr(settings, name, None)) is not None:
            find_local_model(model)
    for name, hint in _PATH_HINTS.items():
        path = getattr(settings, name, None)
        if path is not None and not may_be_on_hub(path):
            require_path(path, hint=hint)
    for name, hint in _LOCAL_HINTS.items():
        found = getattr(settings, name, ())
        for path in found if isinstance(found, list | tuple) else [found]:
            require_path(path, hint=hint)
    for each in getattr(settings, "scales", ()):
        require_path(Path(each), option="--scales")
    for spec in getattr(settings, "data", None) or ():
        parse_spec(spec)


def quiet_libraries() -> None:
    """Turn off the progress bars and messages of transformers, which may not be imported yet."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()
        logging.disable_progress_bar()
