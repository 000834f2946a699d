"""What is drawn, and how a case is made simpler."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.real_engines.fuzz.architectures import ARCHITECTURES, SIMPLEST, save_model
from tests.real_engines.fuzz.damage import Damage
from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.draw import DAMAGES, MOST_ATTEMPTS, Case, draw, parse_case, shrink
from tests.real_engines.fuzz.evaluate import Evaluator
from tests.real_engines.fuzz.forms import FORMS
from tests.real_engines.fuzz.observation import dequantize, describe_difference
from tests.real_engines.fuzz.weight_damages import WEIGHT_DAMAGES
from tests.real_engines.fuzz.workers import evaluate_all


@pytest.mark.parametrize("seed", range(5))
def test_three_hundred_cases_have_every_form_damage_and_architecture(seed: int) -> None:
    cases = draw(300, seed)
    assert {case.form for case in cases} == set(FORMS)
    assert {name for case in cases for name in case.damages} == set(DAMAGES)
    assert {case.architecture for case in cases} == set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 40
    for case in cases:
        assert all(DAMAGES[name].fits(FORMS[case.form]) for name in case.damages)
    assert 40 <= sum(not case.damages for case in cases) <= 100


def test_a_seed_repeats_its_cases() -> None:
    assert draw(50, 3) == draw(80, 3)[:50]
    assert draw(50, 3) != draw(50, 4)


def test_a_case_is_read_from_its_own_text() -> None:
    for case in draw(60, 0):
        assert parse_case(str(case)) == case


TWO = Case(
    seed="1:2",
    form="fp8",
    damages=("kv-one-zero", "kv-only-k"),
    architecture="phi3",
    dtype="float16",
)


def test_what_changes_nothing_is_left_out() -> None:
    found = shrink(TWO, lambda case: "kv-only-k" in case.damages)
    assert str(found) == f"1:2 fp8 kv-only-k {SIMPLEST} bfloat16 1"


def test_what_is_needed_stays() -> None:
    assert shrink(TWO, lambda case: case == TWO) == TWO
    found = shrink(TWO, lambda case: case.architecture == "phi3" and len(case.damages) == 1)
    assert str(found) == "1:2 fp8 kv-only-k phi3 bfloat16 0"


def test_attempts_to_simplify_are_limited() -> None:
    asked: list[Case] = []
    many = replace(TWO, damages=tuple(list(DAMAGES)[:MOST_ATTEMPTS]))
    shrink(many, lambda case: bool(asked.append(case)))
    assert len(asked) == MOST_ATTEMPTS


def test_what_cannot_be_written_is_made_of_the_simplest_model_as_well(tmp_path: Path) -> None:
    """Cohere2 shares its head's weights with the embedding."""
    case = parse_case("1:1 modelopt/fp8-static w-lm_head cohere2 bfloat16 0")
    first, second = evaluate_all(Evaluator(tmp_path, {}), [case])
    assert first.result.unwritten == "UnfitError: there is no lm_head"
    assert second.result.case == replace(case, architecture=SIMPLEST)
    assert not second.result.unwritten


@pytest.mark.parametrize(
    "damages",
    [
        "w-no-groups+w-inputs-null",
        "w-ignore-null+w-excluded",
        "kv-shape-empty+kv-shape-1x1",
        "kv-dtype-int32+kv-one-nan",
    ],
)
def test_a_second_damage_may_find_nothing_to_change(tmp_path: Path, damages: str) -> None:
    name = f"1:1 compressed-tensors/fp8-dynamic+kv {damages} llama bfloat16 0"
    result = Evaluator(tmp_path, {})(parse_case(name))
    first, second = damages.split("+")
    assert result.unwritten == f"UnfitError: {second} cannot be done after {first}"


def test_scales_of_any_dtype_are_stored_in_another(tmp_path: Path) -> None:
    name = "1:1 fp8 kv-dtype-float8_e4m3fn+kv-dtype-float64 llama bfloat16 0"
    assert not Evaluator(tmp_path, {})(parse_case(name)).unwritten


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    """Make a llama in every form."""
    return make_forms(SIMPLEST, tmp_path_factory.mktemp("fuzz"), list(FORMS))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    """Make a model that stores each expert by itself."""
    return make_forms("qwen3_moe", tmp_path_factory.mktemp("fuzz"), ["kv-overlay"])


def make_forms(architecture: str, folder: Path, forms: list[str]) -> dict[str, Draft]:
    save_model(architecture, folder / "model", "bfloat16")
    return {
        name: FORMS[name].write(folder / "model", folder / f"out{number}", Random(0))  # noqa: S311
        for number, name in enumerate(forms)
    }


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_changes_a_form_that_it_fits(
    plain: dict[str, Draft], with_experts: dict[str, Draft], name: str
) -> None:
    """Some forms have the shape or the key already; a form that lacks what it needs says so."""
    drafts = with_experts if DAMAGES[name].architectures else plain
    fitting = [draft for form, draft in drafts.items() if DAMAGES[name].fits(FORMS[form])]
    assert any(has_effect(DAMAGES[name], draft) for draft in fitting)


def test_weights_in_16_bits_are_those_before_an_earlier_damage(plain: dict[str, Draft]) -> None:
    restored = []
    for first in ("w-scale-zero", "w-named-scale"):
        draft = copy.copy(plain["modelopt/fp8-static+kv"])
        draft.shards = {file: dict(tensors) for file, tensors in draft.shards.items()}
        for name in (first, "w-all-16-bit"):
            DAMAGES[name].change(draft)
        restored.append({name: draft[name] for name in draft if name.endswith("proj.weight")})
    assert restored[0]
    assert is_same(*restored)
    assert all(tensor.count_nonzero() for tensor in restored[0].values())


@pytest.fixture(scope="module")
def decoded(plain: dict[str, Draft]) -> dict[str, dict[str, torch.Tensor]]:
    """Give the matrices of each form without damage."""
    return {form: decode(draft.undamaged) for form, draft in plain.items()}


@pytest.mark.parametrize("name", [damage.name for damage in WEIGHT_DAMAGES])
def test_a_file_that_can_be_decoded_means_the_weights_of_the_model(
    plain: dict[str, Draft], decoded: Mapping[str, dict[str, torch.Tensor]], name: str
) -> None:
    """What an engine computes is compared with the model, whatever the damage."""
    for form in (form for form in FORMS if DAMAGES[name].fits(FORMS[form])):
        draft = change(DAMAGES[name], plain[form])
        meant, found = decoded[form], decode({n: draft[n] for n in draft})
        whole = {
            n: matrix
            for n, matrix in meant.items()
            if n in found and found[n].shape == matrix.shape
        }
        assert whole
        assert not describe_difference(found, whole), form


def decode(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply floats of 8 bits by their scales; leave out what has no scales that are valid."""
    found = {}
    for name, matrix in dequantize(tensors).items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        is_coded = tensors[name].element_size() == 1
        is_valid = scale is not None and is_scale_tensor(scale)
        is_scaled = not torch.equal(matrix.float(), tensors[name].float())
        if name.endswith(".weight") and (not is_coded or (is_valid and is_scaled)):
            found[name] = matrix
    return found


def is_scale_tensor(scale: torch.Tensor) -> bool:
    """Tell whether all values can be scales: positive numbers, or exponents but that of NaN."""
    if scale.element_size() == 1:
        return scale.dtype is torch.uint8 and bool((scale != 255).all())
    return bool(((scale > 0) & scale.isfinite()).all())


def has_effect(damage: Damage, plain: Draft) -> bool:
    try:
        draft = change(damage, plain)
    except UnfitError:
        return False
    return not is_same(snapshot(draft), snapshot(plain))


def change(damage: Damage, plain: Draft) -> Draft:
    """Damage a copy.

    Raises:
        UnfitError: there is nothing to damage.
    """
    draft = copy.copy(plain)
    draft.shards = {file: dict(tensors) for file, tensors in plain.shards.items()}
    draft.config = copy.deepcopy(plain.config)
    draft.own_file = copy.deepcopy(plain.own_file)
    draft.written_last = dict(plain.written_last)
    damage.change(draft)
    return draft


def snapshot(draft: Draft) -> dict[str, object]:
    return {
        **{name: draft[name] for name in draft},
        "json": (copy.deepcopy(draft.config), copy.deepcopy(draft.own_file)),
        "files": (draft.is_indexed, set(draft.unlisted), dict(draft.missing_files)),
        "last": set(draft.written_last),
        "metadata": dict(draft.metadata),
    }


def is_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(to_bytes(one[k]) == to_bytes(other[k]) for k in one)


def to_bytes(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value.dtype, value.shape, raw
