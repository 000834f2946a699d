"""File systems, interruptions, time and bytes."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tqdm import tqdm

from fp8calib.checkpoint.header import encode_header
from tests.cli.graft.grafting import (
    ATTENTION,
    LINKED,
    graft,
    name_command,
)
from tests.cli.program import run, snapshot, succeed
from tests.kit.checkpoints import WEIGHTS
from tests.kit.minutes import takes_minutes


def test_weights_are_copied_where_links_are_impossible(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    report = graft(calibrated, child, tmp_path / "out")
    (warning,) = report["warnings"]
    assert "kv-overlay/model-00001-of-00002.safetensors: copied (" in warning
    assert "cannot be hard-linked: Invalid cross-device link" in warning
    out = tmp_path / "out" / "kv-overlay" / LINKED
    assert out.read_bytes() == (child / WEIGHTS).read_bytes()


def test_a_read_only_source_is_only_read(calibrated: Path, child: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in child.iterdir()}
    for path in (*child.iterdir(), child):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        graft(calibrated, child, tmp_path / "out")
        assert {path: path.stat().st_mtime_ns for path in child.iterdir()} == times
    finally:
        child.chmod(0o755)


CHANGES = {"os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
Act = Callable[[], object]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def break_disk() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def run_in_fork(command: tuple[object, ...], act: Act, step: int, place: Path) -> tuple[int, bool]:
    """Run the program in a fork, and act before its nth change of files below `place`.

    Returns:
        The exit code, -9 after a kill; and whether there was an nth change.
    """
    fork = multiprocessing.get_context("fork")
    left = fork.RawValue("i", step)  # no lock, with which a child may be killed

    def work() -> None:
        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            is_opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & 0o103
            is_below = bool(arguments) and str(arguments[0]).startswith(str(place))
            if (is_opened or event in CHANGES) and is_below:
                left.value -= 1
                if left.value == 0:
                    act()

        sys.addaudithook(watch)
        os._exit(run(*command).code)

    process = fork.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, left.value <= 0


@pytest.fixture
def command(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, ...]:
    # tqdm's own lock is one of all processes, and a killed fork may hold it
    monkeypatch.setattr(tqdm, "_lock", threading.RLock(), raising=False)
    stats = calibrated / "stats.safetensors"
    options = ("--model", child, "--out", tmp_path / "out")
    return ("export", stats, "--format", "kv-overlay", *options)


@pytest.mark.parametrize(("act", "code"), [(interrupt, 130), (break_disk, 7)])
def test_an_interruption_or_a_failure_leaves_nothing_or_the_whole(
    calibrated: Path, child: Path, tmp_path: Path, command: tuple[object, ...], act: Act, code: int
) -> None:
    """At every change of files, one after the other."""
    before = snapshot(tmp_path)
    graft(calibrated, child, tmp_path / "out")
    whole = snapshot(tmp_path)
    step, has_acted = 0, True
    while has_acted:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        step += 1
        found, has_acted = run_in_fork(command, act, step, tmp_path)
        assert found in (0, code)
        assert snapshot(tmp_path) in ((before, whole) if found else (whole,))
    assert step > 8


def test_a_kill_at_any_moment_leaves_nothing_or_the_whole(
    calibrated: Path, child: Path, tmp_path: Path, command: tuple[object, ...]
) -> None:
    """Before every change of files, and at random moments; a hidden folder may remain."""
    before, times = snapshot(child), {path: path.stat().st_mtime_ns for path in child.iterdir()}
    graft(calibrated, child, tmp_path / "whole")
    whole = snapshot(tmp_path / "whole")

    def check() -> None:
        assert snapshot(child) == before
        assert {path: path.stat().st_mtime_ns for path in child.iterdir()} == times
        names = {path.name for path in tmp_path.iterdir() if path.name[0] != "."}
        assert names - {"out"} == {"child", "whole"}
        if "out" in names:
            assert snapshot(tmp_path / "out") == whole
            shutil.rmtree(tmp_path / "out")

    step, has_acted, started = 0, True, 0.0
    while has_acted:
        step, started = step + 1, time.monotonic()
        found, has_acted = run_in_fork(command, kill, step, tmp_path)
        assert found == (-signal.SIGKILL if has_acted else 0)
        check()
    assert step > 8
    duration_s = time.monotonic() - started
    moments = random.Random(0)  # noqa: S311 -- no secrets
    for _ in range(12):
        process = multiprocessing.get_context("fork").Process(target=run, args=command)
        process.start()
        time.sleep(moments.uniform(0.2, 1.0) * duration_s)
        process.kill()
        process.join()
        check()


def save_sparse(folder: Path, *, layers: int) -> Path:
    """Write an FP8 Llama in the shape of the 70B one: sparse files, three layers in each."""
    folder.mkdir()
    sizes = {
        "self_attn.q_proj": (8192, 8192),
        "self_attn.o_proj": (8192, 8192),
        **{f"self_attn.{name}_proj": (1024, 8192) for name in "kv"},
        **{f"mlp.{name}_proj": (28672, 8192) for name in ("gate", "up")},
        "mlp.down_proj": (8192, 28672),
    }
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [
        {"model.embed_tokens.weight": ("BF16", (128256, 8192))},
        {"model.norm.weight": ("BF16", (8192,)), "lm_head.weight": ("BF16", (128256, 8192))},
    ]
    for layer in range(layers):
        if layer % 3 == 0:
            shards.append({})
        for name, shape in sizes.items():
            path = f"model.layers.{layer}.{name}"
            shards[-1][f"{path}.weight"] = ("F8_E4M3", shape)
            shards[-1][f"{path}.weight_scale"] = ("BF16", (shape[0], 1))
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards[-1][f"model.layers.{layer}.{name}.weight"] = ("BF16", (8192,))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, place = {}, 0
        for name, (dtype, shape) in shard.items():
            stop = place + math.prod(shape) * (1 if dtype == "F8_E4M3" else 2)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, stop]}
            weight_map[name], place = file, stop
        raw = encode_header(header)
        with (folder / file).open("wb") as stream:
            stream.write(raw)
            stream.truncate(len(raw) + place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ).to_dict()
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "strategy": "channel", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def count_read_bytes() -> int:
    """Count what this process has read from files, in calls of `read`."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@takes_minutes
def test_a_large_checkpoint_is_hardly_read_and_not_copied(tmp_path: Path) -> None:
    """Of 20 GB, the projections of K and V are read, and the rest in samples."""
    child = save_sparse(tmp_path / "child", layers=24)
    scales = {
        f"{ATTENTION.format(layer)}.{role}_scale": torch.tensor(0.01 + layer / 1000)
        for layer in range(24)
        for role in "kv"
    }
    save_file(scales, tmp_path / "pack.safetensors")
    before = count_read_bytes()
    options = ("--source-dtype", "e4m3fn")
    succeed(*name_command(tmp_path / "pack.safetensors", child, tmp_path / "out", *options))
    assert count_read_bytes() - before < 450_000_000
    new = [path for path in (tmp_path / "out").iterdir() if path.stat().st_nlink == 1]
    assert sum(path.stat().st_size for path in new) < 2_000_000
    old = {path.stat().st_ino for path in child.glob("*.safetensors")}
    assert old < {path.stat().st_ino for path in (tmp_path / "out").glob("*.safetensors")}
