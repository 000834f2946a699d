"""The program with two pretended GPUs, and gloo between them where nccl would be.

Run it as `python -m tests.cli.pretending` where `python -m fp8calib` is run.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import distributed

from fp8calib.cli import main
from tests.pretended_gpus import pretended_gpus

_init = distributed.init_process_group


def init_without_nccl(backend: str, **kwargs: Any) -> None:
    assert backend == "cpu:gloo,cuda:nccl"
    _init("gloo", **kwargs)


if __name__ == "__main__":
    with (
        pretended_gpus(2),
        mock.patch.object(distributed, "init_process_group", init_without_nccl),
    ):
        main()
