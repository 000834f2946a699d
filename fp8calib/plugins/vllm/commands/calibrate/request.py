"""The request of `fp8calib vllm calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import yaml

from fp8calib.commands.calibrate import CalibrateRequest
from fp8calib.commands.option import Option
from fp8calib.errors import UsageError


def parse_engine_options(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Read KEY=VALUE; a value is read as YAML, so that 0.8, true and {a: 1} are what they say.

    Raises:
        UsageError: a text has no `=`, or its value is not YAML.
    """
    if not texts:
        return None
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--engine-option {text}: not KEY=VALUE")
        try:
            found[key.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--engine-option {text}: {value} is not a value") from error
    return found


@dataclass(frozen=True, slots=True)
class VllmCalibrateRequest(CalibrateRequest):
    """Run the text of a calibration inside vLLM, which is installed here.

    Example: fp8calib vllm calibrate MODEL --data calib.jsonl --tensor-parallel-size 8
    """

    _: KW_ONLY
    tensor_parallel_size: Annotated[
        int,
        Option(
            "--tensor-parallel-size", metavar="N", least=1, help="Tensor-parallel ranks of vLLM."
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option("--pipeline-parallel-size", metavar="N", least=1, help="Pipeline stages of vLLM."),
    ] = 1
    engine_option: Annotated[
        Mapping[str, Any] | None,
        Option(
            "--engine-option",
            metavar="KEY=VALUE",
            reads=list[str],
            collect=parse_engine_options,
            help="Another argument of vLLM; repeat for more.",
        ),
    ] = None
