"""`fp8calib check`: its contract, our own exports by docs/formats.md, and models of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.dialects.kv.overlay import make_quantization_config
from tests import zoo
from tests.architectures import families
from tests.cli.program import Outcome, fail, run, succeed
from tests.engines.check_handmade import PER_TENSOR, save_folder, spell

ENGINES = ("vllm", "sglang", "tgi", "transformers")
STATUSES = {"used", "defaulted", "dropped", "misread", "refused"}


def check(code: int, *arguments: object) -> Any:
    """Check with --json, require the exit code, and give the object on stdout."""
    outcome = run("check", *arguments, "--json")
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    return outcome.json


def statuses(report: Any, engine: str) -> set[str]:
    layers = report["engines"][engine]["layers"]
    return {layer[role]["status"] for layer in layers for role in "kv"}


@pytest.fixture
def overlay(calibrated: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """Give a copy of the overlay of the tiny llama, to be changed."""
    return Path(shutil.copytree(calibrated[0] / "kv-overlay", tmp_path / "overlay"))


# docs/formats.md: which engine is served by which of our forms, for the tiny llama. TGI's loader
# of weights knows no group in the format `dense`, which kv-overlay names.
EXPORTS = {
    "kv-overlay": {"vllm", "sglang", "tgi", "transformers"},
    "kv-overlay-head": {"vllm", "transformers"},
    "tgi": {"tgi"},
    "kv_scales.safetensors": set(),
    "kv_cache_scales.tp1.json": {"sglang"},
    "rfc.tp1.json": set(),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_our_own_exports_serve_whom_the_readme_says(
    calibrated: tuple[Path, Outcome], model: Path, name: str
) -> None:
    path = calibrated[0] / name
    beside = () if path.is_dir() else ("--model", model)

    report = check(0 if EXPORTS[name] == set(ENGINES) else 8, path, *beside)

    assert {engine for engine in ENGINES if report["engines"][engine]["ok"]} == EXPORTS[name]


def test_the_numbers_are_those_of_the_export(calibrated: tuple[Path, Outcome]) -> None:
    tensors = load_file(calibrated[0] / "kv_scales.safetensors")

    report = check(0, calibrated[0] / "kv-overlay", "--engine", "vllm")

    for layer in report["engines"]["vllm"]["layers"]:
        for role in "kv":
            stored = tensors[f"model.layers.{layer['layer']}.self_attn.{role}_scale"]
            assert layer[role]["value"] == stored.item()


@pytest.mark.parametrize("tp", [1, 2])
def test_json_is_served_for_its_own_ranks_alone(
    calibrated: tuple[Path, Outcome], model: Path, tp: int
) -> None:
    ask = ("--model", model, "--engine", "sglang", "--tp", tp)

    assert check(0, calibrated[0] / f"kv_cache_scales.tp{tp}.json", *ask)["ok"]
    report = check(8, calibrated[0] / f"kv_cache_scales.tp{3 - tp}.json", *ask)
    assert statuses(report, "sglang") == {"defaulted"}


JSON_FILES = ("kv_cache_scales.tp1.json", "rfc.tp1.json", "kv_scales.safetensors")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("change", ["weights", "config", "config alone"])
def test_scales_that_record_another_model_are_refused(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path, name: str, change: str
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    if change == "weights":
        tensors = load_file(other / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    else:
        config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.125}
        (other / "config.json").write_text(json.dumps(config))
    if change == "config alone":
        (other / "model.safetensors").unlink()
    path = calibrated[0] / name

    half = change.partition(" ")[0].replace("config", "config.json")
    text = fail(4, "check", path, "--model", other)
    assert f"these scales are of another model: different {half} (" in text
    assert run("check", path, "--model", model).code in {0, 8}


def test_a_record_of_no_model_is_no_reason_to_refuse(
    calibrated: tuple[Path, Outcome], model: Path, tmp_path: Path
) -> None:
    document = json.loads((calibrated[0] / "kv_cache_scales.tp1.json").read_text())
    del document["_fp8calib"]
    (tmp_path / "bare.json").write_text(json.dumps(document))
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.125}
    (other / "config.json").write_text(json.dumps(config))

    assert check(0, tmp_path / "bare.json", "--model", other, "--engine", "sglang")["ok"]


def list_fixes(folder: Path, engine: str) -> set[str]:
    report = run("check", folder, "--engine", engine, "--json").json["engines"][engine]
    verdicts = [layer[role] for layer in report["layers"] for role in "kv"]
    return {each["fix"] for each in verdicts if each["status"] != "used"}


@pytest.mark.parametrize("is_overlay", [True, False])
@pytest.mark.parametrize(
    ("family", "engine", "path"),
    [
        ("gpt2", "transformers", "transformer.h.{}.attn"),
        ("falcon", "transformers", "transformer.h.{}.self_attention"),
        ("gpt_neox", "transformers", "gpt_neox.layers.{}.attention"),
        ("bloom", "transformers", "transformer.h.{}.self_attention"),
    ],
)
def test_an_overlay_is_not_advised_where_it_does_not_help(
    tmp_path: Path, family: str, engine: str, path: str, is_overlay: bool
) -> None:
    folder = tmp_path / family
    if family in zoo.ZOO:
        zoo.save(family, folder)
    else:
        families.save(family, families.FAMILIES[family], folder)
    add_scales(folder, path, is_overlay=is_overlay)
    fixes = list_fixes(folder, engine)

    assert fixes
    assert not any("overlay" in fix for fix in fixes)
    assert is_overlay or any(f"transformers uses none of {family}" in fix for fix in fixes)


def add_scales(folder: Path, path: str, *, is_overlay: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = [f"{path.format(index)}.{role}_scale" for index in (0, 1) for role in "kv"]
    tensors |= {name: torch.tensor([0.5]) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if is_overlay:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = make_quantization_config("tensor")
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_an_overlay_is_advised_where_it_helps(model: Path, tmp_path: Path, engine: str) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    add_scales(folder, "model.layers.{}.self_attn", is_overlay=False)

    assert any("overlay" in fix for fix in list_fixes(folder, engine))


def test_scales_are_compared_with_statistics(
    calibrated: tuple[Path, Outcome], overlay: Path
) -> None:
    for given in (calibrated[0], calibrated[0] / "stats.safetensors"):
        check(0, overlay, "--stats", given)
    for path in overlay.glob("*.safetensors"):
        tensors = load_file(path)
        if any(name.endswith("k_scale") for name in tensors):
            tensors = {name: 1 / x if "v_scale" in name else x for name, x in tensors.items()}
            save_file(tensors, path, metadata={"format": "pt"})
    outcome = run("check", overlay, "--engine", "vllm")
    report = check(8, overlay, "--stats", calibrated[0])

    assert outcome.code == 8
    assert "looks like a reciprocal" in " ".join(outcome.err.split())
    for engine in ENGINES:
        layers = report["engines"][engine]["layers"]
        assert {layer["k"]["status"] for layer in layers} == {"used"}
        assert {layer["v"]["status"] for layer in layers} == {"misread"}


def test_the_promised_keys_are_there(calibrated: tuple[Path, Outcome]) -> None:
    report = check(8, calibrated[0] / "kv-overlay-head")

    assert set(report) == {"schema_version", "ok", "passed", "engines"}
    assert report["ok"] is False
    assert tuple(report["engines"]) == ENGINES
    for engine in report["engines"].values():
        assert {"ok", "layers", "problems"} <= set(engine)
        assert [layer["layer"] for layer in engine["layers"]] == [0, 1]
        for layer in engine["layers"]:
            for role in "kv":
                assert {"status", "value", "why"} <= set(layer[role])
                assert layer[role]["status"] in STATUSES
                assert layer[role]["why"]


def test_tables_say_the_same_for_people(calibrated: tuple[Path, Outcome]) -> None:
    outcome = run("check", calibrated[0] / "kv-overlay-head")

    assert outcome.code == 8
    assert "vllm 0.33.0: ok, 2 of 2 layers served" in outcome.out
    assert "sglang 0.5.23: not ok, 0 of 2 layers served" in outcome.out
    assert "fix: " in outcome.out
    assert outcome.out.startswith(f"{calibrated[0] / 'kv-overlay-head'}: not ok\n")
    assert outcome.out.endswith("not ok\n")
    assert "FlashAttention 3" in outcome.err
    assert succeed("check", calibrated[0] / "tgi", "--engine", "tgi").out.endswith(": ok\n")


@pytest.mark.parametrize(
    ("has_kv", "change", "summary"),
    [
        (True, {"max_position_embeddings": 0}, ", 2 of 2 layers served if the engine loads it"),
        (True, {"architectures": ["LlamaModel"]}, ""),
        (False, {"max_position_embeddings": 0}, "; the KV cache is not quantized"),
    ],
)
def test_people_read_that_the_answer_is_unknown(
    overlay: Path, model: Path, tmp_path: Path, has_kv: bool, change: Any, summary: str
) -> None:
    folder = overlay if has_kv else Path(shutil.copytree(model, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))

    outcome = run("check", folder, "--engine", "vllm", "--engine", "transformers")

    assert outcome.code == 9
    assert outcome.out.startswith(f"{folder}: unknown\nvllm 0.33.0: unknown{summary}")
    assert outcome.out.endswith(f"{folder}: unknown\n")
    assert ": ok, " in outcome.out


@pytest.mark.parametrize("name", ["kv-overlay", "rfc.tp1.json"])
def test_people_read_that_weights_are_not(
    calibrated: tuple[Path, Outcome], model: Path, name: str
) -> None:
    path = calibrated[0] / name

    outcome = run("check", path, *(() if path.is_dir() else ("--model", model)))

    line = "values of weights are not read, except scales, norms and biases\n"
    assert outcome.out.count(line) == path.is_dir()


def test_several_engines_may_be_named(calibrated: tuple[Path, Outcome]) -> None:
    path = calibrated[0] / "kv-overlay"

    report = check(0, path, "--engine", "vllm", "--engine", "sglang")
    assert list(report["engines"]) == ["vllm", "sglang"]
    assert list(check(0, path, "--engine", "sglang,vllm")["engines"]) == ["sglang", "vllm"]


def test_the_unquantized_model_itself_is_served_with_ones(model: Path) -> None:
    report = check(0, model)

    assert statuses(report, "vllm") == statuses(report, "sglang") == {"defaulted"}
    assert statuses(report, "tgi") == {"defaulted"}
    assert not check(8, model, "--require-kv")["ok"]


def test_weights_without_kv_scales_are_ok_unless_scales_are_required(
    model: Path, tmp_path: Path
) -> None:
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "q")

    text = succeed("check", tmp_path / "q").out

    assert text.startswith(f"{tmp_path / 'q'}: ok\n")
    assert text.count("ok, loads; the KV cache is not quantized") == len(ENGINES)
    assert "fix: " not in text
    check(8, tmp_path / "q", "--require-kv")


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}}, ""),
        ({"kv_cache_torch_dtype": "float8_e4m3fn"}, ""),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, ""),
        ({}, "model.layers.0.self_attn.kscale"),
        ({}, "model.layers.0.self_attn.K_scale"),
        ({}, "model.layers.0.self_attn._k_scale"),
        ({}, "model.layers.0.self_attn.key_value_scale_inv"),
        ({}, "model.layers.0.self_attn.value_cache_scale"),
    ],
)
def test_a_checkpoint_that_asks_for_kv_scales_and_has_none_is_not_ok(
    model: Path, tmp_path: Path, config: dict[str, object], tensor: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensor:
        save_file({tensor: torch.tensor(0.5)}, folder / "scales.safetensors")

    check(8, folder, "--engine", "tgi")


def test_one_weights_file_beside_the_index_hides_the_scales_from_transformers(
    overlay: Path, model: Path
) -> None:
    shutil.copy(model / "model.safetensors", overlay)

    report = check(8, overlay, "--engine", "transformers", "--engine", "vllm")

    assert statuses(report, "transformers") == {"dropped"}
    assert statuses(report, "vllm") == {"used"}


def test_scales_that_the_index_does_not_name_are_defaulted(overlay: Path) -> None:
    path = overlay / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if "_scale" not in name
    }
    path.write_text(json.dumps(index))

    assert statuses(check(8, overlay, "--engine", "vllm"), "vllm") == {"defaulted"}


def test_a_missing_shard_is_a_refusal(overlay: Path) -> None:
    (overlay / "model-00002-of-00002.safetensors").unlink()

    report = check(8, overlay, "--engine", "vllm", "--engine", "sglang")

    assert statuses(report, "vllm") == statuses(report, "sglang") == {"refused"}


def test_a_folder_of_config_and_scales_alone_is_enough(model: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell("k_scale", "v_scale"), quantization=PER_TENSOR)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": PER_TENSOR}))

    assert check(0, folder, "--engine", "vllm")["ok"]


def test_a_folder_may_be_of_a_model_named_beside_it(model: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", spell("k_scale", "v_scale"), quantization=PER_TENSOR)
    config = {"quantization_config": PER_TENSOR}
    (folder / "config.json").write_text(json.dumps(config))

    assert "--model" in fail(4, "check", folder)
    allowed = ("--engine", "vllm", "--allow-suspicious")
    assert check(0, folder, "--model", model, *allowed)["ok"]


@pytest.mark.parametrize(
    ("family", "path", "layers"),
    [
        ("gpt2", "transformer.h.{}.attn.attn", [0, 1]),
        ("qwen3_next", "model.layers.{}.self_attn", [1]),
        ("gemma3n_text", "model.layers.{}.self_attn", [0, 1, 2, 3]),
        ("mixtral", "model.layers.{}.self_attn", [0, 1]),
    ],
)
def test_the_layers_come_from_the_checkpoints_own_config(
    tmp_path: Path, family: str, path: str, layers: list[int]
) -> None:
    folder = tmp_path / family
    zoo.save(family, folder)
    names = [f"{path.format(index)}.{role}_scale" for index in layers for role in "kv"]
    weights = load_file(folder / "model.safetensors")
    scales = {name: weights[next(iter(weights))].flatten()[:1].abs() + 0.5 for name in names}
    save_file({**weights, **scales}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": PER_TENSOR}))

    report = check(0, folder, "--engine", "vllm", "--allow-suspicious")

    assert [layer["layer"] for layer in report["engines"]["vllm"]["layers"]] == layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read as JSON"),
        ("[]", "not a JSON object"),
        ("\ufeff{}", "cannot be read as JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "there are no KV scales"),
        ('{"a": 1}', "there are no KV scales"),
    ],
)
def test_json_files_that_hold_no_scales(model: Path, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)

    assert said in fail(4, "check", path, "--model", model)


@pytest.mark.parametrize(
    ("names", "is_noted"),
    [
        (["LlamaForCausalLM"], False),
        (["LlamaModel"], True),
        (["Foo", "LlamaForCausalLM"], False),
        ([], True),
        (None, True),
        (["MyLlamaForCausalLM"], True),
    ],
)
def test_a_class_that_is_not_known_is_unknown(
    overlay: Path, names: list[str] | None, is_noted: bool
) -> None:
    """VLLM 0.32.0 refused the last; without a class it ran, or left the output layer out."""
    config = json.loads((overlay / "config.json").read_text())
    (overlay / "config.json").write_text(json.dumps({**config, "architectures": names}))

    report = check(9 if is_noted else 0, overlay)

    for engine in ENGINES:
        told = [each for each in report["engines"][engine]["unknown"] if "names the class" in each]
        assert bool(told) is (is_noted and engine in {"vllm", "sglang"})


def test_scales_of_a_wrong_shape_get_a_verdict(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text('{"kv_cache": 7}')

    report = check(8, path, "--model", model)

    assert statuses(report, "sglang") == {"defaulted"}
    assert statuses(report, "vllm") == statuses(report, "tgi") == {"dropped"}


def test_tensor_files_that_hold_no_scales(
    calibrated: tuple[Path, ...], model: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((model / "model.safetensors").read_bytes())

    assert "only weights" in fail(4, "check", weights, "--model", model)
    stats = calibrated[0] / "stats.safetensors"
    assert "these are statistics" in fail(4, "check", stats, "--model", model)


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, ("nowhere",), "no such file"),
        (2, ("{overlay}", "--engine", "trtllm"), "unknown engine"),
        (2, ("{overlay}", "--tp", 0), "--tp"),
        (2, ("{overlay}/tokenizer_config.json",), "--model"),
        (4, ("{overlay}/README",), "neither"),
        (2, ("{overlay}", "--model", "{overlay}/config.json"), "a file"),
        (4, ("{overlay}", "--model", "./nowhere"), "no model folder"),
        (2, ("x" * 5000,), "cannot be read"),
    ],
)
def test_what_cannot_be_asked(
    overlay: Path, code: int, arguments: tuple[object, ...], said: str
) -> None:
    (overlay / "README").write_text("x")
    (overlay / "tokenizer_config.json").write_text("{}")
    asked = [str(argument).replace("{overlay}", str(overlay)) for argument in arguments]

    assert said in fail(code, "check", *asked)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (4, {"num_hidden_layers": 10**6}),
        (4, {"num_hidden_layers": 10**30}),
        (4, {"num_hidden_layers": "many"}),
        (4, {"num_hidden_layers": -1}),
        (4, {"hidden_size": 10**18}),
        (4, {"num_attention_heads": 0}),
        (4, {"model_type": None}),
        (4, {"model_type": ["llama"]}),
        (4, {"model_type": "no-such-model"}),
        (4, {"model_type": "bert"}),
        (4, {"rope_parameters": "none"}),
    ],
)
def test_configs_of_no_model_are_one_error(
    overlay: Path, code: int, change: dict[str, object]
) -> None:
    path = overlay / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    fail(code, "check", overlay)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe{\x00", b"\xef\xbb\xbf{}", b"[" * 100_000])
def test_configs_that_are_no_json_are_one_error(overlay: Path, raw: bytes) -> None:
    (overlay / "config.json").write_bytes(raw)

    assert "config.json" in fail(4, "check", overlay)


def test_a_config_too_deep_to_be_walked_is_one_error(overlay: Path) -> None:
    path = overlay / "config.json"
    nested = '{"a":' * 700 + "1" + "}" * 700
    path.write_text(path.read_text().rstrip().removesuffix("}") + f',"x":{nested}}}')

    assert "nested too deeply" in fail(4, "check", overlay)


def test_numbers_that_json_has_no_word_for_are_understood(tmp_path: Path) -> None:
    families.save("nemotron_h", families.FAMILIES["nemotron_h"], tmp_path / "m")
    assert '"__float__": "Infinity"' in (tmp_path / "m" / "config.json").read_text()

    (layer,) = check(0, tmp_path / "m", "--engine", "vllm")["engines"]["vllm"]["layers"]

    assert (layer["layer"], layer["k"]["status"]) == (1, "defaulted")


def test_help_shows_an_example() -> None:
    assert "Example: fp8calib check" in succeed("check", "--help").out


# --- models on the hub, and models with code of their own ----------------------------------------


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a cache of the hub in which `org/tiny` lies, as a download leaves it."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    for made in (snapshot, blobs, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for path in model.iterdir():
        shutil.copy(path, blobs / f"hash-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-of-{path.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.mark.usefixtures("hub")
def test_the_model_may_be_a_hub_id(calibrated: tuple[Path, Outcome]) -> None:
    path = calibrated[0] / "kv_cache_scales.tp1.json"

    assert check(0, path, "--model", "org/tiny", "--engine", "sglang")["ok"]


def test_a_model_of_which_only_configs_are_in_the_cache_is_enough(
    calibrated: tuple[Path, Outcome], hub: Path
) -> None:
    (hub / "model.safetensors").unlink()
    path = calibrated[0] / "kv_cache_scales.tp1.json"

    assert check(0, path, "--model", "org/tiny", "--engine", "sglang")["ok"]


@pytest.mark.usefixtures("hub")
def test_the_checkpoint_may_be_a_hub_id() -> None:
    assert statuses(check(0, "org/tiny"), "vllm") == {"defaulted"}
    assert "hub" in fail(4, "check", "org/absent")


def _make_foreign(overlay: Path, **changes: object) -> None:
    path = overlay / "config.json"
    auto_map = {"AutoModelForCausalLM": "modeling_foreign.Foreign"}
    config = json.loads(path.read_text()) | {"model_type": "foreign", "auto_map": auto_map}
    path.write_text(json.dumps(config | changes))
    (overlay / "modeling_foreign.py").write_text("raise SystemExit('this code was run')\n")


def test_a_model_with_code_of_its_own_is_not_run_and_not_guessed(overlay: Path) -> None:
    _make_foreign(overlay)

    report = check(8, overlay)

    for name, engine in report["engines"].items():
        assert [layer["layer"] for layer in engine["layers"]] == [0, 1]
        assert statuses(report, name) == {"dropped"}
        assert any("foreign is unknown to this tool" in text for text in engine["problems"])
    assert "unknown to this tool" in report["engines"]["vllm"]["layers"][0]["k"]["why"]


def test_what_stops_any_model_is_told_of_unknown_ones_too(overlay: Path) -> None:
    _make_foreign(overlay, quantization_config=None)

    report = check(8, overlay, "--engine", "vllm")

    assert statuses(report, "vllm") == {"refused"}
    assert "quantization_config" in report["engines"]["vllm"]["layers"][0]["k"]["fix"]


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": None}, {"num_attention_heads": 10**30}, {"num_hidden_layers": 5000}],
)
def test_unknown_models_whose_config_says_little_are_one_error(
    overlay: Path, changes: dict[str, object]
) -> None:
    _make_foreign(overlay, **changes)

    assert "unknown to this tool" in fail(4, "check", overlay)


# --- mends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffixes", "quantization"),
    [
        (("k_scale", "v_scale"), None),
        (("k_scale",), PER_TENSOR),
        (("v_scale",), {"quant_method": "fp8", "activation_scheme": "static"}),
        (("kv_scale",), PER_TENSOR),
        ((), PER_TENSOR),
        (("k_scale", "v_scale"), {"quant_method": "awq"}),
        (("k_proj.k_scale", "v_proj.v_scale"), {"quant_method": "modelopt", "quant_algo": None}),
    ],
)
def test_every_scale_that_is_not_used_has_a_mend_that_is_printed(
    model: Path, tmp_path: Path, suffixes: tuple[str, ...], quantization: object
) -> None:
    folder = save_folder(tmp_path / "f", spell(*suffixes), quantization=quantization)

    report = check(8, folder, "--model", model)
    shown = run("check", folder, "--model", model)

    verdicts = [
        layer[role]
        for engine in report["engines"].values()
        for layer in engine["layers"]
        for role in "kv"
        if layer[role]["status"] != "used"
    ]
    assert verdicts
    for verdict in verdicts:
        assert verdict["fix"], verdict["why"]
        assert f"fix: {verdict['fix']}" in shown.out


def test_the_folder_that_calibrate_writes_is_told_from_a_checkpoint(
    calibrated: tuple[Path, Outcome], model: Path
) -> None:
    out = calibrated[0]
    for more in ((), ("--model", model)):
        text = fail(2, "check", out, *more)
        assert "a folder with checkpoints in it, not a checkpoint" in text
        assert f"such as {out / 'kv-overlay'}" in text


def test_the_reason_why_a_config_is_unusable_is_printed(overlay: Path) -> None:
    path = overlay / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": "two"}
    path.write_text(json.dumps(config))

    text = fail(4, "check", overlay)

    assert "transformers cannot use it: " in text
    assert "num_hidden_layers" in text
    assert "two" in text
