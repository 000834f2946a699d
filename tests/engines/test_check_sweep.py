"""Each kind of linear of an FP8 checkpoint is put back to 16 bits, or loses its scale: never ok.

What the engine creates by the config is then cast without a scale, or memory that nobody set. These
families were called ok before `check` knew what classes create.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.engines.facts.classes import ClassMap, find_class_map, make_pattern
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.weights import reader
from tests import zoo
from tests.architectures import families
from tests.cli.program import run as program
from tests.engines.test_check_weights import ask
from tests.quantization.by_hand import run
from tests.truth.test_every_matrix import FAMILIES

VLLM = ("qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text", "falcon_h1")
SGLANG = (
    *("qwen3_5_text", "qwen3_next", "bamba"),
    *("recurrent_gemma", "granitemoehybrid", "nemotron_h"),
)
CASES = [
    *(("vllm", family) for family in VLLM),
    *(("vllm==0.32", family) for family in ("qwen3_5_text", "gemma3n_text")),
    *(("sglang", family) for family in SGLANG),
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


def test_of_a_model_that_an_engine_does_not_run_no_linear_is_counted(tmp_path: Path) -> None:
    zoo.save("bamba", tmp_path / "model")
    folder = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic").out
    report = ask(folder, "vllm")
    assert {each.k.why for each in report.layers} == {"vLLM 0.33 does not run bamba"}
    assert (report.linears, report.unknown) == (None, ())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_linear_that_the_map_lacks_is_unknown_though_a_list_excludes_it(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class may ask the config under another path."""
    zoo.save("mixtral", tmp_path / "model")
    folder = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic").out
    assert is_fine(ask(folder, engine))

    def find(*arguments: str) -> ClassMap:
        known = find_class_map(*arguments) or {}
        return {path: each for path, each in known.items() if not path.endswith(".gate")}

    monkeypatch.setattr(reader, "find_class_map", find)
    report = ask(folder, engine)
    assert "block_sparse_moe.gate is a linear of which it is not known" in report.unknown[0]
    assert report.linears is not None
    assert report.linears.unknown == 2


@zoo.NEEDS_5_23
def test_a_parameter_with_the_name_of_a_scale_belongs_to_no_linear(tmp_path: Path) -> None:
    """Inkling's routers multiply by `global_scale`."""
    families.save("inkling_text", FAMILIES["inkling_text"], tmp_path)
    for engine in ("vllm", "sglang"):
        assert not any("global_scale" in each for each in ask(tmp_path, engine).unknown)


@pytest.mark.parametrize(("engine", "unknown"), [("vllm", 0), ("sglang", 2)])
def test_linears_that_are_judged_and_unknown_are_counted(
    tmp_path: Path, engine: str, unknown: int
) -> None:
    """Layers of gemma3n that share K and V lack what SGLang's class joins with q."""
    zoo.save("gemma3n_text", tmp_path / "model")
    assert ask(tmp_path / "model", engine).linears is None
    folder = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic").out
    count = ask(folder, engine).linears
    assert count is not None
    assert (count.judged, count.unknown) == (61 - unknown, unknown)
    done = program("check", folder, "--engine", engine, "--all")
    assert f"  linears: {count.judged} judged, {count.unknown} unknown" in done.out
