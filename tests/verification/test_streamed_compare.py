"""A streamed comparison gives the numbers of the whole one, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.layer_steps import LayerSteps
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.streamed_model import open_streamed
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import DataPlan, batches
from fp8calib.engines.registry import find_emulated
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.load import LoadedModel, build_skeleton, load_model, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import find_scheme
from fp8calib.plugins.plan.choices import keep_modules
from fp8calib.quantization.select import find_selection
from fp8calib.verification.candidates import emulate_kv, make_unscaled_table
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.score import Scores, score
from tests import zoo
from tests.doors import make_plan, run_calibration
from tests.kit.minutes import in_minutes
from tests.verification.by_hand import Subject, emulate_scheme
from tests.zoo import draw

VLLM = find_emulated("vllm")[1]
LENGTHS = [7, 20, 13, 3, 9]


def make_emulations(
    model: LoadedModel, geometry: ModelGeometry, stats: RunStats, checkpoint: Checkpoint
) -> dict[str, Candidate]:
    """Make a candidate of every kind: KV alone, weights and inputs, weights alone, and both."""
    source = WeightSource(model, checkpoint)
    subject = Subject(model, geometry, source, find_selection(checkpoint))

    def scheme(name: str) -> Candidate:
        given = stats if "static" in name else None
        return emulate_scheme(subject, find_scheme(name), VLLM, stats=given)

    scaled = emulate_kv(compute_kv_scales(stats, E4M3FN), VLLM)
    static = scheme("fp8-static")
    return {
        "kv": Candidate(quantizers=scaled),
        "static and kv": Candidate(
            quantizers={**static.quantizers, **scaled}, weights=static.weights
        ),
        "dynamic": scheme("fp8-dynamic"),
        "w8a16": scheme("w8a16"),
    }


def compare(
    folder: Path,
    plan: DataPlan,
    *,
    streamed: bool,
    dtype: torch.dtype = torch.float32,
    ram_bytes: int = 0,
    choose: Callable[[dict[str, Candidate]], Mapping[str, Candidate]] = lambda found: found,
) -> tuple[Scores, MeasurementHooks]:
    """Compare a folder's model with candidates of every kind, whole or streamed."""
    source = open_source(str(folder))
    with Checkpoint.open(folder) as checkpoint:
        stats = measure(folder, plan)
        geometry = stats.geometry
        if streamed:
            model = build_skeleton(source, dtype=dtype)
        else:
            model = load_model(source, dtype=dtype, device="cpu", device_map=None)
        emulations = choose(make_emulations(model, geometry, stats, checkpoint))
        unscaled = emulate_kv(make_unscaled_table(geometry, E4M3FN), VLLM)
        looking = MeasurementHooks([Candidate(name="unscaled", quantizers=unscaled)])
        todo = list(batches(plan, 3))
        told: list[int] = []
        progress: Any = SimpleNamespace(advance=told.append)
        named = [replace(each, name=name) for name, each in emulations.items()]
        prepared = prepare(model, checkpoint)
        if not streamed:
            return score(prepared, named, todo, looking, progress=progress), looking
        mode = MemoryPlan(is_streamed=True, hidden_ram_bytes=ram_bytes, scratch=folder.parent)
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *plan.sequences])
        with open_streamed(prepared, tokens, mode, "cpu") as opened:
            found = score(opened, named, todo, looking, progress=progress)
        passes = len(emulations) + 1
        assert sum(told) == plan.num_tokens * passes * len(geometry.layers)
        return found, looking


_measured: dict[Path, RunStats] = {}


def measure(folder: Path, plan: DataPlan) -> RunStats:
    """Calibrate a folder's model once; a test has one plan."""
    if folder not in _measured:
        _measured[folder] = run_calibration(folder, plan, batch_size=3)[1]
    return _measured[folder]


def require_same(whole: Scores, streamed: Scores) -> None:
    """Require the same bits everywhere."""
    assert streamed.candidates.keys() == whole.candidates.keys()
    pairs = [(whole.reference, streamed.reference)]
    pairs += [(whole.candidates[name], streamed.candidates[name]) for name in whole.candidates]
    for expected, found in pairs:
        assert torch.equal(found.logprobs, expected.logprobs)
        assert torch.equal(found.klds, expected.klds)
        assert torch.equal(found.agrees, expected.agrees)
    for name, hooks in whole.hooks.items():
        other = streamed.hooks[name]
        assert other.damage.keys() == hooks.damage.keys()
        for site, sums in hooks.damage.items():
            assert torch.equal(other.damage[site], sums), (name, site)
        assert other.weight_scales == hooks.weight_scales


DIFFERENT = {"llama", "gpt_oss", "deepseek_v3", "gemma3n_text", "qwen3_next", "opt"}


@pytest.mark.parametrize(
    "name", [*sorted(DIFFERENT), *zoo.MIXED, *in_minutes(*sorted(zoo.ZOO.keys() - DIFFERENT))]
)
def test_every_architecture_gives_the_same_scores(name: str, tmp_path: Path) -> None:
    """Rows of several lengths, padded inside batches; hidden states wait in a file."""
    zoo.save(name, tmp_path / "model")
    plan = make_plan(draw(LENGTHS, seed=9), packed=False)
    whole, seen = compare(tmp_path / "model", plan, streamed=False)
    streamed, looked = compare(tmp_path / "model", plan, streamed=True)
    require_same(whole, streamed)
    assert any(float(scores.klds.max()) > 0 for scores in whole.candidates.values())
    assert looked.found.keys() == seen.found.keys()
    for key, sums in seen.found.items():
        assert torch.equal(looked.found[key], sums)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_bfloat16_is_cast_before_experts_are_joined(name: str, tmp_path: Path) -> None:
    """In the dtype of a fast processor, and with hidden states that stay in memory."""
    zoo.save(name, tmp_path / "model")
    plan = make_plan(draw([20] * 8, seed=9))
    options = {"dtype": torch.bfloat16, "ram_bytes": 2**30}
    whole, _ = compare(tmp_path / "model", plan, streamed=False, **options)  # type: ignore[arg-type]
    streamed, _ = compare(tmp_path / "model", plan, streamed=True, **options)  # type: ignore[arg-type]
    require_same(whole, streamed)


@pytest.mark.parametrize("name", ["gemma4_text", "llama", *in_minutes("gemma3n_text")])
def test_candidates_begin_at_the_first_layer_that_they_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that changes one layer, one that changes nothing, and one that changes all."""
    plan = make_plan(draw(LENGTHS, seed=9), packed=False)
    folder = tmp_path / "model"
    zoo.save(name, folder)

    def cut(found: dict[str, Candidate]) -> dict[str, Candidate]:
        whole = found["static and kv"]
        modules = {site.module for site in whole.quantizers}
        parts = {
            str(layer): keep_modules(
                whole, frozenset(each for each in modules if _layer_of(each) == layer)
            )
            for layer in {_layer_of(each) for each in modules}
        }
        return {**parts, "nothing": Candidate(), "all": whole}

    first_run: dict[int, int] = {}
    original = LayerSteps.run_layer

    def count(self: LayerSteps, index: int, batch: Any, cache: Any, *args: Any, **more: Any) -> Any:
        changed = min((_layer_of(each.module) for each in cache._hooks._quantizers), default=0)
        first_run[changed] = min(index, first_run.get(changed, index))
        return original(self, index, batch, cache, *args, **more)

    expected, _ = compare(folder, plan, streamed=False, choose=cut)
    monkeypatch.setattr(LayerSteps, "run_layer", count)
    found, _ = compare(folder, plan, streamed=True, choose=cut)
    require_same(expected, found)
    assert float(found.candidates["nothing"].klds.max()) == 0
    assert len(first_run) > 1
    assert all(first == changed for changed, first in first_run.items())


def _layer_of(module: str) -> int:
    return int(next(part for part in module.split(".") if part.isdecimal()))
