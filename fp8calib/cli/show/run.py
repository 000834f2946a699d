"""Run `fp8calib show`: tell statistics from scales, and print them."""

from __future__ import annotations

from fp8calib.checkpoint.links import refuse_external_links
from fp8calib.cli.console import prints_json, warn
from fp8calib.cli.show.scales import show_scales
from fp8calib.cli.show.stats import show_stats
from fp8calib.cli.show.tables import Tables
from fp8calib.errors import UsageError
from fp8calib.requests.show import ShowRequest
from fp8calib.stats.calibration_stats import STATS_NAME, is_stats_file, load_stats


def run_show(request: ShowRequest) -> None:
    """Print a file, or what a folder holds.

    Raises:
        UsageError: the options contradict each other.
        ModelError: it holds neither statistics nor scales, or cannot be read.
    """
    path, as_json = request.file, prints_json()
    if request.everything and request.kv:
        raise UsageError("--all prints every row: leave out --kv")
    tables = Tables.ALL if request.everything else Tables.KV if request.kv else Tables.NONE
    if as_json and tables is not Tables.NONE:
        warn(f"--json prints everything: {tables.value} has no effect")
    if path.is_dir():
        refuse_external_links(path)
        path = stats if (stats := path / STATS_NAME).is_file() else path
    if is_stats_file(path):
        show_stats(load_stats(path, accepts_shard=True), tables, as_json=as_json)
    else:
        show_scales(path, tables, as_json=as_json)
