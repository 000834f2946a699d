"""The source files of SGLang: of the newest release, or of that which a process is started for."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from functools import cache

from fp8calib.engines.facts.release import SGLANG_RELEASES
from tests.real_engines.package import Package, open_package

MODELS = "sglang/srt/models/"
REQUIREMENT = "FP8CALIB_SGLANG"
"""The variable that names another release, such as `sglang==0.5.20`."""


def open_sglang() -> Package:
    """Open the sources."""
    return open_package(os.environ.get(REQUIREMENT, f"sglang=={SGLANG_RELEASES[-1].version}"))


def read_models() -> Mapping[str, ast.Module]:
    """Parse the modules of all models, by their dotted names."""
    return parse_models(open_sglang())


@cache
def parse_models(package: Package) -> Mapping[str, ast.Module]:
    """Parse the modules of all models of a release, by their dotted names."""
    names = (n for n in package.files if n.startswith(MODELS) and n.endswith(".py"))
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): package.parse(name)
        for name in names
    }


def list_entries(package: Package | None = None) -> set[str]:
    """List the classes that an architecture of a config may name."""
    return {
        item.id
        for tree in parse_models(package or open_sglang()).values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
        for item in ast.walk(node.value)
        if isinstance(item, ast.Name)
    }
