"""A Llama of four layers with KV scales, and what goes wrong with them in a running vLLM.

`goldens/live-vllm-0.32.0.json` has what two ranks answered, without a fault and with each;
`scripts/test-engines --record` writes it.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests import zoo
from tests.engines.check_handmade import PER_TENSOR
from tests.kit.checkpoints import change_config, change_tensors

GOLDENS = Path(__file__).with_name("goldens") / "live-vllm-0.32.0.json"
FAULTS = (
    *("one_layer", "zeros", "zeros_on_device", "stale_float", "stale_cpu", "swapped", "shifted"),
    *("doubled", "query", "not_a_number"),
)
K = (0.005, 0.0055, 0.006, 0.0065)
V = (0.0063, 0.00693, 0.00756, 0.00819)
"""Near what the random weights reach; no two are alike."""
Answers = list[dict[str, Any]]


def write_model(
    folder: Path,
    *,
    factor: float = 1.0,
    layers: int = 4,
    quantization: object = PER_TENSOR,
    heads: Sequence[float] = (),
) -> Path:
    """Write the checkpoint.

    Args:
        folder: where to.
        factor: all scales are multiplied by it; 0 for none.
        layers: their number.
        quantization: the `quantization_config`; none without scales.
        heads: factors of the KV heads; empty for a scale per tensor.
    """
    # vLLM's CPU kernels want FP8 heads of a multiple of 32 elements: 4 heads of 32.
    zoo.save("llama", folder, hidden_size=128, num_hidden_layers=layers)
    shape = torch.tensor(heads).reshape(-1, 1, 1) if heads else torch.tensor(1.0)
    scales = {
        f"model.layers.{index}.self_attn.{role}_scale": factor * numbers[index] * shape
        for role, numbers in (("k", K), ("v", V))
        for index in range(layers if factor else 0)
    }
    change_tensors(folder, scales)
    return change_config(folder, **({"quantization_config": quantization} if scales else {}))


Change = tuple[int, int, str, str, list[str]]
"""The rank, the layer, the role, the copy, and its numbers."""


def list_changes(clean: Answers, damaged: Answers) -> list[Change]:
    return [change for change in _list_copies(damaged) if change not in [*_list_copies(clean)]]


def apply(clean: Answers, changes: list[Change]) -> Answers:
    answers = copy.deepcopy(clean)
    for rank, layer, role, name, numbers in changes:
        answers[rank]["layers"][layer]["scales"][role][name] = numbers
    return answers


def load_answers() -> Mapping[str, Answers]:
    """Load what the ranks answered, by fault; `clean` is without one."""
    golden = json.loads(GOLDENS.read_text())
    clean = golden["clean"]
    return {"clean": clean} | {
        fault: apply(clean, changes) for fault, changes in golden["faults"].items()
    }


def _list_copies(answers: Answers) -> Iterator[Change]:
    for rank, answer in enumerate(answers):
        for index, layer in enumerate(answer["layers"]):
            for role, copies in layer["scales"].items():
                for name, numbers in copies.items():
                    yield rank, index, role, name, numbers


ANSWERS = load_answers()
CLEAN = ANSWERS["clean"]


class Recorded:
    """Stands for an `LLM`: answers what ranks answered, and takes what is written."""

    def __init__(self, answers: Answers, *, is_busy: bool = False, is_asleep: bool = False) -> None:
        self.answers = copy.deepcopy(answers)
        self._is_busy = is_busy
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: is_asleep)
        self.loses: str = ""
        """A copy that is not written."""

    def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        """Do what the workers do."""
        if method == "fp8calib_write_scales":
            for name, numbers in json.loads(args[0]).items():
                self._write(name, numbers)
        return self.answers

    def reset_prefix_cache(self) -> bool:
        """Fail while requests run."""
        return not self._is_busy

    def _write(self, name: str, numbers: Mapping[str, float]) -> None:
        layers = [layer for each in self.answers for layer in each["layers"]]
        for scales in (layer["scales"] for layer in layers if layer["name"] == name):
            for role, number in numbers.items():
                written = {each: [str(number)] for each in scales[role] if each != self.loses}
                scales[role].update(written)


def change(edit: Callable[[int, dict[str, Any]], None], base: Answers = CLEAN) -> Answers:
    answers = copy.deepcopy(base)
    for answer in answers:
        for layer in answer["layers"]:
            edit(answer["tp_rank"], layer)
    return answers
