"""What `check` says where the tensors of FP8 weights are not those of the form of the config."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.plugins.vllm.loader import LoaderAnswer, amend_by_loader
from tests.engines.test_check_weights import WHOLE, ask, make, tell
from tests.kit.checkpoints import change_config, change_tensors

CT, AUTOFP8 = "compressed-tensors", "autofp8"
PAIRS = ((CT, "fp8-static"), (CT, "fp8-dynamic"), (CT, "fp8-block"), (AUTOFP8, "fp8-block"))
STATIC, MODELOPT = PAIRS[:1], ("modelopt", "fp8-static")
DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"
Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
Edit = Callable[[Config, Tensors], None]
Pair = tuple[str, str]
LIST = {CT: "ignore", "fp8": "ignored_layers"}


def name_scale(tensors: Tensors) -> str:
    return next(n for n in tensors if n.startswith(f"{DOWN}.weight_scale"))


def fill(value: float) -> Edit:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors[name_scale(tensors)].view(-1)[0] = value

    return edit


def put(name: str, tensor: torch.Tensor) -> Edit:
    return lambda _, tensors: tensors.update({name: tensor})


def store_plain(_: Config, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        shape = tensors.pop(name).shape
        if name.endswith(".weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)


def exclude(config: Config, _: Tensors) -> None:
    config[LIST[config["quant_method"]]].append(DOWN)


def exclude_plain(root: str = "") -> Edit:
    def edit(config: Config, tensors: Tensors) -> None:
        config[LIST[config["quant_method"]]].append(f"{root}{DOWN}")
        store_plain(config, tensors)

    return edit


def remove_input_scale(module: str) -> Edit:
    def edit(_: Config, tensors: Tensors) -> None:
        del tensors[f"{module}.input_scale"]

    return edit


def remove_scale(_: Config, tensors: Tensors) -> None:
    del tensors[name_scale(tensors)]


def rename_scale(_: Config, tensors: Tensors) -> None:
    tensors[f"{DOWN}.scale"] = tensors.pop(name_scale(tensors))


def cut(_: Config, tensors: Tensors) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"][:-1].clone()


def cast(dtype: torch.dtype) -> Edit:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].float().to(dtype)

    return edit


def set_weights(**fields: object) -> Edit:
    def edit(config: Config, _: Tensors) -> None:
        config["config_groups"]["group_0"]["weights"] |= fields

    return edit


def drop_format(config: Config, _: Tensors) -> None:
    del config["format"], config["config_groups"]["group_0"]["format"]


def target(name: str) -> Edit:
    return lambda config, _: config["config_groups"]["group_0"].update(targets=[name])


CASES: dict[str, tuple[Edit, tuple[Pair, ...], str, str]] = {
    "nothing": (lambda *_: None, PAIRS, "ok", ""),
    "NaN": (fill(float("nan")), PAIRS, "bad", "holds NaN"),
    "zero": (fill(0.0), PAIRS, "bad", "holds 0"),
    "zero beside larger ones": (
        put(f"{K}.input_scale", torch.zeros(1)),
        STATIC,
        "ok",
        "holds 0: the engine uses the largest",
    ),
    "no input scale beside others": (
        remove_input_scale(K),
        STATIC,
        "ok",
        "the largest of those of q_proj, v_proj",
    ),
    "no scale": (remove_scale, (*PAIRS, MODELOPT), "misread", "is missing: the engine uses uninit"),
    "no input scale": (
        remove_input_scale(DOWN),
        (*STATIC, MODELOPT, (AUTOFP8, "fp8-static")),
        "misread",
        f"{DOWN}.input_scale",
    ),
    "no weight": (
        lambda _, tensors: tensors.pop(f"{DOWN}.weight") is None and None,
        PAIRS,
        "misread",
        "weight is missing",
    ),
    "a linear in 16 bits": (store_plain, PAIRS, "misread", "it is cast without a scale"),
    "an excluded linear in 16 bits": (exclude_plain(), PAIRS, "ok", ""),
    # engines know paths of a text part only in multimodal models
    "a linear that is excluded as part of another model": (
        exclude_plain("language_model."),
        PAIRS[2:],
        "misread",
        "it is cast without a scale",
    ),
    "an excluded linear in FP8": (exclude, PAIRS, "misread", "the config excludes"),
    "another name": (rename_scale, PAIRS, "unknown", f"{DOWN}.scale has no place"),
    "one more scale": (
        put(f"{DOWN}.output_scale", torch.ones(1)),
        PAIRS,
        "unknown",
        "has no place by the config",
    ),
    "another shape": (cut, PAIRS, "unknown", "has shape [255, 256]"),
    "another dtype": (cast(torch.float8_e5m2), PAIRS, "unknown", "is F8_E5M2"),
    "integers": (cast(torch.int8), PAIRS, "unknown", "is I8, and the config means F8_E4M3"),
    "a config of four bits": (set_weights(num_bits=4), STATIC, "unknown", "of no form"),
    "a config of integers": (set_weights(type="int"), STATIC, "unknown", "of no form"),
    "a config with zero points": (set_weights(symmetric=False), STATIC, "unknown", "of no form"),
    "a config that is refused": (set_weights(actorder="foo"), STATIC, "unknown", "form that is"),
    "no format": (drop_format, STATIC, "unknown", "format None"),
    "a class of the engine": (target("ColumnParallelLinear"), STATIC, "unknown", "the target"),
    "a target that nothing has": (
        target("Lineer"),
        STATIC,
        "unknown",
        "fix: name Linear, or paths",
    ),
    "another strategy": (
        set_weights(strategy="channel"),
        STATIC,
        "unknown",
        "fix: use the config that the weights were quantized with, whose strategy",
    ),
}


@pytest.fixture(scope="module")
def find_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Path]:
    made: dict[Pair, Path] = {}

    def find(pair: Pair) -> Path:
        if pair not in made:
            made[pair] = make(tmp_path_factory.mktemp("-".join(pair)), *pair, **WHOLE)
        return made[pair]

    return find


def damage(base: Path, folder: Path, edit: Edit) -> Path:
    tensors = load_file(base / "model.safetensors")
    shutil.copytree(base, folder)
    change_config(folder, lambda config: edit(config["quantization_config"], tensors))
    return change_tensors(folder, lambda _: tensors)


@pytest.mark.parametrize(("name", "pair"), [(name, p) for name, c in CASES.items() for p in c[1]])
def test_a_difference_is_unknown_unless_the_engine_is_silent(
    find_base: Callable[[Pair], Path], tmp_path: Path, name: str, pair: Pair
) -> None:
    edit, _, wanted, words = CASES[name]
    folder = damage(find_base(pair), tmp_path / "x", edit)

    for engine in ("vllm", "sglang"):
        report = ask(folder, engine)

        assert tell(report) == wanted, engine
        texts = [*report.problems, *report.unknown, report.weights.why if report.weights else ""]
        assert any(words in text for text in texts)
        hint = engine == "vllm" and wanted == "unknown"
        assert (
            any("; `fp8calib vllm check` asks its loader" in text for text in report.unknown)
            is hint
        )
        assert report.ok is (wanted == "ok")


@pytest.mark.parametrize(
    ("name", "status"),
    [("another shape", "misread"), ("another dtype", "misread"), ("one more scale", "ok")],
)
def test_what_loads_in_vllm_although_it_differs(
    find_base: Callable[[Pair], Path], tmp_path: Path, name: str, status: str
) -> None:
    """A tensor that is cut or cast raises no error; one without a place does no harm."""
    folder = damage(find_base(PAIRS[0]), tmp_path / "x", CASES[name][0])
    report = ask(folder, "vllm")
    answer = LoaderAnswer(
        version="0.32.0",
        stage="done",
        error="",
        trace=(),
        runner="generate",
        missing=(),
        files=("model.safetensors",),
        scales=[],
    )

    assert tell(amend_by_loader(report, answer)) == status


def make_integers(folder: Path, base: Path, weights: Config, inputs: Config | None) -> Path:
    """Make a whole checkpoint of integers, of which this test reads only names and shapes."""

    def edit(config: Config, tensors: Tensors) -> None:
        group = config["config_groups"]["group_0"]
        group.update(weights=weights, input_activations=inputs)
        config["format"] = group["format"] = "pack-quantized"
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            module = name.removesuffix(".weight")
            rows, columns = tensors.pop(name).shape
            for other in [n for n in tensors if n.startswith(f"{module}.") and "k_scale" not in n]:
                if "v_scale" not in other:
                    del tensors[other]
            size = weights.get("group_size") or columns
            words = -(-columns * weights["num_bits"] // 32)
            tensors[f"{module}.weight_packed"] = torch.ones(rows, words, dtype=torch.int32)
            tensors[f"{module}.weight_scale"] = torch.full((rows, columns // size), 0.01)
            tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])

    return damage(base, folder, edit)


@pytest.mark.parametrize(
    ("num_bits", "inputs", "wanted"),
    [
        (4, None, "ok"),
        (8, None, "ok"),
        (2, None, "unknown"),
        (3, None, "unknown"),
        (4, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "unknown"),
        (4, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "unknown"),
    ],
)
def test_integers_are_served_in_the_forms_for_which_vllm_has_schemes(
    find_base: Callable[[Pair], Path],
    tmp_path: Path,
    num_bits: int,
    inputs: Config | None,
    wanted: str,
) -> None:
    """By `_get_scheme_from_parts` of vLLM 0.32 (its loader run on what llm-compressor writes)."""
    weights = {"num_bits": num_bits, "type": "int", "strategy": "group", "group_size": 128}
    folder = make_integers(tmp_path / "x", find_base(PAIRS[1]), weights, inputs)

    assert tell(ask(folder, "vllm")) == wanted
    packed = "model.layers.1.mlp.up_proj.weight_packed"
    change_tensors(folder, lambda all_: {**all_, packed: all_[packed][:-1].clone()})
    assert tell(ask(folder, "vllm")) == "unknown"
