"""What `check` says of damaged FP8 weights, by engine, form and scheme."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.architectures import families
from tests.architectures.families import FAMILIES
from tests.engines.test_check_weights import PAIRS, WHOLE, ask, make
from tests.engines.test_completeness import tell
from tests.engines.weight_damages import (
    CT,
    DAMAGES,
    STATIC,
    Config,
    Damage,
    Edit,
    Tensors,
    Verdict,
    add,
    copy_damaged,
    exclude,
    quantize_head,
    remove,
)
from tests.quantization.by_hand import run

REFUSED_BY_TGI = {
    "no weight scale": ".weight_scale",
    "no fused input scale": "k_proj.input_scale is missing",
    "no weight": "down_proj.weight is missing",
    "no weight and no scales": "down_proj.weight is missing",
    "one of q, k and v in 16 bits": "only a part of it is FP8",
    "one of q, k and v excluded": "only a part of it is FP8",
    "the scale's name of another method": "is missing beside the FP8 weight",
    "the scale's name of a model": "is missing beside the FP8 weight",
    "a weight scale that is too short": "[127, 1]",
    "a weight scale that is too long": "[129, 1]",
    "a weight that is too short": "[255, 256]",
    "a weight that is too narrow": "[256, 255]",
    "an output layer in FP8": "TGI does not quantize the output layer",
}
"""By damage, words of the reason."""
REFUSED_BY_COMPRESSED_TGI = REFUSED_BY_TGI | {
    "no input scale": "down_proj.input_scale is missing",
    "an activation_scale": "down_proj.input_scale is missing",
    "everything in 16 bits": "13 more",
    "one linear in 16 bits": "down_proj is not FP8",
    "an excluded linear in FP8": "down_proj is FP8, but the config excludes",
    "no format": "",
    "the format dense": "",
    "targets that match nothing": "Cannot find compressed-tensors target",
}
REFUSED_BLOCKS = REFUSED_BY_TGI | {
    "a weight scale [out]": "per block",
    "a weight scale [out, 1]": "per block",
    "a weight scale that is one number": "per block",
}
MISREAD_BY_TGI = {
    **{
        f"weight scale holds {bad}": bad
        for bad in ("NaN", "infinity", "0", "a negative number", "a number under 1.175e-38")
    },
    "a weight in e5m2": "F8_E5M2",
    "a weight in INT8": "I8",
}
ENGINES = ("vllm==0.32", "sglang", "transformers")
CASES = [(name, pair) for name, damage in DAMAGES.items() for pair in damage.pairs]
K = "model.layers.0.self_attn.k_proj"
Pair = tuple[str, str]
FindBase = Callable[[Pair], tuple[Path, ModelGeometry]]


@pytest.fixture(scope="module")
def find_base(tmp_path_factory: pytest.TempPathFactory) -> FindBase:
    """Give a whole checkpoint of a form and scheme and its geometry, made once."""
    made: dict[Pair, tuple[Path, ModelGeometry]] = {}

    def find(pair: Pair) -> tuple[Path, ModelGeometry]:
        if pair not in made:
            folder = make(tmp_path_factory.mktemp("-".join(pair)), *pair, **WHOLE)
            made[pair] = folder, read_geometry(folder, open_folder(folder).config)
        return made[pair]

    return find


def quantize(family: str, folder: Path, form: str, scheme: str, **sizes: int) -> Path:
    """Quantize a tiny model of a family, without scales of inputs."""
    if family in zoo.ZOO:
        zoo.save(family, folder / "model", **sizes)
    else:
        families.save(family, FAMILIES[family], folder / "model")
    return run(folder / "model", folder / "base", scheme, form).out


def expect(damage: Damage, pair: Pair, engine: str) -> Verdict | None:
    """Give the verdict of an engine; None where the table has none, or the form is not served."""
    if engine == "vllm":
        return damage.by_pair.get(pair, damage.vllm)
    if engine == "transformers":
        return damage.transformers if pair[0] == CT else None
    if pair[0] == CT and damage.sglang_compressed is not None:
        return damage.sglang_compressed
    return damage.sglang if pair != ("modelopt", "fp8-dynamic") and not damage.by_pair else None


def test_every_form_and_scheme_is_damaged() -> None:
    assert {pair for _, pair in CASES} == set(PAIRS)


@pytest.mark.parametrize(("name", "pair"), CASES)
def test_damages(tmp_path: Path, find_base: FindBase, name: str, pair: Pair) -> None:
    folder = copy_damaged(find_base(pair)[0], tmp_path / "case", DAMAGES[name].edit)
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    expected = {
        engine: expect(DAMAGES[name], pair, engine.partition("==")[0]) for engine in ENGINES
    }
    reports = check_folder(opened, geometry, ENGINES, 1).engines
    for engine, (status, words) in ((key, each) for key, each in expected.items() if each):
        report = reports[engine]
        texts = [report.weights.why] if report.weights else [*report.unknown, *report.problems]
        assert tell(report) == status, (engine, texts)
        is_worded = engine != "transformers"  # whose reasons are its own
        assert not is_worded or any(words in text for text in texts or [""]), (engine, texts)


@pytest.mark.parametrize(("name", "pair"), [case for case in CASES if case[1] != (CT, "fp8-block")])
def test_damages_in_tgi(tmp_path: Path, find_base: FindBase, name: str, pair: Pair) -> None:
    """By what its source does with each name, shape and dtype."""
    base, geometry = find_base(pair)
    folder = copy_damaged(base, tmp_path / "case", DAMAGES[name].edit)
    refused = REFUSED_BLOCKS if pair[1] == "fp8-block" else REFUSED_BY_TGI
    refused = REFUSED_BY_COMPRESSED_TGI if pair[0] == CT else refused

    verdict = check_folder(open_folder(folder), geometry, ["tgi"], 1).engines["tgi"].weights

    expected = "refused" if name in refused else "misread" if name in MISREAD_BY_TGI else "ok"
    assert (str(verdict.status) if verdict else "ok") == expected
    assert verdict is None or (refused | MISREAD_BY_TGI)[name] in verdict.why


@pytest.mark.parametrize("gone", [".0.block_sparse_moe.experts.3.", ".1.block_sparse_moe.experts."])
@pytest.mark.parametrize("pair", [(CT, "fp8-static"), ("modelopt", "fp8-static")])
def test_experts_that_are_not_stored(tmp_path: Path, pair: Pair, gone: str) -> None:
    """Both are loaded by vLLM 0.32.0, which computes with uninitialised memory (run)."""
    base = make(tmp_path / "base", *pair, "mixtral")
    geometry = read_geometry(base, open_folder(base).config)

    def remove(_: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if gone in name]:
            del tensors[name]

    folder = copy_damaged(base, tmp_path / "case", remove)

    reports = check_folder(open_folder(folder), geometry, ["vllm==0.32", "sglang"], 1).engines
    for report in reports.values():
        assert report.weights is not None
        assert report.weights.status == "misread"
        assert f"layers{gone}" in report.weights.why
    assert check_folder(open_folder(base), geometry, ["vllm==0.32"], 1).engines["vllm==0.32"].ok


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("deepseek_v3", "model.layers.0.mlp.gate_proj"),  # the only dense layer
        ("gemma3n_text", "model.per_layer_model_projection"),  # in no layer
        ("nemotron_h", "backbone.layers.0.mixer.in_proj"),  # which is model.layers in the class
    ],
)
@pytest.mark.parametrize("is_short", [False, True])
def test_linears_that_no_other_is_named_like(
    tmp_path: Path, name: str, module: str, is_short: bool
) -> None:
    """One loads without them (vLLM 0.32.0, run), one stops, and none takes fewer rows."""
    base = quantize(name, tmp_path, CT, "fp8-dynamic")

    def edit(_: object, tensors: dict[str, torch.Tensor]) -> None:
        for each in [each for each in tensors if each.startswith(f"{module}.")]:
            tensor = tensors.pop(each)
            if is_short:
                tensors[each] = tensor[:-1].contiguous()

    folder = copy_damaged(base, tmp_path / "case", edit)
    engines = ("vllm==0.32", "transformers")
    whole, damaged = (
        check_folder(open_folder(path), read_geometry(path, open_folder(path).config), engines, 1)
        for path in (base, folder)
    )
    assert [whole.engines[engine].weights for engine in engines] == [None, None]
    found = [damaged.engines[engine].weights for engine in engines]
    refused = "refused" if is_short else "misread"
    assert [str(each and each.status) for each in found] == [refused, "refused"]
    path = module.partition(".")[2]  # transformers has another name for the root
    assert all(each and f"{path}.weight" in each.why for each in found)


def test_an_output_layer_in_blocks_is_unknown(tmp_path: Path, find_base: FindBase) -> None:
    """VLLM 0.32.0 stopped at it (AssertionError)."""

    def edit(config: Config, tensors: Tensors) -> None:
        quantize_head(config, tensors)
        for group in config["config_groups"].values():
            group["targets"] = ["Linear", "re:.*lm_head"]

    folder = copy_damaged(find_base((CT, "fp8-block"))[0], tmp_path / "case", edit)

    report = ask(folder, "vllm")

    assert tell(report) == "unknown"
    assert any("lm_head" in why for why in report.unknown)


@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("module", ["model.norm", "model.foo"])
@pytest.mark.parametrize("pair", STATIC)
def test_scales_beside_no_linear(
    tmp_path: Path, find_base: FindBase, pair: Pair, module: str, suffix: str
) -> None:
    """They stop vLLM 0.32.0 with a ValueError (run)."""
    base, geometry = find_base(pair)
    folder = copy_damaged(base, tmp_path / "case", add(suffix, module))

    report = check_folder(open_folder(folder), geometry, ["vllm==0.32"], 1).engines["vllm==0.32"]

    assert report.layers[0].k.status == "refused"
    assert f"{module}.{suffix}" in report.layers[0].k.why


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
@pytest.mark.parametrize(
    ("suffix", "value", "status"),
    [
        ("", 0.0, None),
        ("weight_scale", float("nan"), "misread"),
        ("weight_scale", None, "refused"),
        ("weight", None, "refused"),
        ("input_scale", float("nan"), None),  # joined experts do not use it
    ],
)
def test_damaged_experts_in_transformers(
    tmp_path: Path, method: str, suffix: str, value: float | None, status: str | None
) -> None:
    """As transformers 5.23 does when it loads and runs a mixtral (run)."""
    if method == "fp8":
        sizes = {"hidden_size": 256, "intermediate_size": 256}
        base = make(tmp_path / "base", "autofp8", "fp8-block", "qwen3_moe", **sizes)
        suffix = suffix.replace("weight_scale", "weight_scale_inv").replace("input_scale", "")
        name = f"model.layers.1.mlp.experts.2.gate_proj.{suffix}"
    else:
        base = make(tmp_path / "base", CT, "fp8-static", "mixtral")
        name = f"model.layers.1.block_sparse_moe.experts.2.w1.{suffix}"

    def edit(_: object, tensors: dict[str, torch.Tensor]) -> None:
        if suffix and value is None:
            del tensors[name]
        elif suffix:
            tensors[name] = torch.full_like(tensors[name], value or 0.0)

    folder = copy_damaged(base, tmp_path / "case", edit)
    geometry = read_geometry(folder, open_folder(folder).config)
    report = check_folder(open_folder(folder), geometry, ["transformers"], 1)
    found = report.engines["transformers"].weights

    assert (str(found.status) if found else None) == status
    assert found is None or "experts" in found.why


def test_vllm_reads_the_separate_file_of_modelopt_alone(tmp_path: Path) -> None:
    """Where it has another producer, the model is loaded unquantized (vLLM 0.32.0, run)."""
    folder = quantize("llama", tmp_path, "modelopt", "fp8-dynamic")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "hf_quant_config.json"
    fields = json.loads(path.read_text())
    found = {}
    for producer in ("fp8calib", "modelopt"):
        path.write_text(json.dumps(fields | {"producer": {"name": producer}}))
        found[producer] = ask(folder, "vllm==0.32").weights

    assert str(found["fp8calib"] and found["fp8calib"].status) == "refused"
    assert found["modelopt"] is None


def cast_all(_: Config, tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def forget_ignored(config: Config, _: Tensors) -> None:
    config["ignore"] = None


def forget_blocks(config: Config, _: Tensors) -> None:
    del config["weight_block_size"]


def keep(_: Config, __: Tensors) -> None:
    """Damage nothing."""


@pytest.mark.parametrize(
    ("pair", "family", "edit", "engine", "words"),
    [
        (("modelopt", "fp8-dynamic"), "llama", add("output_scale", K), "vllm==0.32", "no module"),
        (("autofp8", "fp8-block"), "llama4_text", keep, "transformers", "random numbers"),
        ((CT, "w8a16"), "granitemoe", cast_all, "transformers", "random numbers"),
        ((CT, "w8a16"), "gemma3n_text", forget_ignored, "transformers", "MISSING"),
        (("autofp8", "fp8-block"), "llama", forget_blocks, "transformers", "cannot be converted"),
    ],
)
def test_faults_of_single_models(
    tmp_path: Path, pair: Pair, family: str, edit: Edit, engine: str, words: str
) -> None:
    """As these engines do (run)."""
    sizes = {"intermediate_size": 320} if family == "llama" else {}
    folder = copy_damaged(quantize(family, tmp_path, *pair, **sizes), tmp_path / "case", edit)

    report = ask(folder, engine)

    whys = [report.weights.why] if report.weights else []
    assert any(words in why for why in (*whys, *(layer.k.why for layer in report.layers)))


def test_vllm_does_not_join_biogpts_q(tmp_path: Path) -> None:
    """Its class has k_proj, v_proj and q_proj in this order (0.32.0, run)."""
    q = "biogpt.layers.0.self_attn.q_proj"
    base = make(tmp_path / "base", "modelopt", "fp8-static", "biogpt")
    folder = copy_damaged(base, tmp_path / "case", remove("input_scale", module=q))

    verdict = ask(folder, "vllm==0.32").weights

    assert verdict is not None
    assert "-3.4e38" in verdict.why


def test_transformers_dequantizes_excluded_experts_too(tmp_path: Path) -> None:
    """It joins the experts of a layer, whatever the config says of them (5.23, run)."""
    base = quantize("qwen3_moe", tmp_path, CT, "fp8-dynamic")
    edit = exclude("model.layers.1.mlp.experts.1.down_proj")
    folder = copy_damaged(base, tmp_path / "case", edit)

    assert ask(folder, "transformers").weights is None
