"""An installation of vLLM whose workers answer as recorded (`tests.plugins.vllm.vllm_cases`)."""

from __future__ import annotations

import signal
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.version import __version__ as __version__

SamplingParams = SimpleNamespace


class LLM:
    """Gives the recorded answers; `generate` runs nothing."""

    answers: ClassVar[dict[str, list[Any]]] = {}
    asked: ClassVar[list[LLM]] = []
    sent: ClassVar[list[signal.Signals]] = []
    """Signals that come while it starts, where vLLM 0.32.0 suppresses KeyboardInterrupt."""

    def __init__(self, **arguments: Any) -> None:
        for number in self.sent:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)
        self.arguments = arguments
        self.prompts: list[list[int]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.asked.append(self)

    def generate(
        self, prompts: list[dict[str, list[int]]], *_: Any, **__: Any
    ) -> list[SimpleNamespace]:
        """Keep the prompts."""
        self.prompts += [each["prompt_token_ids"] for each in prompts]
        return [SimpleNamespace(**each) for each in prompts]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Give the recorded answers of the workers."""
        self.calls.append((method, args))
        return self.answers[method]
