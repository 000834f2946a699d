"""Sixty random plans: vLLM and transformers load what `plan` offers, and refuse what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fp8calib
from fp8calib.commands.stats import CalibrationStats
from fp8calib.plugins.plan.choices import IN_16_BITS, Choices, Unit
from fp8calib.plugins.plan.opened import open_plan
from fp8calib.plugins.plan.recipe import make_planned_scheme
from fp8calib.plugins.plan.request import PlanRequest
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.real_engines.vllm_job import WeightLoader

VLLM, TRANSFORMERS = "vllm==0.32", "transformers"
COUNT = 10
"""Plans of each model and engine: sixty."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("llama", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}),
    "odd": ("llama", {"hidden_size": 192, "head_dim": 48, "intermediate_size": 272}),
    "experts": ("mixtral", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 128}),
}


@dataclass(frozen=True)
class Offered:
    """A model, its statistics, and what can be chosen for an engine."""

    model: Path
    stats: CalibrationStats
    units: tuple[Unit, ...]

    def write(self, choices: dict[str, str], out: Path) -> Path:
        """Write a checkpoint by the choices of its units, also refused ones."""
        plan = {name: choice for name, choice in choices.items() if choice != IN_16_BITS}
        asked = make_planned_scheme(self.units, plan).quantize
        assert asked is not None
        fp8calib.quantize(
            self.model,
            asked.scheme,
            out,
            stats=self.stats,
            layer_schemes=asked.layer_schemes,
            ignore=asked.ignore,
            allow_unservable=True,
        )
        return out


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Offered]:
    folder = tmp_path_factory.mktemp("offered")
    rows = [{"text": " ".join(f"w{i * j % 90}" for j in range(1, 40))} for i in range(20)]
    text = write_rows(folder / "text.jsonl", rows)
    found = {}
    for case, (family, sizes) in MODELS.items():
        path = folder / case
        zoo.save(family, path, vocab_size=128, torch_dtype="bfloat16", **sizes)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model.save_pretrained(path)
        save_tokenizer(path)
        for engine in (VLLM, TRANSFORMERS):
            request = PlanRequest(
                path, str(text), engine=engine, max_bytes="0.7", seq_len=16, samples=10, kv_tokens=0
            )
            with open_plan(request) as opened:
                out = folder / f"{case}-stats"
                if not out.exists():
                    fp8calib.calibrate(path, str(text), out=out, seq_len=16, samples=10)
                stats = fp8calib.load_stats(out)
                units = Choices(opened, stats).open(opened.model.prepared.model).units
            found[case, engine] = Offered(path, stats, units)
    return found


def draw(offered: Offered, count: int) -> Iterator[dict[str, str]]:
    chance = random.Random(0)  # noqa: S311
    while count:
        plan = {
            unit.name: chance.choice([IN_16_BITS, *unit.sizes])
            for unit in offered.units
            if unit.linears
        }
        if set(plan.values()) != {IN_16_BITS}:
            count -= 1
            yield plan


def list_refused(offered: Offered) -> Iterator[dict[str, str]]:
    """Give each refused scheme to the units of one kind, and leave the others."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for unit in offered.units:
        for scheme, why in unit.refused.items():
            if "cannot load" in why:
                kinds.setdefault((unit.name.rpartition(".")[2], scheme), []).append(unit.name)
    for (_, scheme), names in kinds.items():
        yield dict.fromkeys(names, scheme)


@pytest.mark.parametrize("case", MODELS)
def test_vllm_loads_what_is_offered_and_refuses_what_is_not(
    offered: dict[tuple[str, str], Offered], case: str, tmp_path: Path
) -> None:
    mine = offered[case, VLLM]
    with WeightLoader(tmp_path / "log") as load:
        for number, plan in enumerate(draw(mine, COUNT)):
            out = mine.write(plan, tmp_path / f"offered-{number}")
            checked = fp8calib.check(out, engine=VLLM).engines
            assert all(each.ok for each in checked.values()), plan
            answer = load(out, tmp_path / f"offered-{number}.safetensors")
            assert not isinstance(answer, str), (plan, answer)
        for number, plan in enumerate(list_refused(mine)):
            out = mine.write(plan, tmp_path / f"refused-{number}")
            answer = load(out, tmp_path / f"refused-{number}.safetensors")
            assert isinstance(answer, str), plan


def is_told(name: str, checked: Any) -> bool:
    """Tell whether `check` says that transformers ignores input scales of joined experts."""
    (report,) = checked.values()
    is_scale = "experts" in name and name.endswith("input_scale")
    return is_scale and any("input" in problem for problem in report.problems)


@pytest.mark.parametrize("case", MODELS)
def test_transformers_loads_what_is_offered(
    offered: dict[tuple[str, str], Offered], case: str, tmp_path: Path
) -> None:
    mine = offered[case, TRANSFORMERS]
    for number, plan in enumerate(draw(mine, COUNT)):
        out = mine.write(plan, tmp_path / f"offered-{number}")
        checked = fp8calib.check(out, engine=TRANSFORMERS).engines
        assert all(each.ok for each in checked.values()), plan
        _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        unused = {
            name for name in map(str, info.pop("unexpected_keys")) if not is_told(name, checked)
        }
        assert not unused, (plan, unused)
        assert not any(info.values()), (plan, info)
