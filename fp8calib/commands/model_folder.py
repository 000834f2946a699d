"""A model as a folder: what needs the files of a model also takes one that is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fp8calib.commands.options import Model
from fp8calib.errors import Fp8CalibError


@contextmanager
def saved_model(
    model: Model, near: Path, tokenizer: Any = None, *, warn: Callable[[str], None] | None = None
) -> Iterator[str]:
    """Give the path of a model; one in memory is written to a temporary folder beside `near`.

    Errors name such a model by its class, not by that folder. Where a checkpoint is made of it,
    `warn` hears that the tokenizer is missing.
    """
    if isinstance(model, str | Path):
        yield str(model)
        return
    if tokenizer is None and warn is not None:
        warn("no tokenizer is written, which engines need: pass tokenizer=...")
    from fp8calib.model.live_model import borrowed, check_live_model

    check_live_model(model)
    place = next(folder for folder in near.absolute().parents if folder.is_dir())
    with TemporaryDirectory(prefix="fp8calib-model-", dir=place) as folder:
        with borrowed(model):
            model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        try:
            yield folder
        except Fp8CalibError as error:
            error.message = error.message.replace(folder, type(model).__name__)
            error.hint = error.hint.replace(folder, type(model).__name__)
            error.args = (error.message,)
            raise
