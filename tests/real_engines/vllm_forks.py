"""Answer questions to vLLM, one JSON job a line on stdin, each in a fork of this process.

Runs in vLLM's own environment, which takes long to import. A job names its `verb`, one of the
functions below, and `result`, the file for the answer. Where there is none, a text file beside it
has the error and the engine's line. A line on stdout says that a job is done.
"""

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from vllm import LLM
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm_weights import describe, leave_out_kernels, load
from vllm_worker import TINY_SERVER

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "fp8calib" / "plugins" / "vllm" / "loader_script.py"
_TIMEOUT_S = {"load": 120, "run": 120, "names": 300, "calibrate": 900}


def main() -> None:
    """Answer every job of stdin."""
    sys.path.insert(0, str(_ROOT))
    registry._run_in_subprocess = lambda inspect: inspect()  # a fork can import the model itself
    prepare_for_forks()
    import fp8calib.plugins.vllm.engine  # noqa: F401, PLC0415 -- once for all forks

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    verbs = {"load": load_model, "run": run_script, "names": load_names, "calibrate": calibrate}
    for line in sys.stdin:
        job = json.loads(line)
        verb, result = job.pop("verb"), Path(job.pop("result"))
        child = os.fork()
        refused = result.with_suffix(".refused")
        if child == 0:
            signal.alarm(_TIMEOUT_S[verb])
            try:
                verbs[verb](result, **job)
            except BaseException as error:  # noqa: BLE001 -- whatever the engine says is the answer
                refused.write_text(describe(error))
            os._exit(0)  # vLLM's threads may not end
        _, status = os.waitpid(child, 0)
        if status:
            refused.write_text(f"the process ended with status {status}")
        print("done", file=replies, flush=True)


def prepare_for_forks() -> None:
    """Do what does not depend on the model, and takes half of the time of a load."""
    configure_logging_if_needed(LoggingConfig())
    load_general_plugins()
    importlib.import_module("vllm.model_executor.models.transformers")
    get_checkpoint_conversion_mapping("llama")  # transformers makes all of them at once
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    gc.freeze()  # or every fork goes through all of vLLM's objects, twice a model


def load_model(result: Path, model: str, dtype: str) -> None:
    """Write the parameters of a model, as `vllm_weights.py` describes them."""
    leave_out_kernels()
    save_file(load(model, dtype), result)


def run_script(result: Path, model: str, kv_cache_dtype: str) -> None:
    """Write what the script of `vllm check` prints."""
    spec = spec_from_file_location("run_loader", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    with result.open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.argv = ["loader_script.py", model, kv_cache_dtype, "1"]
    script.main()


def load_names(result: Path, model: str, names: list[str]) -> None:
    """Write the parameters that a tensor of each name is loaded into, or the error."""
    result.write_text(json.dumps(try_names(model, names)))


def calibrate(
    result: Path,
    arguments: list[str],
    environment: dict[str, str],
    record: str,
) -> None:
    """Run the command line of fp8calib, and write what it prints; the last line is the exit code.

    `record` is the file for the answers of the workers, or empty.
    """
    os.environ.update(environment)
    answers: dict[str, list[Any]] = {}
    if record:
        _keep_answers(answers)
    with result.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 70
    try:
        from fp8calib.cli import main_inner  # noqa: PLC0415

        code = main_inner(arguments)
        if record:
            from tests.plugins.vllm.recorded import write_golden  # noqa: PLC0415

            write_golden(Path(record), answers)
    except BaseException as error:  # noqa: BLE001 -- the caller reads it
        traceback.print_exc()
        print(getattr(error, "hint", ""))
    print(f"\nexit code {code}", flush=True)


def _keep_answers(answers: dict[str, list[Any]]) -> None:
    """Keep the last answers of the workers by method."""
    call = LLM.collective_rpc

    def keep(self: LLM, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        answers[method] = call(self, method, *args, **kwargs)
        return answers[method]

    LLM.collective_rpc = keep  # type: ignore[method-assign]


class AskedError(Exception):
    """All names have been tried."""


def try_names(model: str, names: Iterable[str]) -> dict[str, Any]:
    """Give for each name the parameters that a tensor is loaded into, or the error."""
    answer: dict[str, Any] = {}

    def ask(_: Any, module: torch.nn.Module, *__: Any) -> None:
        parameters = dict(module.named_parameters())
        for name in names:
            answer[name] = _load(module, parameters, name)
        raise AskedError

    DefaultModelLoader.load_weights = ask
    try:
        LLM(
            model=model,
            dtype="bfloat16",
            **TINY_SERVER,
        )
    except AskedError:
        return answer
    raise AssertionError(f"{model}: vLLM never came to its weights")


def _load(module: Any, parameters: dict[str, Any], name: str) -> list[str] | str:
    """Give the parameters that one tensor is loaded into, or the error."""
    try:
        loaded = module.load_weights(iter([(name, torch.tensor([0.25]))]))
    except Exception as error:  # noqa: BLE001 -- whatever the engine says is the answer
        return f"{type(error).__name__}: {error}"
    return sorted(set(loaded) & parameters.keys())


if __name__ == "__main__":
    main()
