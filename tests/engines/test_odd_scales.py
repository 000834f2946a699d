"""Scales that are far from what K, V and weights hold: named, and judged where there are stats."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fp8calib
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.scale_mistakes import find_common_factor, find_mixup
from fp8calib.engines.weight_estimates import estimate_reaches
from fp8calib.errors import ModelError
from fp8calib.model.geometry import Role
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.kit.checkpoints import change_quantization, change_tensors

NORM = "model.layers.{}.input_layernorm.weight"
PROJECTION = "model.layers.{}.self_attn.{}_proj.weight"
NUM_LAYERS = 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SCHEME["symmetric"] = True


def change(folder: Path, edit: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Change each tensor of a model of one file."""
    change_tensors(folder, lambda all_: {n: edit(n, x).contiguous() for n, x in all_.items()})


def shake(name: str, x: torch.Tensor) -> torch.Tensor:
    """Give norms and biases values that matter."""
    if name.endswith(".bias"):
        return torch.randn_like(x) * 20
    return x + torch.randn_like(x) / 20 if x.ndim == 1 else x


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "llama"
    torch.manual_seed(0)
    zoo.save("llama", folder)
    change(folder, shake)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("odd") / "rows.jsonl"
    lines = [json.dumps({"input_ids": torch.randint(3, 60, (24,)).tolist()}) for _ in range(4)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def stats(llama: Path, rows: Path) -> fp8calib.CalibrationStats:
    return measure(llama, rows)


def measure(model: Path, rows: Path) -> fp8calib.CalibrationStats:
    return fp8calib.calibrate(model, rows, seq_len=24, samples=4, dtype="float32").stats


def largest_kv(model: Path, rows: Path) -> Mapping[tuple[int, str], float]:
    """Find the largest K and V with the model's own cache."""
    ids = torch.tensor([json.loads(line)["input_ids"] for line in rows.read_text().splitlines()])
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        cache = loaded(ids, use_cache=True).past_key_values
    return {
        (index, role): x.abs().max().item()
        for index, layer in enumerate(cache.layers)
        for role, x in (("k", layer.keys), ("v", layer.values))
    }


def write_overlay(model: Path, out: Path, scales: Mapping[tuple[int, str], float]) -> Path:
    """Copy a model and add scales as compressed-tensors stores them."""
    stored = {
        f"model.layers.{layer}.self_attn.{role}_scale": torch.tensor([scale])
        for (layer, role), scale in scales.items()
    }
    folder = change_tensors(Path(shutil.copytree(model, out)), stored)
    return change_quantization(
        folder,
        quant_method="compressed-tensors",
        format="dense",
        kv_cache_scheme=SCHEME,
        config_groups={},
        ignore=[],
    )


def test_reciprocals_are_not_called_swapped() -> None:
    """Where K times V is the same in all layers, reciprocals are swapped scales times a number."""
    amax = {(i, r): 2.0**i if r is Role.K else 2.0**-i for i in range(4) for r in (Role.K, Role.V)}
    swapped = {(i, r): amax[i, Role.V if r is Role.K else Role.K] / 448 for i, r in amax}
    assert find_mixup(swapped, amax) == dict.fromkeys(swapped, "the k and v scales are swapped")
    assert find_mixup({slot: 448 / each for slot, each in amax.items()}, amax) == {}


def test_scales_in_another_order_are_named_whatever_the_order_is() -> None:
    amax = {(i, r): 8 + 3.0 * i + (r is Role.V) * 50 for i in range(6) for r in (Role.K, Role.V)}
    right = {slot: each / 448 for slot, each in amax.items()}
    assert find_mixup(right, amax) == {}
    orders = ((1, 0, 3, 2, 5, 4), (5, 4, 3, 2, 1, 0), (0, 2, 1, 3, 4, 5))
    for order in orders:
        moved = {(i, r): right[order[i], r] if r is Role.K else right[i, r] for i, r in amax}
        found = find_mixup({slot: 1.7 * each for slot, each in moved.items()}, amax)
        wrong = [i for i in range(6) if order[i] != i]
        what = f"layer {wrong[0]} has that of layer {order[wrong[0]]}"
        text = f"the k scales are in another order: {what}"
        assert found == {(i, Role.K): text for i in wrong}
    rng = Random(1)  # noqa: S311 -- scales of another text: they differ, but are of their places
    other = {slot: each * rng.uniform(0.8, 1.25) for slot, each in right.items()}
    assert find_mixup(other, amax) == {}


@pytest.mark.parametrize(
    ("factor", "is_found"), [(2.5, True), (3, True), (1.2, False), (0.5, False)]
)
def test_a_factor_that_all_scales_share_is_named(factor: float, is_found: bool) -> None:
    amax = {(i, r): 8 + 3.0 * i for i in range(3) for r in (Role.K, Role.V)}
    scales = {slot: each / 448 / factor for slot, each in amax.items()}
    found = find_common_factor(scales, amax)
    assert set(found) == (set(amax) if is_found else set())
    assert all(f"are {factor:g} times smaller than amax / 448" in each for each in found.values())
    scales[0, Role.K] *= 1.05  # one of another text
    assert find_common_factor(scales, amax) == {}


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "gemma2", "starcoder2", "cohere", "stablelm", "nemotron", "gemma", "phi"],
)
def test_what_a_model_reaches_is_within_the_estimate(
    family: str, rows: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    zoo.save(family, tmp_path / family)
    change(tmp_path / family, shake)
    folder = open_folder(tmp_path / family)

    reaches = estimate_reaches(folder, read_geometry(folder.path, folder.config))

    found = largest_kv(tmp_path / family, rows)
    assert {(layer, role.value) for layer, role in reaches} == found.keys()
    for (layer, role), each in reaches.items():
        assert each.least < found[layer, role.value] / 8
        assert found[layer, role.value] < each.most / 8


def test_no_input_exceeds_the_bound(llama: Path) -> None:
    folder = open_folder(llama)
    reaches = estimate_reaches(folder, read_geometry(folder.path, folder.config))
    tensors = {name: x.double() for name, x in load_file(llama / "model.safetensors").items()}

    for layer in range(NUM_LAYERS):
        made = tensors[PROJECTION.format(layer, "v")] * tensors[NORM.format(layer)]
        # The input that lets a channel reach most has the direction of its weights.
        worst = made / made.pow(2).mean(dim=1, keepdim=True).sqrt()
        reached = (worst @ made.T).abs().max().item()
        assert reaches[layer, Role.V].most == pytest.approx(8 * 2**0.5 * reached)


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block", "w8a16"])
def test_fp8_weights_give_the_estimate_of_the_weights_they_were_made_of(
    llama: Path, scheme: str, tmp_path: Path
) -> None:
    out = tmp_path / scheme
    fp8calib.quantize(str(llama), scheme, out, allow_unservable=True)

    first, second = (
        estimate_reaches(folder, read_geometry(folder.path, folder.config))
        for folder in map(open_folder, (llama, out))
    )

    assert len(first) == 2 * NUM_LAYERS
    assert second.keys() == first.keys()
    for slot, each in second.items():
        assert each.most == pytest.approx(first[slot].most, rel=0.05)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "gemma3n_text", "phi3"])
def test_k_that_a_norm_limits_is_not_estimated(family: str, tmp_path: Path) -> None:
    zoo.save(family, tmp_path / family)
    folder = open_folder(tmp_path / family)

    reaches = estimate_reaches(folder, read_geometry(folder.path, folder.config))

    assert not any(role is Role.K for _, role in reaches)
    assert bool(reaches) == (family in {"qwen3", "gemma3_text"})


def test_statistics_of_another_model_are_refused(
    llama: Path, stats: fp8calib.CalibrationStats, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "larger", num_hidden_layers=3)
    zoo.save("llama", tmp_path / "other", seed=1)

    for name, text in (("larger", "2 layers with attention"), ("other", "different weights")):
        with pytest.raises(ModelError, match=text):
            fp8calib.check(tmp_path / name, stats=stats)
    assert fp8calib.check(llama, stats=stats).ok


@pytest.mark.parametrize(
    ("suffix", "amax_role"), [("weight_scale", "weight"), ("input_scale", "input")]
)
def test_reciprocal_scales_of_fp8_weights(
    llama: Path, stats: fp8calib.CalibrationStats, tmp_path: Path, suffix: str, amax_role: str
) -> None:
    fp8calib.quantize(llama, "fp8-static", tmp_path / "q", stats=stats)
    assert fp8calib.check(tmp_path / "q", engine="vllm", stats=stats).ok

    for factor, is_ok in ((1.02, True), (1000, False)) if amax_role == "input" else ():
        folder = Path(shutil.copytree(tmp_path / "q", tmp_path / str(factor)))
        change(folder, lambda name, x, by=factor: x / by if name.endswith(suffix) else x)
        assert fp8calib.check(folder, engine="vllm", stats=stats).ok == is_ok
    change(tmp_path / "q", lambda name, x: 1 / x if name.endswith(suffix) else x)

    verdict = fp8calib.check(tmp_path / "q", engine="vllm", stats=stats).engines["vllm"].weights
    assert verdict is not None
    assert verdict.status == "bad"
    assert f".{suffix} (" in verdict.why
    assert "looks like a reciprocal" in verdict.why
    report = fp8calib.check(tmp_path / "q", engine="vllm")
    suspicious = report.engines["vllm"].suspicious
    [text] = [each for each in suspicious if each.startswith("weights: ")]
    assert f"their {amax_role} scales stand for {amax_role}s of up to" in text
    assert "look like reciprocals" in text
    assert not report.ok


def _turn(scale: torch.Tensor) -> torch.Tensor:
    return scale.roll(1, 0)


def _double_one(scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([scale[:1] * 2, scale[1:]])


PLACES = {
    "rows in another order": ("fp8-dynamic", _turn, "rows have those of other rows"),
    "one row": ("fp8-dynamic", _double_one, "those of 1 of 32 rows are 2 times off"),
    "blocks in another order": ("fp8-block", _turn, "blocks have those of other blocks"),
    "one block": ("fp8-block", lambda x: _double_one(x) / 4, "of 2 blocks are 4 times off"),
    "a number": ("fp8-static", lambda x: x * 2, "it is 2 times too large for its largest value"),
    "a smaller one": ("fp8-static", lambda x: x / 3, "it is 3 times too small for its"),
}
"""The scheme, what is done to the scales of one linear, and what statistics tell."""


@pytest.mark.parametrize("what", PLACES)
def test_scales_of_a_right_form_that_are_not_those_of_the_weight(
    rows: Path, tmp_path: Path, what: str
) -> None:
    """Codes alone do not tell: whatever the scales, they are those of some model."""
    scheme, edit, text = PLACES[what]
    sizes = {"hidden_size": 256, "intermediate_size": 256} if scheme == "fp8-block" else {}
    zoo.save("llama", tmp_path / "m", **sizes)
    change(  # the blocks of a random weight are alike
        tmp_path / "m",
        lambda name, x: x * torch.linspace(1, 3, len(x))[:, None] if "down_proj" in name else x,
    )
    stats = measure(tmp_path / "m", rows)
    fp8calib.quantize(tmp_path / "m", scheme, tmp_path / "q", stats=stats)
    assert fp8calib.check(tmp_path / "q", engine="vllm", stats=stats).ok

    odd = "model.layers.1.mlp.down_proj.weight_scale"
    change(tmp_path / "q", lambda name, x: edit(x) if name.startswith(odd) else x)

    verdict = fp8calib.check(tmp_path / "q", engine="vllm", stats=stats).engines["vllm"].weights
    assert verdict is not None
    assert verdict.why.startswith("the scales of model.layers.1.mlp.down_proj.weight: ")
    assert text in verdict.why
    assert fp8calib.check(tmp_path / "q", engine="vllm").engines["vllm"].weights is None


def test_scales_of_another_rule_are_not_judged_by_their_places(
    llama: Path, stats: fp8calib.CalibrationStats, tmp_path: Path
) -> None:
    """Methods that change weights give scales that no row of the model has."""
    fp8calib.quantize(llama, "fp8-dynamic", tmp_path / "q", stats=stats)
    change(tmp_path / "q", lambda name, x: x * 2 if name.endswith("down_proj.weight_scale") else x)
    assert fp8calib.check(tmp_path / "q", engine="vllm", stats=stats).ok


def test_export_looks_at_the_input_scales_beside_the_scales_it_replaces(
    llama: Path, stats: fp8calib.CalibrationStats, tmp_path: Path
) -> None:
    fp8calib.quantize(llama, "fp8-static", tmp_path / "q", stats=stats)
    odd = "model.layers.1.mlp.down_proj.input_scale"
    written = {}
    for name in ("right", "wrong"):
        if name == "wrong":
            change(tmp_path / "q", lambda name, x: 1 / x if name == odd else x)
        found = fp8calib.export(
            stats, tmp_path / name, formats="kv-overlay", model=tmp_path / "q", replace_scales=True
        )
        written[name] = found.checked[0]
    assert written["right"].verdict == "ok"
    assert written["wrong"].verdict == "not ok"
    assert "looks like a reciprocal" in written["wrong"].summary


def test_statistics_of_a_model_of_the_same_shapes_do_not_judge_scales(
    llama: Path, rows: Path, stats: fp8calib.CalibrationStats, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m", seed=1)
    fp8calib.export(stats, tmp_path / "x", formats="kv-overlay", model=llama)
    with pytest.raises(ModelError, match="scales are of another model: different weights"):
        fp8calib.check(tmp_path / "x/kv-overlay", stats=measure(tmp_path / "m", rows))
