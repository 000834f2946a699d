"""The caller's side of the workers that run in vLLM's environment."""

import json
import os
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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
FORKS = Path(__file__).with_name("vllm_forks.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
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
class Answer:
    """What an engine answered about its layers and text."""

    error: str = ""
    """The exception's type and text when the model was refused; nothing else is there then."""
    ranks: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """By rank and path of the attention layer: its scales, the bytes of a cache element."""
    logprobs: list[list[float]] = field(default_factory=list)

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """The layers of the first rank."""
        return self.ranks[0]

    def scales(self) -> Scales:
        """Give the k and v that the layers hold, on the device."""
        return {layer_index(name): (held["k"], held["v"]) for name, held in self.layers.items()}

    def cache_bytes(self) -> set[int]:
        """Give the sizes of an element that occur in the KV cache."""
        return {held["cache_element_bytes"] for held in self.layers.values()}


Engine = tuple[Mapping[str, Any], Sequence[Sequence[Any]]]
"""The options of an `LLM`, and what it is asked: steps of `vllm_worker.py`."""


class VllmServer:
    """Starts a worker for every job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self, model: Path, *, tp: int = 1, logprobs: Sequence[Sequence[int]] = (), **options: Any
    ) -> Answer:
        """Load a model, list its layers, and score the token ids of sequences."""
        length = options.setdefault("max_model_len", 64)
        options |= {"model": str(model), "tensor_parallel_size": tp}
        options |= {"max_num_batched_tokens": length, "num_gpu_blocks_override": 256}
        steps: list[Sequence[Any]] = [["layers"], *([["score", logprobs]] if logprobs else [])]
        (found,) = self.run((options, steps))
        if isinstance(found, dict):
            skip_without_fp8_cache(found["error"])
            return Answer(error=found["error"])
        return Answer(ranks=found[0], logprobs=found[1] if logprobs else [])

    def run(self, *engines: Engine) -> list[Any]:
        """Run engines one after another; give the answers to the steps of each."""
        self._count += 1
        job, result, log = (
            self._folder / f"{self._count:02}.{each}" for each in ("job", "json", "log")
        )
        job.write_text(json.dumps([{"options": one, "steps": steps} for one, steps in engines]))
        tp = engines[0][0].get("tensor_parallel_size", 1)
        more = _bind_ranks(tp)
        more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if tp > 1 else {}
        with log.open("wb") as stream:
            code = subprocess.run(
                [PYTHON, WORKER, job, result],
                env=os.environ | ENVIRONMENT | more,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        assert_started(code, log)
        answers: list[Any] = json.loads(result.read_text())
        return answers


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
    """A process with vLLM imported, which answers each question in a fork of itself."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [PYTHON, FORKS],
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

    def ask(self, verb: str, result: Path, **job: object) -> str:
        """Ask a question of `vllm_forks.py`; give the error where there is no answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        refused = result.with_suffix(".refused")
        refused.unlink(missing_ok=True)
        stdin.write(f"{json.dumps({'verb': verb, 'result': result, **job}, default=str)}\n")
        stdin.flush()
        assert stdout.readline() == "done\n", self._log.read_text()[-3000:]
        return refused.read_text() if refused.exists() else ""

    def load(
        self, model: Path, result: Path, dtype: str = "bfloat16"
    ) -> dict[str, torch.Tensor] | str:
        """Give the tensors that `vllm_weights.py` takes of a model, or the error."""
        return self.ask("load", result, model=model, dtype=dtype) or load_file(result)

    def run(self, model: Path, result: Path, kv_cache_dtype: str = "fp8") -> LoaderAnswer:
        """Give the answer of vLLM's loader to what `vllm check` asks.

        Raises:
            VerificationError: the process died.
        """
        self.ask("run", result, model=model, kv_cache_dtype=kv_cache_dtype)
        answer = parse_answer(result.read_text(), 1)
        if answer is None:
            raise VerificationError("the process with vLLM's loader died")
        return answer

    def calibrate(
        self,
        model: Path,
        out: Path,
        *options: object,
        ranks: int = 1,
        record: Path | None = None,
    ) -> tuple[int, str]:
        """Give the exit code of `fp8calib vllm calibrate`, and what was printed.

        `record` is the file for workers' answers.
        """
        result = out.with_suffix(".printed")
        arguments = ["vllm", "calibrate", model, "--out", out, *options]
        self.ask(
            *("calibrate", result),
            arguments=list(map(str, arguments)),
            environment=_bind_ranks(ranks),
            record=record or "",
        )
        printed, _, code = result.read_text().rpartition("exit code ")
        return int([*code.split(), 71][0]), printed


Calibrator = Callable[..., tuple[int, str]]
"""`ForkServer.calibrate`."""


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
    with ForkServer(log) as server:
        return {
            case: server.load(path, path.with_suffix(".loaded"), dtype)
            for case, path in checkpoints.items()
        }
