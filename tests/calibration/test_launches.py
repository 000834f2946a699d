"""How many kernels observation adds to a forward pass, on simulated GPUs."""

from __future__ import annotations

import shutil

import pytest
import torch

from scripts.benchmarks.launches import WorkCounter, count_all

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)


def test_observation_and_emulation_add_few_launches_to_those_of_the_decoder() -> None:
    """In llama a tensor takes one kernel, and all sites share those that update the statistics."""
    observed = {}
    for family, work, emulations in count_all():
        observed[family] = work.observation.launches
        assert 0 < work.observation.launches <= 0.35 * work.decoder.launches, family
        assert work.with_histograms.launches <= 0.6 * work.decoder.launches, family
        assert work.observation.launches < work.with_histograms.launches
        shares = {n: each.launches / work.decoder.launches for n, each in emulations.items()}
        assert 0 < shares["kv"] <= 0.5, family
        assert shares["kv"] <= shares["kv + P"] <= 0.85, family
        assert 0 < shares["w8a8 static"] <= 1, family
        assert 0 < shares["w8a8 dynamic"] <= 1, family
    assert observed.keys() == {"llama", "mixtral", "qwen3_next", "deepseek_v3"}
    # layers x (k, v, 4 different inputs), 5 for all sites
    assert observed["llama"] == 4 * 6 + 5


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
