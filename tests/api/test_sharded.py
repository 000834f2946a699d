"""A model that FSDP2 has sharded over two processes is calibrated in both; they run this module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import fp8calib
from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.plugins.vllm import load_kv_scales
from tests.kit.minutes import takes_minutes
from tests.plugins.vllm.live_cases import CLEAN, Recorded, write_model

ROWS = [{"input_ids": list(range(5 + row, 60 + row))} for row in range(3)]
OPTIONS = {"observe": ["kv", "inputs"], "pack": False}


def load(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def work(folder: Path, out: str) -> None:
    """Calibrate between two steps of a training."""
    distributed.init_process_group("gloo")
    model = load(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = torch.tensor([ROWS[0]["input_ids"]])
    for step in range(2):
        model(ids, labels=ids).loss.backward()
        if step == 0:
            stats = fp8calib.calibrate(model, ROWS, **OPTIONS).stats
    save_stats(stats, Path(f"{out}-{distributed.get_rank()}"))
    with pytest.raises(fp8calib.ModelError, match="is sharded over processes"):
        fp8calib.calibrate(model, ROWS, **OPTIONS, out=out)
    distributed.destroy_process_group()


@takes_minutes
def test_every_process_has_the_statistics_of_the_whole_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", factor=0)
    own = tmp_path / "own"
    save_stats(fp8calib.calibrate(load(folder), ROWS, **OPTIONS).stats, own)

    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", __name__)
    subprocess.run([sys.executable, *torchrun, folder, tmp_path / "sharded"], check=True)

    for rank in range(2):
        assert (tmp_path / f"sharded-{rank}").read_bytes() == own.read_bytes()
    assert load_kv_scales(Recorded(CLEAN), tmp_path / "sharded-0").ok


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
