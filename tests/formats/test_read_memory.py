"""The memory that a reader uses is bounded by the size of the file, whatever the file claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.minutes import takes_minutes

ROOT = Path(__file__).parents[2]
PRELUDE = """
import io, json, sys, zipfile
from pathlib import Path
import numpy as np
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # what its loader imports late
from fp8calib.commands.show import ShowRequest
from fp8calib.commands.show import run as show
from fp8calib.engines.check import check_folder
from fp8calib.engines.registry import list_defaults
from fp8calib.engines.replay.folder import open_folder
from fp8calib.formats.read import read_scales
from fp8calib.errors import Fp8CalibError
from tests.engines.check_handmade import plain_geometry

path = Path(sys.argv[1])
NAME = "model.layers.0.self_attn.k_scale"

def save(file, header, size=0, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write((len(raw) if length is None else length).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + size)

def entry(count, start=0):
    return {"dtype": "F32", "shape": [count], "data_offsets": [start, start + 4 * count]}

def save_archive(file, kind, claimed=None):
    one = io.BytesIO()
    np.save(one, np.ones(1, "f4"))
    with zipfile.ZipFile(file, "w", kind) as archive:
        with archive.open("layers.0.kv_cache_scaling_factor.npy", "w") as member:
            member.write(one.getvalue())
            for _ in range(50):
                member.write(bytes(1_000_000))
    if claimed is not None:
        raw = bytearray(file.read_bytes())
        central = raw.rfind(b"PK\\1\\2")
        raw[central + 24 : central + 28] = raw[22:26] = claimed.to_bytes(4, "little")
        file.write_bytes(raw)

def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

def ask(file):
    geometry = plain_geometry()
    for question in (
        lambda: read_scales(file, geometry),
        lambda: show(ShowRequest(file), None),
        lambda: check_folder(open_folder(file.parent), geometry, list_defaults(), 1),
    ):
        try:
            question()
        except Fp8CalibError as error:
            assert len(error.message) < 5000
"""
CASES = {
    "a header that claims 100 MB": (
        'file = path / "a.safetensors"; save(file, b"{}", length=10**8)',
        1,
    ),
    "a scale of 4 GiB without bytes on disk": (
        'file = path / "a.safetensors"; save(file, {NAME: entry(2**30)}, size=2**32)',
        1,
    ),
    "a name of 10 MB": (
        'file = path / "a.safetensors"; save(file, {"x" * 10**7 + ".k_scale": entry(1)}, size=4)',
        150,
    ),
    "a deflated bomb": (
        'file = path / "rank0.npz"; save_archive(file, zipfile.ZIP_DEFLATED)',
        1,
    ),
    "a bomb that lies": (
        'file = path / "rank0.npz"; save_archive(file, zipfile.ZIP_BZIP2, claimed=200)',
        1,
    ),
    "a hundred thousand layers": (
        'file = path / "a.json"; layers = {str(i): 0.5 for i in range(10**5)}\n'
        'kv = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}\n'
        'file.write_text(json.dumps({"model_type": "llama", "kv_cache": kv}))\n'
        "del layers, kv",
        100,
    ),
}
"""How the file is made, and how many MiB its readers may take: some ten times its size."""


@takes_minutes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded_by_the_files_size(tmp_path: Path) -> None:
    """One process for all cases, the smallest first: peaks only grow."""
    steps = []
    for number, (make, most) in enumerate(CASES.values()):
        folder = f'path = Path(sys.argv[1]) / "{number}"; path.mkdir()'
        reset = 'Path("/proc/self/clear_refs").write_text("5"); before = peak_mib()'
        check = f"grown = peak_mib() - before; assert grown <= {most} + 8, ({number}, grown)"
        steps += [folder, make, reset, "ask(file)", check, "file.unlink()"]
    script = PRELUDE + "\n".join(steps)

    outcome = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stderr[-2000:]
