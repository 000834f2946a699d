"""The request of `fp8calib recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fp8calib.options.option import Option


@dataclass(frozen=True, slots=True)
class RecipesRequest:
    """List the recipes, or print one and explain every key.

    Example: fp8calib recipes kv
    """

    name: Annotated[
        str | None, Option(metavar="[NAME]", help="A recipe of fp8calib, or a YAML file.")
    ] = None
