"""Files for LightLLM: written by `calibrate`, and what `check` says of them."""

import json
from pathlib import Path

from tests.cli.program import fail, run, succeed

FILES = ("kv_cache_calib.json", "kv_cache_calib_per_head.json")
FAULTS = (
    ({"qmax": 240.0}, "qmin or qmax"),
    ({"architectures": "Other"}, "architectures is 'Other', the model's LlamaForCausalLM"),
    ({"num_layers": 3}, "num_layers is 3, the model has 2"),
    ({"scales_shape": [1, 2]}, "scales or scales_shape"),
    ({"quant_type": "other"}, "is of no type of its cache"),
)


def test_check_says_what_lightllm_does_with_a_file(tmp_path: Path, model: Path, data: Path) -> None:
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


def test_show_lists_the_scales_and_not_the_header(tmp_path: Path, model: Path, data: Path) -> None:
    quick = ("--samples", 4, "--seq-len", 16, "--dtype", "float32", "--out", tmp_path / "out")
    formats = ("--format", "lightllm-head", "--query-scale", "yes")
    succeed("calibrate", model, "--data", data, *quick, *formats)
    path = tmp_path / "out" / "kv_cache_calib_per_head.json"
    document = json.loads(path.read_text())
    tables = (("scales", document), ("q_calibration.scales", document["q_calibration"]))
    assert run("show", path, "--json").json["scales"] == {
        f"{name}.{layer}.{head}": [value]
        for name, table in tables
        for layer, row in enumerate(table["scales"])
        for head, value in enumerate(row)
    }
