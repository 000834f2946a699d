"""File systems, interruptions, time and bytes."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
from pathlib import Path

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
from tests.cli.program import succeed
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


CHANGES = {"os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def command(
    calibrated: Path, child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, ...]:
    # tqdm's own lock is one of all processes, and a killed fork may hold it
    monkeypatch.setattr(tqdm, "_lock", threading.RLock(), raising=False)
    stats = calibrated / "stats.safetensors"
    options = ("--model", child, "--out", tmp_path / "out")
    return ("export", stats, "--format", "kv-overlay", *options)


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
