"""How many kernels observation adds to a forward pass, on simulated GPUs."""

from __future__ import annotations

import shutil

import pytest
import torch

from scripts.benchmarks.launches import WorkCounter, count_all

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)


def test_observation_adds_few_launches_to_those_of_the_decoder() -> None:
    """In llama a tensor takes one kernel, and all sites share those that update the statistics."""
    counted = dict(count_all())
    assert set(counted) == {"llama", "mixtral", "qwen3_next", "deepseek_v3"}
    for family, work in counted.items():
        assert 0 < work.observation.launches <= 0.35 * work.decoder.launches, family
        assert work.with_histograms.launches <= 0.6 * work.decoder.launches, family
        assert work.observation.launches < work.with_histograms.launches
    llama = counted["llama"].observation
    assert llama.launches == 4 * 6 + 3  # layers x (k, v, 4 different inputs), 3 for all sites


def test_work_counts_kernels_not_views() -> None:
    x = torch.ones(4, 6)
    with WorkCounter(x.device) as counter:
        x.t().reshape(6, 4)[:, :2].expand(2, 6, 2)  # one copy: 24 values in fp32
        torch.empty(3)
    assert (counter.work.launches, counter.work.bytes_read) == (0, 0)
    with WorkCounter(x.device) as counter:
        (x.t() + 1).sum()
        torch._foreach_add_([torch.zeros(1) for _ in range(65)], 1.0)
    assert counter.work.launches == 2 + 65 + 2  # zeros are kernels too; 64 tensors share one
