"""Each kind of linear of an FP8 checkpoint is put back to 16 bits, or loses its scale: never ok.

What the engine creates by the config is then cast without a scale, or memory that nobody set. These
families were called ok before `check` knew what classes create.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.engines.facts.classes import make_pattern
from fp8calib.engines.replay.verdicts import EngineReport
from tests import zoo
from tests.engines.test_check_weights import ask
from tests.quantization.by_hand import run

CASES = [
    *(("vllm", family) for family in ("qwen3_5_text", "gemma3n_text", "falcon_h1")),
    ("vllm==0.32", "qwen3_5_text"),
    *(("sglang", family) for family in ("qwen3_next", "recurrent_gemma", "nemotron_h")),
]


@pytest.mark.parametrize(("engine", "family"), CASES)
def test_what_is_put_back_or_lacks_its_scale_is_seen(
    tmp_path: Path, engine: str, family: str
) -> None:
    zoo.save(family, tmp_path / "model")
    folder = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic", "compressed-tensors").out
    assert is_fine(ask(folder, engine))
    (file,) = folder.glob("*.safetensors")
    whole = load_file(file)
    for name in list_kinds(whole):
        plain = {**whole, name: whole[name].to(torch.bfloat16)}
        for changed in (plain, whole):
            held = {key: value for key, value in changed.items() if key != f"{name}_scale"}
            file.unlink()
            save_file(held, file, metadata={"format": "pt"})
            assert not is_fine(ask(folder, engine)), name


def list_kinds(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """List the first FP8 weight of each kind."""
    seen = set()
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn and (kind := make_pattern(name)) not in seen:
            seen.add(kind)
            yield name


def is_fine(report: EngineReport) -> bool:
    """Tell whether nothing is wrong with the weights, and nothing unknown."""
    is_refused = any(each.k.status == "refused" for each in report.layers)
    return report.weights is None and not report.unknown and not is_refused
