"""Input and KV scales of FP8 checkpoints, against inputs captured by brute force."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ExportError
from fp8calib.formats.fp8.registry import list_written_fp8
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import Layer, Linear, ModelGeometry, Part, Role, Site
from fp8calib.model.weight_source import LinearWeight
from fp8calib.numerics.formats import E4M3FN
from fp8calib.quantization.calibrated_scales import (
    find_input_scales,
    find_kv_scales,
    list_unmeasured,
)
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.rank_weights import adopt_scales
from fp8calib.quantization.select import find_selection
from tests.doors import make_plan, run_calibration
from tests.quantization.stacked import STACKED
from tests.truth import brute_force
from tests.truth.test_ranks import calibrated
from tests.zoo import draw

EXPERT = re.compile(r"(.*layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)")
DOWN = {"w2", "down_proj"}


def pick(folder: Path, *ignore: str) -> tuple[Matrix, ...]:
    with Checkpoint.open(folder) as checkpoint:
        return find_selection(checkpoint, ignore=ignore).require().quantized


def amax(*tensors: np.ndarray) -> float:
    return max(float(np.abs(tensor).max()) for tensor in tensors)


@pytest.mark.parametrize(
    "family",
    ["llama", "phi3", "opt", "gpt_neox", "falcon", "mixtral", "qwen3_moe", "deepseek_v3"],
)
def test_every_linear_has_the_amax_of_its_input(family: str, tmp_path: Path) -> None:
    """Experts are stacked under other names in memory; their scale is one for all."""
    model, stats, truth = calibrated(family, tmp_path / "model")
    modules = dict(model.named_modules())
    scales = find_input_scales(stats, pick(tmp_path / "model"))[0]
    assert scales.keys() == {matrix.module for matrix in pick(tmp_path / "model")}
    for name, value in scales.items():
        seen = truth.inputs.get(name)
        if (match := EXPERT.fullmatch(name)) is not None:
            path = f"{match.group(1)}.mlp.experts"
            inputs = brute_force.run_experts(modules[path], truth.routed[path])
            seen = list((inputs.down if match.group(3) in DOWN else inputs.first).values())
        assert float(value) == pytest.approx(amax(*seen) / 448, rel=1e-5), name


def test_a_linear_that_was_not_observed_is_an_error(tmp_path: Path) -> None:
    """Extra prediction layers, for example, are not part of the live model."""
    _, stats, _ = calibrated("llama", tmp_path / "model")
    taken = [
        *pick(tmp_path / "model"),
        *(Matrix(module=m, shape=(4, 4), dtype="F32") for m in ("mtp.fc", "mtp.up", "model.side")),
    ]
    assert list_unmeasured(stats, taken) == ["mtp", "model.side"]
    with pytest.raises(ExportError, match=r"no input of mtp\.fc") as raised:
        find_input_scales(stats, taken)
    assert "add --ignore mtp --ignore model.side, which" in raised.value.hint


def test_experts_that_cannot_be_measured_are_named_with_what_to_use_instead(
    tmp_path: Path,
) -> None:
    """Llama 4's multiply by their weights themselves; one option leaves out those of all layers."""
    family = STACKED["llama4_text"]
    family.save(family.build("llama4_text"), tmp_path)
    _, stats = run_calibration(tmp_path, make_plan(draw([20, 20])))
    with pytest.raises(ExportError, match=r"no input of .*experts\.0\.") as raised:
        find_input_scales(stats, pick(tmp_path))
    assert "or use --scheme fp8-dynamic or w8a16" in raised.value.hint
    (option,) = re.findall(r"--ignore '(.*?)'", raised.value.hint)
    rest = pick(tmp_path, option)
    assert not any(".experts." in matrix.module for matrix in rest)
    assert any(".shared_expert." in matrix.module for matrix in rest)
    assert len(find_input_scales(stats, rest)[0]) == len(rest)


def test_stacks_that_have_another_path_in_memory_get_the_scales_of_their_inputs(
    tmp_path: Path,
) -> None:
    """Aria's text is under `language_model.model` on disk, and `model.language_model` in memory."""
    family = STACKED["aria"]
    model = family.build("aria")
    family.save(model, tmp_path)
    _, stats = run_calibration(tmp_path, make_plan(draw([20, 20])))
    quantized = [each for each in pick(tmp_path) if ".mlp.experts." in each.module]
    scales = find_input_scales(stats, quantized)[0]
    assert quantized
    for matrix in quantized:
        path = f"{matrix.layer.replace('language_model.model', 'model.language_model')}.mlp.experts"
        site = Site(f"{path}.{matrix.module.rpartition('.')[2]}", Role.INPUT)
        observed = float(stats.sites[site].amax.max())
        assert float(scales[matrix.module]) == pytest.approx(observed / 448, rel=1e-6)


def test_scales_of_k_and_v_are_those_of_the_cache(tmp_path: Path) -> None:
    _, stats, truth = calibrated("llama", tmp_path / "model")
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        for form in list_written_fp8():
            kv = find_kv_scales(stats, checkpoint, form)[0]
            assert len(kv) == 4
            for layer, pairs in truth.kv.items():
                for place, role in enumerate("kv"):
                    module = f"model.layers.{layer}.self_attn"
                    inner = f".{role}_proj" if form.name == "modelopt" else ""
                    found = kv[f"{module}{inner}.{role}_scale"].item()
                    expected = amax(*(pair[place] for pair in pairs)) / 448
                    assert found == pytest.approx(expected, rel=1e-6)


def test_inputs_of_dead_linears_get_a_usable_scale(tmp_path: Path) -> None:
    _, stats, _ = calibrated("llama", tmp_path / "model")
    site = Site("model.layers.0.mlp.down_proj", Role.INPUT)
    dead = replace(stats.sites[site], amax=stats.sites[site].amax * 0)
    stats = replace(stats, sites={**stats.sites, site: dead})
    found, notes = find_input_scales(stats, pick(tmp_path / "model"))
    layer = [
        value.item()
        for name, value in found.items()
        if "layers.0" in name and "down_proj" not in name
    ]
    assert found[site.module].item() == max(layer)
    assert any(note.startswith(f"{site}: ") for note in notes)


# --- compound scales -----------------------------------------------------------------------------


GATE, UP = (
    Part(name=n, count=2, unit=1, first=f, per_group=2) for n, f in (("gate", 0), ("up", 2))
)
FUSED = Linear(
    module="m.0.mlp.gate_up",
    section="mlp",
    root="m.0.mlp",
    in_features=3,
    out_features=4,
    shard="column",
    parts=(GATE, UP),
    weight_name="m.0.mlp.gate_up.weight",
)
SITES = {name: Site(f"m.0.mlp.{name}", Role.WEIGHT) for name in ("gate", "up")}


def make_table(tp: int = 1) -> ScaleTable:
    """Make a table whose scales are all 9."""
    layer = Layer(index=0, module="m.0", mixer="", attention=None, linears=(FUSED,))
    geometry = ModelGeometry(architecture="", model_type="", checkpoint_dtype="", layers=(layer,))
    scale = Scale(values=torch.full((tp,), 9.0), source="all-zero", is_substitute=True)
    scales = dict.fromkeys(SITES.values(), scale)
    return ScaleTable(geometry=geometry, fmt=E4M3FN, tp=tp, per_head=False, scales=scales)


def one(values: torch.Tensor) -> Iterator[LinearWeight]:
    yield FUSED, None, values


def test_weights_that_cannot_be_joined_are_refused() -> None:
    """A part of two int4 scales, and what is not finite."""
    spread = torch.tensor([0.5, 0.5, 0.25, 0.125]).unsqueeze(1).expand(4, 3)
    two = r"m\.0\.mlp\.up\.weight is joined from weights with several int4 scales.*0.125 to 0.25"
    with pytest.raises(ExportError, match=two):
        adopt_scales(make_table(), one(torch.ones(4, 3)), one(spread))
    for value in (float("nan"), float("inf")):
        values = torch.full((4, 3), value)
        with pytest.raises(ExportError, match=r"mlp\.gate\.weight contains NaN or infinity"):
            adopt_scales(make_table(), one(values), one(torch.zeros(4, 3)))


def test_what_is_not_quantized_is_measured_rank_by_rank() -> None:
    """Zeros on one rank keep the scale of the table there; all zeros are dead, as they were."""
    weight = torch.zeros(4, 3)
    weight[0, 1] = -224.0
    found = adopt_scales(make_table(tp=2), one(weight), one(torch.zeros(4, 3))).scales
    gate, up = found[SITES["gate"]], found[SITES["up"]]
    assert gate.values.tolist() == [0.5, 9.0]
    assert (gate.source, gate.is_substitute) == ("all-zero", False)
    assert up.values.tolist() == [9.0, 9.0]
    assert (up.source, up.is_substitute) == ("all-zero", True)
