"""Checkpoints of several schemes, read as compressed-tensors itself and the engines read them."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_named_modules, match_targets

import fp8calib
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.weights.linears import list_groups
from fp8calib.errors import UsageError
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.targets import make_targets
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.quantization.plan import CalibratedScales
from tests import zoo
from tests.kit.checkpoints import change_config
from tests.quantization.by_hand import Run, run

SIZES = {"llama": {"num_hidden_layers": 3}}
CHOICES: dict[str, list[dict[str, str]]] = {
    "llama": [
        {"*.mlp.down_proj": "w8a16"},
        {"*.self_attn": "w8a16", r"re:model\.layers\.(0|2)\..*": "fp8-block"},
        {"model.layers.1": "fp8-static", "*.o_proj": "w8a16"},
        {r"re:.*[.](q_proj|k_proj|v_proj)": "w8a16", "*": "fp8-block"},
    ],
    "mixtral": [{"*.self_attn": "w8a16"}, {"*.layers.1.*.experts": "fp8-static"}],
    "qwen3_moe": [{"*.experts": "fp8-static", "*.o_proj": "w8a16"}],
    "deepseek_v3": [{"*.shared_experts": "w8a16", "*.mlp.experts": "fp8-static"}],
}
"""By family, some choices beside fp8-dynamic. No pattern divides what engines join."""
CASES = [(family, choice) for family, choices in CHOICES.items() for choice in choices]


def find_by_hand(choice: Mapping[str, str], module: str) -> str:
    """Find the scheme of a linear: of the first pattern for it or for a module around it."""
    parts = module.split(".")
    paths = [".".join(parts[: place + 1]) for place in range(len(parts))]
    for pattern, scheme in choice.items():
        expression = pattern[3:] if pattern.startswith("re:") else re.escape(pattern)
        expression = expression if pattern.startswith("re:") else expression.replace(r"\*", ".*")
        if any(re.fullmatch(expression, path) for path in paths):
            return scheme
    return "fp8-dynamic"


def read_by_compressed_tensors(
    config: Mapping[str, object], modules: list[str]
) -> Iterator[tuple[str, QuantizationScheme]]:
    parsed = QuantizationConfig.model_validate(config)
    targets = {target: group for group in parsed.config_groups.values() for target in group.targets}
    root = torch.nn.Module()
    for module in modules:
        parent = root
        *outer, last = module.split(".")
        for part in outer:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(1, 1, device="meta"))
    for name, module in match_named_modules(root, targets, parsed.ignore):
        yield name, targets[match_targets(name, module, targets)[0]]


def name_scheme(group: QuantizationScheme) -> str:
    assert group.weights is not None
    assert (group.weights.num_bits, group.weights.type) == (8, "float")
    assert group.weights.dynamic is False
    inputs = group.input_activations
    kind = None if inputs is None else (str(inputs.strategy), inputs.dynamic)
    names = {
        ("tensor", ("tensor", False)): "fp8-static",
        ("channel", ("token", True)): "fp8-dynamic",
        ("channel", None): "w8a16",
        ("block", ("group", True)): "fp8-block",
    }
    name = names[group.weights.strategy, kind]
    assert group.format == ("naive-quantized" if inputs is None else "float-quantized")
    return name


def write(family: str, choice: Mapping[str, str], folder: Path) -> Run:
    zoo.save(family, folder / "model", **SIZES.get(family, {}))
    ones: Mapping[str, torch.Tensor] = defaultdict(lambda: torch.tensor(1.0))
    scales = CalibratedScales(inputs=ones, kv={})
    out = folder / "out"
    return run(folder / "model", out, "fp8-dynamic", scales=scales, layer_schemes=choice)


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_the_scheme_of_each_linear_is_found_under_any_prefix(
    family: str, choice: dict[str, str], tmp_path: Path
) -> None:
    """By compressed-tensors, and by engines, which fuse projections and rename experts."""
    written = write(family, choice, tmp_path)
    linears = [matrix.module for matrix in written.plan.selection.quantized]
    for prefix in ("", "language_model."):
        named = [f"{prefix}{module}" for module in linears]
        read = read_by_compressed_tensors(written.config(), named)
        schemes = {name: name_scheme(group) for name, group in read}
        assert schemes == {f"{prefix}{m}": find_by_hand(choice, m) for m in linears}
        assert len(set(schemes.values())) > 1
    folder = open_folder(written.out)
    geometry = read_geometry(folder.path, folder.config)
    tensors = {name: entry for held in folder.tensors.values() for name, entry in held.items()}
    for engine in ("vllm", "sglang"):
        make_reader = ENGINES[engine].make_reader
        assert make_reader is not None
        loader = make_reader(folder, geometry)
        compared = 0
        for group in list_groups(tensors, geometry, loader.classes):
            found = loader.find_scheme(group)
            if isinstance(found, StoredScheme):
                scheme = SCHEMES[find_by_hand(choice, group.members[0].module)]
                assert (found.weights, found.inputs) == (scheme.weights, scheme.inputs), group.path
                compared += len(group.members)
        assert compared >= 8


def test_linears_that_an_engine_renames_are_named(tmp_path: Path) -> None:
    """In vLLM the paths of Falcon-H1's mixers have no `layers` and no `mamba`."""
    zoo.save("falcon_h1", tmp_path / "model")
    choice = {"*.mamba": "w8a16"}
    out = run(tmp_path / "model", tmp_path / "out", "fp8-dynamic", layer_schemes=choice).out
    found = {
        name: [problem for problem in engine.problems if "in the config" in problem]
        for name, engine in fp8calib.check(out).engines.items()
    }
    assert found.pop("vllm") == [
        "weights: model.layers.0.mamba.in_proj is w8a16 in the config, but the engine finds no "
        "such group for it: fp8-dynamic; 3 more likewise, such as model.layers.0.mamba.out_proj"
    ]
    assert not any(found.values())


def test_experts_in_several_groups_are_refused_as_by_the_servers(tmp_path: Path) -> None:
    """Both servers raise a ValueError."""
    out = write("qwen3_moe", {"*.o_proj": "fp8-static"}, tmp_path).out

    def retarget(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_1"]
        group["targets"] = ["re:.*o_proj$", r"re:.*experts\.\d+\.down_proj$"]

    engines = fp8calib.check(change_config(out, retarget)).engines
    for engine in ("vllm", "sglang"):
        verdict = engines[engine].weights
        assert verdict is not None
        assert verdict.status == "refused"
        assert "experts are in several config groups (ValueError" in verdict.why


PATHS = [
    *(f"model.{side}.layers.{i}.fc{k}" for side in ("en", "de") for i in range(12) for k in (1, 2)),
    *(f"model.de.layers.{i}.attn.{part}_proj" for i in range(12) for part in "qkvo"),
    *(f"stages.{i}.blocks.{j}.mix" for i in range(3) for j in range(4)),
    *("model.side", "side", "other.model.side"),
]


@pytest.mark.parametrize("seed", range(40))
def test_targets_match_their_linears_and_no_other(seed: int) -> None:
    """Whatever is chosen: parts of a stack, one of two stacks, single linears."""
    generator = np.random.default_rng(seed)
    wanted = {
        re.compile(r".*de.*fc1"): 0.9,
        re.compile(r".*layers.(3|11)\D.*"): 0.6,
        re.compile(r"stages.1.*"): 0.5,
        re.compile(r".*side"): 0.5,
    }
    taken = [each for each, chance in wanted.items() if generator.random() < chance]
    chosen = [p for p in PATHS if any(each.fullmatch(p) for each in taken)]
    chosen += [p for p in PATHS if generator.random() < 0.1 * (seed % 3) and p not in chosen]
    others = [path for path in PATHS if path not in chosen]
    targets = make_targets(chosen, others)
    for path in PATHS:
        matching = [t for t in targets if t == path or (t[:3] == "re:" and re.match(t[3:], path))]
        assert bool(matching) is (path in chosen), (path, matching)
    assert not any(re.search(r"\)[*+{]", target) or len(target) > 1000 for target in targets)


JOINED = "engines load model.layers.0"
EARLIER = "the earlier pattern *.self_attn matches it"


@pytest.mark.parametrize(
    ("choice", "says", "hint"),
    [
        ({"*.k_proj": "w8a16"}, f"{JOINED}.self_attn.q_proj+k_proj+v_proj as one weight, and it "
         "has several schemes (", "'model.layers.*.self_attn=w8a16'"),
        ({"*.experts.0": "fp8-static"}, f"{JOINED}.mlp.experts as one weight",
         "'model.layers.*.mlp.experts=fp8-static'"),
        ({"*.experts.*.down_proj": "w8a16"}, f"{JOINED}.mlp.experts as one weight",
         "'model.layers.*.mlp.experts=w8a16'"),
        ({"*.mpl": "w8a16"}, "matches no module of the model", "linears look like"),
        ({"re:(": "w8a16"}, "not a regular expression", ""),
        ({"*.gate": "w8a16"}, "gives no linear its scheme, such as model.layers.0.mlp.gate: a "
         "router", "leave out --layer-scheme"),
        ({"*.o_proj": "fp8-block", "*.self_attn": "w8a16"}, f"gives no linear its scheme, such as "
         f"model.layers.0.self_attn.o_proj: {EARLIER}", "write the narrower pattern first"),
    ],
)  # fmt: skip
def test_patterns_without_effect_and_divided_weights_are_refused(
    choice: dict[str, str], says: str, hint: str, tmp_path: Path
) -> None:
    """Of the first pattern; the earlier ones of the last row come after it here."""
    told, *_ = choice
    with pytest.raises(UsageError) as raised:
        write("qwen3_moe", dict(reversed(choice.items())), tmp_path)
    assert raised.value.message.startswith(f"--layer-scheme {told}: {says}")
    assert hint in (raised.value.hint or "")
