"""Calibration on media on a GPU: the statistics of the CPU, and streamed the same bytes."""

from pathlib import Path

import pytest
import torch

from fp8calib.model.geometry import Role
from tests.doors import as_bytes, opened
from tests.kit.multimodal import parametrize, save_multimodal
from tests.truth.test_media import KINDS, plan_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@parametrize(KINDS)
def test_a_gpu_observes_what_the_cpu_does(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path / "model")
    plan = plan_of(name, tmp_path / "model")
    found = []
    for device, streamed in (("cpu", False), ("cuda", False), ("cuda", True)):
        with opened(tmp_path / "model", streamed=streamed, device=device) as subject:
            found.append(subject.calibrate(plan=plan, batch_size=2))
    cpu, whole, streamed_there = found
    assert as_bytes(whole, tmp_path) == as_bytes(streamed_there, tmp_path)
    assert cpu.sites.keys() == whole.sites.keys()
    for site, one in cpu.sites.items():
        other = whole.sites[site]
        assert one.count == other.count
        assert one.tensors.keys() == other.tensors.keys()
        if site.role is Role.WEIGHT:
            assert torch.equal(one.amax, other.amax)
            continue
        torch.testing.assert_close(other.amax, one.amax, rtol=1e-3, atol=1e-5)
