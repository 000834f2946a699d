"""LightLLM's `kv_cache_calib.json`: every number typed by hand from the rows in `handmade`."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.errors import ModelError, UsageError
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.read import read_scales
from fp8calib.formats.write import check_export
from fp8calib.model.geometry import ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ
from tests.cli.program import fail, run, succeed
from tests.formats.handmade import (
    MEASURED,
    latent_stats,
    make_attention,
    make_geometry,
    plain_stats,
    shared_stats,
    write_scales,
)

PER_TENSOR = {
    "version": "1.0",
    "architectures": "LlamaForCausalLM",
    "quant_type": "per_tensor",
    "qmin": -448.0,
    "qmax": 448.0,
    "num_layers": 2,
    "num_head": 2,
    "scales_shape": [2, 2],
    "scales": [[0.5, 0.75], [2.0, 0.03125]],
}
HEADS = [[0.25, 0.5, 0.125, 0.75], [2.0, 0.0625, 0.03125, 0.015625]]
PER_HEAD = {**PER_TENSOR, "quant_type": "per_head", "scales_shape": [2, 4], "scales": HEADS}
QUERY = {"num_head": 2, "scales_shape": [2, 2], "scales": [[4.0, 2.0], [8.0, 1.0]]}
"""The larger of two query heads for each KV head."""
GEOMETRY = make_geometry([make_attention(0), make_attention(1)])


def ship(path: Path, document: dict[str, Any]) -> Path:
    """Write a file as LightLLM's exporter does."""
    path.write_text(json.dumps(document, indent=4))
    return path


def read(path: Path, role: Role, geometry: ModelGeometry = GEOMETRY) -> list[list[float]]:
    table = read_scales(path, geometry)
    sites = [attention.site(role) for _, attention in geometry.attentions()]
    return [table.scales[site].values.flatten().tolist() for site in sites]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lightllm", PER_TENSOR), ("lightllm-head", {**PER_HEAD, "q_calibration": QUERY})],
)
def test_what_is_written_is_what_its_exporter_writes(
    tmp_path: Path, name: str, expected: dict[str, Any]
) -> None:
    per_head = name == "lightllm-head"
    table = compute_kv_scales(plain_stats(), E4M3FN, per_head=per_head, query=True)
    write_scales(name, table, tmp_path / "f.json")
    written = json.loads((tmp_path / "f.json").read_text())
    assert written.pop("_fp8calib") == json.loads(MEASURED)
    assert written == expected
    assert list(written) == list(expected)


def test_what_its_exporter_writes_is_read(tmp_path: Path) -> None:
    whole = ship(tmp_path / "a.json", PER_TENSOR)
    assert read(whole, Role.K) == [[0.5], [2.0]]
    assert read(whole, Role.V) == [[0.75], [0.03125]]
    heads = ship(tmp_path / "b.json", {**PER_HEAD, "q_calibration": QUERY})
    assert read(heads, Role.K) == [[0.25, 0.5], [2.0, 0.0625]]
    assert read(heads, Role.V) == [[0.125, 0.75], [0.03125, 0.015625]]
    assert read(heads, Role.Q) == [[4.0, 4.0, 2.0, 2.0], [8.0, 8.0, 1.0, 1.0]]
    joint = {**PER_HEAD, "num_layers": 3, "num_target_layers": 2, "num_draft_layers": 1}
    joint |= {"scales_shape": [3, 4], "scales": [*HEADS, [9.0] * 4]}
    drafted = ship(tmp_path / "c.json", joint)
    assert read(drafted, Role.K) == [[0.25, 0.5], [2.0, 0.0625]]
    assert read_scales(drafted, GEOMETRY).notes == ("the scales of a draft (1) are left out",)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"qmax": 240.0}, "qmin and qmax"),
        ({"quant_type": "per_token"}, "neither per_head nor per_tensor"),
        ({"num_head": 4}, "the model has 2 KV heads"),
        ({"scales_shape": [2, 4]}, "scales_shape is"),
        ({"scales": [[0.5, 0.75]]}, "not a table"),
        ({"scales": [[0.5, 0.75], [2.0, True]]}, "not all are numbers"),
        ({"scales": [[0.5, 0.75], [2.0, 0.0]]}, "is not a scale"),
        ({"scales": [[0.5, 0.75], [2.0, 1e-40]]}, "too small"),
        ({"scales": [[0.5, 0.75], [2.0, 1e39]]}, "not a scale"),
        ({"scales": [[0.5, 0.75], [2.0, 10**400]]}, "too large"),
        ({"layouts": []}, "`layouts`"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        read_scales(ship(tmp_path / "f.json", {**PER_TENSOR, **change}), GEOMETRY)


def test_models_that_the_file_has_no_place_for_are_refused_before_they_run() -> None:
    uneven = make_geometry([make_attention(0), make_attention(1, num_kv_heads=4)])
    for geometry, why in (
        (shared_stats().geometry, "another layer's cache"),
        (latent_stats().geometry, "latents"),
        (uneven, "different numbers of KV heads"),
    ):
        with pytest.raises(UsageError, match=why):
            check_export(geometry, ["lightllm"], [1], E4M3FN)
    with pytest.raises(UsageError, match="no scales for e4m3fnuz"):
        check_export(GEOMETRY, ["lightllm-head"], [1], E4M3FNUZ)


FILES = ("kv_cache_calib.json", "kv_cache_calib_per_head.json")
FAULTS = (
    ({"qmax": 240.0}, "qmin or qmax"),
    ({"architectures": "Other"}, "architectures is 'Other', the model's LlamaForCausalLM"),
    ({"num_layers": 3}, "num_layers is 3, the model has 2"),
    ({"scales_shape": [1, 2]}, "scales or scales_shape"),
    ({"quant_type": "other"}, "is of no type of its cache"),
)


def test_check_says_what_lightllm_does_with_a_file_and_show_lists_it(
    tmp_path: Path, model: Path, data: Path
) -> None:
    quick = ("--samples", 4, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "out")
    formats = ("--format", "lightllm", "lightllm-head", "--query-scale", "yes")
    succeed("calibrate", model, "--data", data, *quick, *formats)
    asked = ("--model", model, "--engine", "lightllm")
    for file in FILES:
        path = tmp_path / "out" / file
        assert "2 of 2 layers served" in succeed("check", path, *asked).out
        for change, fault in FAULTS:
            changed = tmp_path / "changed.json"
            changed.write_text(json.dumps({**json.loads(path.read_text()), **change}))
            outcome = run("check", changed, *asked)
            assert outcome.code == 8
            assert fault in " ".join(outcome.out.split())
    document = json.loads(path.read_text())
    tables = (("scales", document), ("q_calibration.scales", document["q_calibration"]))
    assert run("show", path, "--json").json["scales"] == {
        f"{name}.{layer}.{head}": [value]
        for name, table in tables
        for layer, row in enumerate(table["scales"])
        for head, value in enumerate(row)
    }
    for number, fault in (
        (0.0, "0 is not a scale"),
        (float("nan"), "nan is not"),
        (10**400, "not [2, 4]"),
    ):
        document["scales"][1][1] = number  # of the second head of k
        changed.write_text(json.dumps(document))
        outcome = run("check", changed, *asked)
        assert (outcome.code, fault in " ".join(outcome.out.split())) == (8, True)
    document = json.loads(path.read_text())
    changed.write_text(json.dumps({**document, "scales_shape": [2.0, 4.0]}))
    succeed("check", changed, *asked)
    changed.write_text(json.dumps({**document, "q_calibration": "none"}))
    assert "q_calibration is no object" in fail(4, "verify", model, "--scales", changed)
    assert len(document.pop("q_calibration")["scales"][0]) == document["num_head"]
    path.write_text(json.dumps(document))
    assert "later commits need q_calibration" in succeed("check", path, *asked).out
    path.write_text('{"kv_cache": {}}')
    assert "KeyError: quant_type" in run("check", path, *asked).out
    outcome = run("check", model, "--engine", "lightllm")
    assert outcome.code == 2
    assert "from a file alone" in outcome.err
