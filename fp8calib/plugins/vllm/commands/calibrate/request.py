"""The request of `fp8calib vllm calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import yaml

from fp8calib.commands.calibrate import CalibrateRequest
from fp8calib.commands.request import option, request_class
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


@request_class
class VllmCalibrateRequest(CalibrateRequest):
    """Run the text of a calibration inside vLLM, which is installed here.

    Example: fp8calib vllm calibrate MODEL --data calib.jsonl --tensor-parallel-size 8
    """

    _: KW_ONLY
    tensor_parallel_size: int = option(
        "--tensor-parallel-size N", "Tensor-parallel ranks of vLLM.", least=1, default=1
    )
    pipeline_parallel_size: int = option(
        "--pipeline-parallel-size N", "Pipeline stages of vLLM.", least=1, default=1
    )
    engine_option: Mapping[str, Any] | None = option(
        "--engine-option KEY=VALUE",
        "Another argument of vLLM; repeat for more.",
        reads=list[str],
        collect=parse_engine_options,
        default=None,
    )
