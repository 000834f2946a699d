"""The caller's side of `vllm_worker.py`: one question to vLLM, answered by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.errors import VerificationError
from fp8calib.plugins.vllm.loader import LoaderAnswer, parse_answer
from tests.real_engines.exports import Scales, layer_index

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WORKER = Path(__file__).with_name("vllm_worker.py")
WEIGHTS_WORKER = Path(__file__).with_name("vllm_weights.py")
RUN_WORKER = Path(__file__).with_name("vllm_run.py")
CALIBRATION_WORKER = Path(__file__).with_name("vllm_calibrate.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
TIMEOUT_S = 1200
Case = TypeVar("Case", bound=Hashable)
_NO_FP8_CACHE = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
"""vLLM's error (`v1/attention/backends/cpu_attn.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What vLLM is to load and to do."""

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "fp8"
    max_model_len: int = 64
    tp: int = 1
    logprobs: Sequence[Sequence[int]] = ()
    """Token ids of sequences to score."""
    prompt: str | None = None
    """Text to go on from, greedily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    error: str = ""
    """The exception's type and text when the model was refused; nothing else is there then."""
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path of the attention layer: its scales, its KV dtype, the bytes of a cache element."""
    ranks: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """The same of every rank; `layers` is that of the first."""
    logprobs: list[list[float]] = field(default_factory=list)
    text: str = ""

    def scales(self) -> Scales:
        """Give the k and v that the layers hold, on the device."""
        return {layer_index(name): (held["k"], held["v"]) for name, held in self.layers.items()}

    def kernel_scales(self) -> dict[int, tuple[float, float]]:
        """Give the k and v that the attention backend is called with."""
        return {
            layer_index(name): (held["k_host"], held["v_host"])
            for name, held in self.layers.items()
        }

    def cache_bytes(self) -> set[int]:
        """Give the sizes of an element that occur in the KV cache."""
        return {held["cache_element_bytes"] for held in self.layers.values()}


class VllmServer:
    """Starts a worker for every job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, model: Path, **options: Any) -> Answer:
        """Load `model` and do what the options of `Job` say."""
        self._count += 1
        stem = self._folder / f"{self._count:02}-{model.parent.parent.name}"
        job, result, log = (stem.with_suffix(suffix) for suffix in (".job", ".json", ".log"))
        job.write_text(json.dumps(asdict(Job(model=str(model), **options))))
        with log.open("wb") as stream:
            code = subprocess.run(
                [PYTHON, WORKER, job, result],
                env=os.environ | ENVIRONMENT | _bind_ranks(options.get("tp", 1)),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        assert_started(code, log)
        answer = Answer(**json.loads(result.read_text()))
        skip_without_fp8_cache(answer.error)
        return answer


def skip_without_fp8_cache(error: str) -> None:
    """Skip the test where this processor cannot run vLLM's FP8 KV cache."""
    if _NO_FP8_CACHE in error:
        pytest.skip("vLLM's FP8 KV cache needs a processor with AVX-512 or AMX")


def assert_started(code: int | None, log: Path) -> None:
    """Assert that a process of vLLM did not fail."""
    error = log.read_text() if code else ""
    skip_without_fp8_cache(error)
    assert not code, f"the process ended with {code}:\n{error[-4000:]}"


def _bind_ranks(tp: int) -> dict[str, str]:
    """Give each rank a core; vLLM itself wants a NUMA node for each."""
    cores = os.cpu_count() or 1
    bound = "|".join(str(rank % cores) for rank in range(tp))
    return {"VLLM_CPU_OMP_THREADS_BIND": bound} if tp > 1 else {}


class ForkServer:
    """A process with vLLM imported, which answers one job after another in a fork of itself."""

    def __init__(self, log: Path, worker: Path) -> None:
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [PYTHON, worker],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, **job: object) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps(job, default=str)}\n")
        stdin.flush()
        assert stdout.readline() == "done\n", self._log.read_text()[-3000:]


class WeightLoader(ForkServer):
    """Loads whole checkpoints, with `vllm_weights.py`."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, WEIGHTS_WORKER)

    def __call__(
        self, model: Path, result: Path, dtype: str = "bfloat16"
    ) -> dict[str, torch.Tensor] | str:
        """Give the tensors that `vllm_weights.py` takes of a model, or the error."""
        self._ask(model=model, dtype=dtype, result=result)
        refused = result.with_suffix(".refused")
        return refused.read_text() if refused.exists() else load_file(result)


class RunLoader(ForkServer):
    """Asks what `vllm check` asks, with `vllm_run.py`."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, RUN_WORKER)

    def __call__(self, model: Path, result: Path, kv_cache_dtype: str = "fp8") -> LoaderAnswer:
        """Give the answer of vLLM's loader.

        Raises:
            VerificationError: the process died.
        """
        self._ask(model=model, kv_cache_dtype=kv_cache_dtype, result=result)
        answer = parse_answer(result.read_text(), 1)
        if answer is None:
            raise VerificationError("the process with vLLM's loader died")
        return answer


class Calibrator(ForkServer):
    """Runs `fp8calib vllm calibrate`, with `vllm_calibrate.py`."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, CALIBRATION_WORKER)

    def __call__(
        self,
        model: Path,
        out: Path,
        *options: object,
        ranks: int = 1,
        record: Path | None = None,
        has_torchvision: bool = False,
    ) -> tuple[int, str]:
        """Give the exit code, and what was printed.

        `record` is the file for workers' answers; `has_torchvision` stands an empty one in.
        """
        result = out.with_suffix(".printed")
        arguments = ["vllm", "calibrate", model, "--out", out, *options]
        self._ask(
            arguments=list(map(str, arguments)),
            environment=_bind_ranks(ranks),
            record=record or "",
            has_torchvision=has_torchvision,
            result=result,
        )
        printed, _, code = result.read_text().rpartition("exit code ")
        return int([*code.split(), 71][0]), printed


def load_in_vllm(checkpoints: Mapping[Case, Path]) -> dict[Case, dict[str, torch.Tensor]]:
    """Let vLLM load FP8 checkpoints, and give the parameters it holds (`vllm_weights.py`)."""
    found = load_or_refuse(checkpoints)
    errors = {case: answer for case, answer in found.items() if isinstance(answer, str)}
    assert not errors, errors
    return {case: answer for case, answer in found.items() if not isinstance(answer, str)}


def load_or_refuse(
    checkpoints: Mapping[Case, Path], dtype: str = "bfloat16"
) -> dict[Case, dict[str, torch.Tensor] | str]:
    """Do the same, and give the error of those that vLLM refuses."""
    log = next(iter(checkpoints.values())).with_suffix(".log")
    with WeightLoader(log) as load:
        return {
            case: load(path, path.with_suffix(".loaded"), dtype)
            for case, path in checkpoints.items()
        }
