"""Further families: each is calibrated truly, or refused in a message that names the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fp8calib.errors import ModelError
from tests import zoo
from tests.architectures import families
from tests.cli.conftest import write_rows
from tests.cli.program import fail
from tests.doors import Role, Site, make_plan, run_calibration
from tests.truth import brute_force
from tests.zoo import draw

BYPASS_THE_REGISTRY = {"bloom", "gptj", "mpt", "xglm"}
KEEP_EXPERTS_TO_THEMSELVES = {"llama4_text"}


def layers_of(prepared: Any) -> str:
    return prepared.geometry.layers[0].module.rpartition(".")[0]


def check_kv(prepared: Any, stats: Any, truth: brute_force.Capture) -> None:
    own = {
        layer.index: found for layer, found in prepared.geometry.attentions() if not found.producer
    }
    assert set(own) == set(truth.kv)
    for index, attention in own.items():
        keys, values = zip(*truth.kv[index], strict=True)
        sizes = keys[0].shape[1], keys[0].shape[3], values[0].shape[3]
        expected_sizes = attention.num_kv_heads, attention.k_head_dim, attention.v_head_dim
        assert sizes == expected_sizes
        for role, tensors in ((Role.K, keys), (Role.V, values)):
            expected = brute_force.head_amax(list(tensors), attention.num_kv_heads)
            found = stats.sites[attention.site(role)].amax.numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def check_queries(prepared: Any, stats: Any, truth: brute_force.Capture) -> None:
    for place, (_, attention) in enumerate(prepared.geometry.attentions()):
        expected = brute_force.head_amax([q[place] for q in truth.queries], attention.num_heads)
        found = stats.sites[attention.site(Role.Q)].amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def check_inputs(prepared: Any, stats: Any, truth: brute_force.Capture) -> None:
    linears = {name for name in truth.inputs if name.startswith(f"{layers_of(prepared)}.")}
    observed = {
        site.module
        for site, seen in stats.sites.items()
        if site.role is Role.INPUT and seen.expert_counts is None
    }
    assert observed == linears
    for name in linears:
        expected = brute_force.channel_amax(truth.inputs[name])
        found = stats.sites[Site(name, Role.INPUT)].amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@dataclass
class Case:
    """A calibrated family, row by row, and what its plain forward showed."""

    family: str
    folder: Path
    rows: list[torch.Tensor]
    prepared: Any
    stats: Any
    truth: brute_force.Capture


@pytest.fixture(scope="module", params=sorted(families.FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("families") / "model"
    model = zoo.save(request.param, folder)
    rows = draw([7, 20, 13, 3, 20, 9, 20, 4, 11, 6], seed=9)
    prepared, stats = run_calibration(folder, make_plan(rows, packed=False))
    return Case(request.param, folder, rows, prepared, stats, brute_force.run(model, rows))


def test_a_further_family_is_calibrated_as_a_plain_forward_shows_it(case: Case) -> None:
    """K, V, q and the inputs of every linear equal those of the whole model's own forward."""
    check_kv(case.prepared, case.stats, case.truth)
    check_inputs(case.prepared, case.stats, case.truth)
    skipped = {item.site for item in case.stats.header.skipped}
    if case.family in BYPASS_THE_REGISTRY:
        assert {str(a.site(Role.Q)) for _, a in case.prepared.geometry.attentions()} <= skipped
    else:
        check_queries(case.prepared, case.stats, case.truth)
    for path in case.truth.routed:
        is_skipped = f"{path}.weight" in skipped
        assert is_skipped == (case.family in KEEP_EXPERTS_TO_THEMSELVES)
        assert is_skipped == (Site(f"{path}.down_proj", Role.INPUT) not in case.stats.sites)


def test_padding_makes_no_difference_in_a_further_family(case: Case) -> None:
    """Rows padded to one batch give what they give alone."""
    plan = make_plan(case.rows, packed=False)
    _, padded = run_calibration(case.folder, plan, batch_size=3)
    assert case.stats.sites.keys() == padded.sites.keys()
    for site, expected in case.stats.sites.items():
        found = padded.sites[site]
        assert found.count == expected.count, site
        torch.testing.assert_close(found.amax, expected.amax, rtol=1e-5, atol=1e-5, msg=str(site))


@pytest.mark.parametrize("family", sorted(families.REFUSED))
def test_a_family_that_is_not_understood_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """The message names the class or family, and what was looked for."""
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        run_calibration(tmp_path / "model", make_plan(draw([20])))


@pytest.mark.parametrize("family", ["longcat_flash", "minimax"])
def test_what_is_not_understood_is_refused_before_loading(family: str, tmp_path: Path) -> None:
    changes, message = families.REFUSED[family]
    families.save(family, changes, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": draw([20])[0].tolist()}])
    with patch("fp8calib.calibration.run_model.load_model") as load:
        said = fail(4, "calibrate", tmp_path / "model", "--data", data, "--out", tmp_path / "out")
    assert not load.called
    assert re.search(message, said)
