"""The options of `fp8calib show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import JsonOption


def show_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="STATS|SCALES",
            help="Statistics or scales: a file (.safetensors .npz .json) or a folder.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print the contents of a file of statistics or scales.

    Example: fp8calib show SmolLM2-135M-Instruct-fp8calib/stats.safetensors
    """
    from fp8calib.checkpoint.links import refuse_external_links  # noqa: PLC0415
    from fp8calib.cli.show.scales import show_scales  # noqa: PLC0415
    from fp8calib.cli.show.stats import show_stats  # noqa: PLC0415
    from fp8calib.errors import UsageError, shorten  # noqa: PLC0415
    from fp8calib.stats.calibration_stats import STATS_NAME, is_stats_file, load_stats  # noqa: PLC0415

    try:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
    except (OSError, ValueError) as error:
        raise UsageError(f"{shorten(str(path))}: cannot be read") from error
    if path.is_dir():
        refuse_external_links(path)
        path = stats if (stats := path / STATS_NAME).is_file() else path
    if is_stats_file(path):
        show_stats(load_stats(path, accepts_shard=True), as_json=as_json)
    else:
        show_scales(path, as_json=as_json)
