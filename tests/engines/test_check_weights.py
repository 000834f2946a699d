"""What `check` says of FP8 weights beside their KV scales, by engine, form and number of ranks."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fp8calib
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.dialects.fp8.registry import FP8_DIALECTS, list_written
from fp8calib.engines.check import check_folder
from fp8calib.engines.registry import find_replayed, list_defaults
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.quantized import QuantizedLinear, QuantizedWeights
from fp8calib.engines.weights.rules import apply_rules
from fp8calib.fp8.schemes import find_scheme
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.quantization.calibrated_scales import find_scales
from fp8calib.quantization.plan import PlanSettings
from fp8calib.selection.layer_schemes import LayerSchemes
from fp8calib.selection.select import select
from tests import zoo
from tests.architectures import families
from tests.architectures.families import FAMILIES
from tests.quantization.by_hand import run
from tests.truth.test_statistics import draw, make_plan, run_calibration

WHOLE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
"""A llama of 4 query heads and 2 KV heads, all of whose linears fill blocks of 128."""
PAIRS = [
    (form.name, scheme)
    for form in list_written()
    for scheme in form.schemes
    if not find_scheme(scheme).is_mx
]
"""MXFP8 is in `test_check_mx.py`."""


EMPTY = ModelGeometry(architecture="", model_type="", checkpoint_dtype="float32", layers=())


def make(
    folder: Path, form: str, scheme: str, family: str = "llama", ignore: str = "", **sizes: int
) -> Path:
    """Quantize a tiny model with KV scales."""
    if family in zoo.ZOO:
        zoo.save(family, folder / "model", **sizes)
    else:
        families.save(family, FAMILIES[family], folder / "model")
    stats = run_calibration(folder / "model", make_plan(draw([20, 20])))[1]
    settings = PlanSettings(schemes=LayerSchemes(find_scheme(scheme)), dialect=FP8_DIALECTS[form])
    with Checkpoint.open(folder / "model") as checkpoint:
        scales = find_scales(stats, checkpoint, settings, select(checkpoint))
    ignored = (ignore,) if ignore else ()
    return run(folder / "model", folder / "out", scheme, form, scales=scales, ignore=ignored).out


def ask(folder: Path, engine: str, tp: int = 1) -> EngineReport:
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    return check_folder(opened, geometry, [engine], tp).engines[engine]


def explain_refusal(report: EngineReport) -> str:
    """Give why an engine does not start; empty where it does."""
    whys = {layer.k.why for layer in report.layers if layer.k.status == "refused"}
    assert len(whys) <= 1
    return next(iter(whys), "")


def explain(report: EngineReport) -> str:
    """Give why an engine does not start, or misreads the weights; empty where it does neither."""
    return explain_refusal(report) or (report.weights.why if report.weights else "")


def change_config(folder: Path, **changes: object) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_whole_blocks_and_whole_groups_are_served(tmp_path: Path, form: str, scheme: str) -> None:
    folder = make(tmp_path, form, scheme, **WHOLE)
    refused = {engine for engine in list_defaults() if explain_refusal(ask(folder, engine))}
    assert refused == {
        ("compressed-tensors", "fp8-block"): {"tgi"},
        ("modelopt", "fp8-dynamic"): {"sglang"},
        ("autofp8", "fp8-static"): {"transformers"},
    }.get((form, scheme), set())
    assert ask(folder, "vllm").ok
    misread = ask(folder, "transformers").weights
    is_read = form == "compressed-tensors" or (form, scheme) == ("autofp8", "fp8-block")
    assert (misread is None) is is_read


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_a_group_that_is_quantized_in_part_is_refused(
    tmp_path: Path, form: str, scheme: str
) -> None:
    folder = make(tmp_path, form, scheme, ignore="model.layers.1.self_attn.k_proj", **WHOLE)
    for engine in ("vllm", "sglang"):
        report = ask(folder, engine)
        if engine == "sglang" and form == "compressed-tensors":
            # Llama's class does not list what it joins: entries have to name qkv_proj.
            assert report.weights is not None
            assert report.weights.why.startswith(
                "model.layers.1.self_attn.k_proj is not quantized, but"
            )
        elif (engine, form, scheme) != ("sglang", "modelopt", "fp8-dynamic"):
            group = "model.layers.1.self_attn.q_proj+k_proj+v_proj"
            assert explain_refusal(report).startswith(f"{group} becomes one weight")


@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8"])
@pytest.mark.parametrize(
    ("sizes", "engines"),
    [
        ({"intermediate_size": 192}, {"vllm", "sglang"}),
        ({"head_dim": 48}, {"vllm", "sglang"}),
        ({"head_dim": 32, "num_key_value_heads": 4}, set()),
        ({"hidden_size": 192}, set()),
    ],
)
def test_blocks_that_do_not_fill_a_part(
    tmp_path: Path, form: str, sizes: dict[str, int], engines: set[str]
) -> None:
    folder = make(tmp_path, form, "fp8-block", **{**WHOLE, **sizes})
    found = {engine for engine in ("vllm", "sglang") if explain(ask(folder, engine))}
    assert found == engines


def test_vllms_fp8_method_does_not_check(tmp_path: Path) -> None:
    """250 rows have two blocks, 500 have four: every scale has a place, but not its own.

    Row 250 is in the second block of the joined weight, and its scale in the third.
    """
    for form, status in (("autofp8", "misread"), ("compressed-tensors", "refused")):
        sizes = {**WHOLE, "intermediate_size": 250}
        report = ask(make(tmp_path / form, form, "fp8-block", **sizes), "vllm")
        verdict = report.layers[0].k if status == "refused" else report.weights
        assert verdict is not None
        assert verdict.status == status
        assert "mlp.gate_proj has 250 outputs" in verdict.why
        assert not report.ok


def test_sglang_wants_the_last_part_of_autofp8_whole_too() -> None:
    """Its `fp8.py` looks at every part; `fp8_utils.py`, for compressed-tensors, at all but it."""
    linears = tuple(
        QuantizedLinear(
            module=f"model.layers.0.self_attn.{name}_proj",
            shape=(rows, 256),
            scheme="fp8-block",
            block=(128, 128),
        )
        for name, rows in (("q", 256), ("k", 128), ("v", 100))
    )
    for dialect, engines in (("compressed-tensors", []), ("autofp8", ["sglang"])):
        weights = QuantizedWeights(dialect=dialect, config={}, linears=linears, unquantized=())
        found = [
            engine
            for engine in ("vllm", "sglang", "tgi")
            if list_block_findings(engine, weights, EMPTY, 1)
        ]
        assert found == engines


@pytest.mark.parametrize(
    ("tp", "sizes", "part"),
    [
        (1, {}, ""),
        (2, {"hidden_size": 512, "head_dim": 128, "intermediate_size": 512}, ""),
        (2, {"head_dim": 128, "intermediate_size": 384}, "mlp.down_proj has 192 inputs"),
        (2, {"head_dim": 64, "intermediate_size": 512}, "self_attn.k_proj has 64 outputs"),
        (4, {"head_dim": 128, "intermediate_size": 512}, ""),
        (4, {"head_dim": 128, "intermediate_size": 256}, "mlp.down_proj has 64 inputs"),
    ],
)
def test_ranks_have_to_fill_blocks_too(
    tmp_path: Path, tp: int, sizes: dict[str, int], part: str
) -> None:
    """By hand: 4 query heads, 2 KV heads, which 4 ranks hold twice."""
    folder = make(tmp_path, "autofp8", "fp8-block", **{**WHOLE, **sizes})
    for engine in ("vllm", "sglang"):
        why = explain(ask(folder, engine, tp))
        assert bool(why) is bool(part)
        assert part in why
    assert bool(ask(folder, "tgi", tp).unknown) is (tp > 1)


def test_the_inputs_of_a_row_are_cut_for_ranks(tmp_path: Path) -> None:
    folder = make(tmp_path, "autofp8", "fp8-block", "opt", hidden_size=256, ffn_dim=384)
    assert not explain(ask(folder, "vllm"))
    why = explain(ask(folder, "vllm", 2))
    assert "fc1 has 192 outputs on each of 2 ranks" in why


def test_projections_stored_as_one_are_looked_at_by_part(tmp_path: Path) -> None:
    """phi3 stores gate above up: the blocks of one weight, but engines count per projection."""
    for size, is_refused in ((256, False), (192, True)):
        sizes = {**WHOLE, "intermediate_size": size}
        del sizes["head_dim"]
        folder = make(tmp_path / str(size), "autofp8", "fp8-block", "phi3", **sizes)
        why = explain(ask(folder, "vllm"))
        assert ("gate_proj has 192 outputs, no multiple" in why) is is_refused


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_have_rules_of_their_own(tmp_path: Path, family: str) -> None:
    name = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    sizes = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
    only = make(tmp_path / "w", "compressed-tensors", "w8a16", family, **sizes)
    assert "whose inputs are not quantized" in explain(ask(only, "vllm"))
    blocks = make(tmp_path / "b", "autofp8", "fp8-block", family, **sizes, **{name: 256})
    assert explain(ask(blocks, "vllm")) == ""
    assert explain(ask(blocks, "vllm", 2))
    for form in ("autofp8", "compressed-tensors"):
        odd = make(tmp_path / f"o-{form}", form, "fp8-block", family, **sizes, **{name: 160})
        assert "has 160 outputs, no multiple of 128" in explain(ask(odd, "sglang"))
        assert bool(explain(ask(odd, "vllm"))) is (form == "compressed-tensors")


@pytest.mark.parametrize(
    ("tp", "size", "finer"),
    [(1, 160, 32), (2, 384, 64), (4, 384, 32), (1, 144, 0), (4, 320, 0), (4, 512, 0)],
)
def test_vllms_fp8_method_repeats_the_scales_of_experts(
    tmp_path: Path, tp: int, size: int, finer: int
) -> None:
    """By hand: 4 x 128 fills blocks; 144 and 320 / 4 = 80 share 16 with 128, under its 32."""
    sizes = {
        "hidden_size": 256,
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "moe_intermediate_size": size,
    }
    folder = make(tmp_path, "autofp8", "fp8-block", "qwen3_moe", **sizes)
    report = ask(folder, "vllm", tp)
    assert any(f"for blocks of {finer}, which" in problem for problem in report.problems) is (
        finer > 0
    )
    assert bool(explain(report)) is (finer == 0 and size != 512)
    assert bool(explain(ask(folder, "sglang", tp))) is (size != 512)


def test_a_config_that_is_not_read_is_told(tmp_path: Path) -> None:
    folder = make(tmp_path, "compressed-tensors", "fp8-static", **WHOLE)
    change_config(folder, transform_config={"a": 1})
    report = ask(folder, "vllm")
    assert any("what engines do with the FP8 weights is not checked" in p for p in report.unknown)
    assert not report.ok


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8", "modelopt"])
@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_weight_without_its_scale_is_misread(tmp_path: Path, form: str, scale: str) -> None:
    folder = make(tmp_path, form, "fp8-static", **WHOLE)
    name = f"model.layers.1.mlp.down_proj.{scale}"
    assert ask(folder, "vllm").weights is None
    change_tensors(folder, lambda tensors: tensors.pop(name) and None)
    for engine in ("vllm", "sglang", "transformers"):
        report = ask(folder, engine)
        assert not report.ok
        assert report.weights is not None
        if engine != "transformers" or form == "compressed-tensors":
            assert name in report.weights.why


def test_files_that_the_index_leaves_out_are_not_judged(tmp_path: Path) -> None:
    """Mistral's folders hold the weights twice, once with `qscale_weight` beside them."""
    folder = make(tmp_path, "compressed-tensors", "fp8-static", **WHOLE)
    again = {"layers.0.attention.wq.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    save_file(again, folder / "consolidated.safetensors", metadata={"format": "pt"})
    named = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / named)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / named), named)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ask(folder, "sglang").ok
    assert (
        "layers.0.attention.wq.weight is not in the model's class" in ask(folder, "vllm").unknown[0]
    )


def test_scales_per_tensor_under_transformers_own_names(tmp_path: Path) -> None:
    """Transformers 5.23 loads such weights right, and vLLM 0.32.0 those of Mistral 3 alone."""
    folder = make(tmp_path, "autofp8", "fp8-static", **WHOLE)
    assert ask(folder, "transformers").weights is not None
    tensors = {
        name.replace(".weight_scale", ".weight_scale_inv").replace(
            ".input_scale", ".activation_scale"
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert ask(folder, "transformers").weights is None
    assert "per-tensor scales named weight_scale and input_scale" in explain_refusal(
        ask(folder, "vllm")
    )


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "MIXED_PRECISION"])
def test_blocks_of_modelopt_are_served_in_a_mixed_precision(tmp_path: Path, algorithm: str) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128, "moe_intermediate_size": 128}
    folder = make(tmp_path, "autofp8", "fp8-block", "qwen3_moe", **sizes)
    tensors = load_file(folder / "model.safetensors")
    layers = {
        name.removesuffix(".weight_scale_inv"): {"quant_algo": "FP8_PB_WO", "group_size": 128}
        for name in tensors
        if name.endswith(".weight_scale_inv")
    }
    renamed = {name.replace("scale_inv", "scale"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quant_method="modelopt", quant_algo=algorithm, quantized_layers=layers)
    for engine in ("vllm", "sglang"):
        why = explain_refusal(ask(folder, engine))
        assert ("only with one scale per tensor" in why) is (algorithm == "FP8_PB_WO")


def test_the_older_name_of_blocks_is_told_to_be_unchecked(tmp_path: Path) -> None:
    """For experts alone vLLM knows it: it leaves other linears as if they were unquantized."""
    folder = make(tmp_path, "autofp8", "fp8-block", "llama")
    layers = {"model": {"quant_algo": "FP8_BLOCK_SCALES"}}
    algorithm = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    change_config(folder, quant_method="modelopt", **algorithm)
    report = ask(folder, "vllm")
    assert any("not checked: engines accept FP8_BLOCK_SCALES" in text for text in report.unknown)


def test_stacks_of_experts_are_told_to_be_unchecked(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
    folder = make(tmp_path, "autofp8", "fp8-block", "qwen3_moe", moe_intermediate_size=128, **sizes)
    assert not ask(folder, "vllm").unknown
    stack = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 256, 256)}
    change_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.to(torch.float8_e4m3fn) for name, tensor in stack.items()}
        ),
    )
    told = f"not checked where one tensor holds many experts ({next(iter(stack))})"
    assert any(told in reason for reason in ask(folder, "vllm").unknown)


def test_weights_that_are_misread_are_not_ok(tmp_path: Path) -> None:
    """In transformers, which serves this model's KV scales well."""
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", "granitemoe")
    report = ask(folder, "transformers")
    assert all(layer.ok for layer in report.layers)
    assert report.weights is not None
    assert report.weights.status == "misread"
    assert "random numbers" in report.weights.why
    assert not report.ok


def test_single_experts_of_llama4_are_loaded_in_transformers(tmp_path: Path) -> None:
    """As transformers 5.23 does: it makes the experts anew one by one, and finds all of them."""
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", "llama4_text")
    report = ask(folder, "transformers")
    assert report.ok
    assert not any("made anew" in problem for problem in report.problems)


def test_an_unquantized_model_has_no_faults(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors |= {
        f"model.layers.{i}.self_attn.{role}_scale": torch.ones(1) for i in (0, 1) for role in "kv"
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    for engine in list_defaults():
        report = ask(tmp_path / "model", engine)
        assert report.weights is None
        assert not any("weights" in problem for problem in report.problems)


def test_ranks_have_to_share_out_every_weight(tmp_path: Path) -> None:
    """250 channels between 4 ranks; transformers has none."""
    sizes = {**WHOLE, "intermediate_size": 250}
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", **sizes)
    for engine in ("vllm", "sglang", "tgi"):
        assert not explain_refusal(ask(folder, engine, 2))
        assert "does not divide the 250 channels" in explain_refusal(ask(folder, engine, 4))
    assert not explain_refusal(ask(folder, "transformers", 4))


DOWN = "model.layers.1.mlp.down_proj"


def forget(folder: Path) -> None:
    """Store a linear as the model has it, and say nothing of that in the config."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
            shape = tensors.pop(name).shape
            if name.endswith(".weight"):
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)

    change_tensors(folder, change)


@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8"])
def test_a_linear_that_the_config_takes_for_fp8_is_misread(tmp_path: Path, form: str) -> None:
    folder = make(tmp_path, form, "fp8-static", **WHOLE)
    forget(folder)
    verdict = ask(folder, "vllm").weights
    assert verdict is not None
    assert verdict.why.startswith(f"{DOWN} is not quantized")


@pytest.mark.parametrize(
    ("form", "key"), [("compressed-tensors", "ignore"), ("autofp8", "ignored_layers")]
)
@pytest.mark.parametrize("name", [DOWN, f"language_model.{DOWN}"])
def test_a_linear_that_the_config_leaves_out_is_not(
    tmp_path: Path, form: str, key: str, name: str
) -> None:
    """By its own path; engines know paths of a text part only in multimodal models."""
    folder = make(tmp_path, form, "fp8-static", **WHOLE)
    forget(folder)
    change_config(folder, **{key: ["lm_head", name]})
    assert (ask(folder, "vllm").weights is None) is (name == DOWN)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_that_nobody_quantized_are_never_blamed(tmp_path: Path, name: str) -> None:
    """Routers and mixers have parameters of their own beside the weight."""
    families.save(name, FAMILIES[name], tmp_path / "model")
    opened = open_folder(tmp_path / "model")
    geometry = read_geometry(tmp_path / "model", opened.config)

    engines = check_folder(
        opened, geometry, [*list_defaults(), "vllm==0.32", "vllm-gaudi"], 1
    ).engines

    assert {key: report.weights for key, report in engines.items() if report.weights} == {}


@pytest.mark.parametrize(
    ("name", "misread"),
    [
        ("llama", ""),
        ("gptj", "transformer.h.0.attn."),  # the class does not say that qkv_proj joins these
        ("stablelm", "model.layers.0.self_attn."),
        ("granitemoehybrid", "model.layers.0.mamba.in_proj"),  # vLLM calls it mixer.in_proj
        ("falcon_h1", "model.layers.0.self_attn."),  # model.layers.0.qkv_proj
        ("minimax_m2", "model.layers.0.block_sparse_moe.experts"),  # mlp.experts
        ("lfm2", ""),
        ("gemma3n_text", "model.altup_projections.0"),  # self_decoder.altup_projections.0
    ],
)
def test_vllm_compares_its_own_paths_with_lists(tmp_path: Path, name: str, misread: str) -> None:
    """Every matrix is excluded by its name in the checkpoint (vLLM 0.32.0, run)."""
    if name in FAMILIES:
        families.save(name, FAMILIES[name], tmp_path / "model")
    else:
        zoo.save(name, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    ignored = [each.removesuffix(".weight") for each in load_file(weights)]
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignored}
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": fields}))

    found = ask(tmp_path / "model", "vllm==0.32").weights

    assert (str(found.status) if found else "") == ("misread" if misread else "")
    assert found is None or misread in found.why


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", ""),
        ("granitemoehybrid", "model.layers.0.mixer.in_proj"),
        ("minimax_m2", "model.layers.0.mlp.experts"),
        ("stablelm", "model.layers.0.self_attn.qkv_proj"),
    ],
)
def test_a_quark_config_for_the_cache_excludes_all_linears(
    tmp_path: Path, name: str, path: str
) -> None:
    """VLLM 0.32.0 asks it for a scheme of the others (AttributeError, run)."""
    if name in FAMILIES:
        families.save(name, FAMILIES[name], tmp_path / "model")
    else:
        zoo.save(name, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    names = [each.removesuffix(".weight") for each in load_file(weights)]
    fields = {"quant_method": "quark", "exclude": names, "export": {"kv_cache_group": []}}
    config_path = tmp_path / "model" / "config.json"
    config_path.write_text(json.dumps({**config, "quantization_config": fields}))

    found = ask(tmp_path / "model", "vllm==0.32").weights

    assert path in (found.why if found else "")
    assert bool(found) is bool(path)


@pytest.mark.parametrize("is_excluded", [True, False])
def test_a_quark_config_for_the_cache_excludes_convolutions(
    tmp_path: Path, is_excluded: bool
) -> None:
    """VLLM 0.32.0 has no scheme for them (NotImplementedError, run)."""
    families.save("lfm2", FAMILIES["lfm2"], tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    names = [each.removesuffix(".weight") for each in load_file(weights)]
    kept = [name for name in names if is_excluded or not name.endswith("conv.conv")]
    assert (len(kept) < len(names)) is not is_excluded
    fields = {"quant_method": "quark", "exclude": kept, "export": {"kv_cache_group": []}}
    config_path = tmp_path / "model" / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "quantization_config": fields}))

    unknown = ask(tmp_path / "model", "vllm==0.32").unknown

    assert any("conv.conv" in why and "--run" in why for why in unknown) is not is_excluded


def test_types_are_read_in_capitals_too(tmp_path: Path) -> None:
    """As vLLM 0.32.0 does (run)."""
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", **WHOLE)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "Float"
    (folder / "config.json").write_text(json.dumps(config))
    assert ask(folder, "vllm==0.32").weights is None


@zoo.NEEDS_5_23
@pytest.mark.parametrize("ignore", ["", "*.experts"], ids=["quantized", "unquantized"])
@pytest.mark.parametrize(
    ("missing", "status"),
    [
        (r"model\.layers\.1\..*\.experts\.0\.", "refused"),
        (r"model\.layers\.1\..*\.experts\.1\.w1\.", "refused"),
        (r"model\.layers\.1\..*\.experts\.", "misread"),
    ],
    ids=["an expert", "a projection", "a layer"],
)
def test_transformers_joins_all_experts_of_a_layer_or_none(
    tmp_path: Path, ignore: str, missing: str, status: str
) -> None:
    folder = make(tmp_path, "autofp8", "fp8-block", "mixtral", ignore, **WHOLE)

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.match(missing, name)]:
            del tensors[name]

    change_tensors(folder, remove)
    try:
        AutoModelForCausalLM.from_pretrained(folder)
        loads = True
    except RuntimeError:
        loads = False

    found = ask(folder, "transformers").weights
    assert found is not None
    assert found.status == status
    assert (status != "refused") is loads


@pytest.mark.parametrize("name", ["experts.0.", "experts."], ids=["an expert", "a layer"])
def test_experts_that_are_not_stored_are_memory_in_vllm(tmp_path: Path, name: str) -> None:
    """As in 0.32.0 (run); they are not quantized."""
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", "mixtral", "*.experts", **WHOLE)

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for each in [each for each in tensors if f"layers.1.block_sparse_moe.{name}" in each]:
            del tensors[each]

    change_tensors(folder, remove)
    found = ask(folder, "vllm==0.32").weights
    assert found is not None
    assert found.status == "misread"
    assert f"layers.1.block_sparse_moe.{name}" in found.why
    assert "is missing: the engine uses uninitialised memory" in found.why


@pytest.mark.parametrize(("name", "is_misread"), [("gpt_oss", True), ("llama", False)])
def test_quarks_loader_of_gpt_oss_finds_no_stacks(
    tmp_path: Path, name: str, is_misread: bool
) -> None:
    """With Quark's config vLLM 0.32.0 leaves the experts uninitialised (run)."""
    zoo.save(name, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = {"quant_method": "quark", "exclude": ["re:.*"], "export": {"kv_cache_group": []}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": fields}))

    found = ask(tmp_path / "model", "vllm==0.32").weights

    assert bool(found) is is_misread
    assert found is None or found.why.endswith("it is uninitialised memory")


@pytest.mark.parametrize("name", ["granitemoe", "qwen3_moe", "llama"])
@pytest.mark.parametrize("excludes_experts", [True, False])
def test_stacks_of_experts_in_16_bits_are_excluded_or_cast(
    tmp_path: Path, name: str, excludes_experts: bool
) -> None:
    """FP8 experts are created by the config, whatever is stored (vLLM 0.32.0; granitemoe: run)."""
    if name in FAMILIES:
        families.save(name, FAMILIES[name], tmp_path / "model")
    else:
        zoo.save(name, tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    ignored = [each.removesuffix(".weight") for each in load_file(weights) if "experts" not in each]
    places = {each.partition("_moe.")[0] + "_moe" for each in ignored if "input_linear" in each}
    places |= {each.partition(".mlp.gate")[0] + ".mlp" for each in ignored if ".mlp.gate" in each}
    ignored += [f"{place}.experts" for place in places] if excludes_experts else []
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignored}
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": fields}))

    found = ask(tmp_path / "model", "vllm==0.32").weights

    is_cast = name != "llama" and not excludes_experts
    assert (found is not None and "experts.0." in found.why) is is_cast


def test_transformers_takes_codes_of_modelopt_for_weights(tmp_path: Path) -> None:
    """Of every type (transformers 5.23, run)."""
    folder = make(tmp_path, "modelopt", "fp8-static", **WHOLE)
    tensors = load_file(folder / "model.safetensors")
    codes = {name: each for name, each in tensors.items() if each.dtype == torch.float8_e4m3fn}
    tensors |= {name: each.float().clamp(-127, 127).to(torch.int8) for name, each in codes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    found = ask(folder, "transformers").weights

    assert found is not None
    assert (found.status, "is I8" in found.why) == ("misread", True)


def test_transformers_derives_blocks_from_the_scales(tmp_path: Path) -> None:
    """A config with other blocks than those of the file is not used (5.23, run on a CPU)."""
    folder = make(tmp_path, "autofp8", "fp8-block", **WHOLE)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))

    assert ask(folder, "transformers").weights is None


@pytest.mark.parametrize(("states", "is_refused"), [(8, True), (128, False)])
def test_vllm_splits_the_input_projection_of_mixers(states: int, is_refused: bool) -> None:
    """8 states of one group do not fill a block (granitemoehybrid, vLLM 0.32.0, run)."""
    linear = QuantizedLinear(
        module="model.layers.0.mamba.in_proj",
        shape=(2 * 512 + 2 * states + 8, 256),
        scheme="fp8-block",
        block=(128, 128),
    )
    config = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": states}
    weights = QuantizedWeights(
        dialect="compressed-tensors", config=config, linears=(linear,), unquantized=()
    )

    for engine in ("vllm", "sglang"):
        found = list_block_findings(engine, weights, EMPTY, 1)
        assert bool(found) is (is_refused and engine == "vllm")


@pytest.mark.parametrize(
    ("name", "scheme", "is_refused"),
    [
        ("bloom", "fp8-static", True),
        ("bloom", "fp8-block", True),
        ("bloom", "fp8-dynamic", False),
        ("falcon", "fp8-static", False),
        ("falcon", "fp8-block", True),
    ],
)
def test_vllm_reshapes_scales_of_query_key_value(name: str, scheme: str, is_refused: bool) -> None:
    """As it does the weight (0.32.0, run)."""
    weights = QuantizedWeights(
        dialect="compressed-tensors",
        config={"model_type": name},
        linears=(
            QuantizedLinear(
                module="transformer.h.0.self_attention.query_key_value",
                shape=(768, 256),
                scheme=scheme,
                block=(128, 128) if scheme == "fp8-block" else None,
            ),
        ),
        unquantized=(),
    )

    rules = find_replayed("vllm").weight_rules
    found = [each.status for each in apply_rules("vllm", rules, weights)]

    assert (Status.REFUSED in found) is is_refused


def test_a_subclass_of_the_fp8_method_casts_weights_too(tmp_path: Path) -> None:
    """As `models/deepseek_v4/quant_config.py` of vLLM 0.32.0 does (run)."""
    zoo.save("llama", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = {"quant_method": "deepseek_v4_fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": fields}))

    found = ask(tmp_path / "model", "vllm==0.32").weights

    assert found is not None
    assert (found.status, "is not quantized" in found.why) == ("misread", True)


def test_transformers_computes_nan_of_e5m2_in_blocks(tmp_path: Path) -> None:
    """With compressed-tensors 0.20 (run)."""
    folder = make(tmp_path, "compressed-tensors", "fp8-block", **WHOLE)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    found = ask(folder, "transformers").weights

    assert found is not None
    assert (found.status, "F8_E5M2" in found.why) == ("misread", True)


def test_experts_per_channel_with_static_inputs_are_refused_by_vllm(tmp_path: Path) -> None:
    """As auto-round writes them; vLLM 0.32 stopped with an AssertionError."""
    zoo.save("qwen3_moe", tmp_path / "m")
    out, static = tmp_path / "out", tmp_path / "static"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp8calib.quantize(tmp_path / "m", "fp8-dynamic", out)
    static.mkdir()
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor([0.5])
    save_file(tensors, static / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    (static / "config.json").write_text(json.dumps(config))

    found = {each: fp8calib.check(each, engine="vllm").engines["vllm"] for each in (out, static)}

    assert found[out].ok
    assert found[static].weights is not None
    assert found[static].weights.status == "refused"
    assert "it runs FP8 experts with a scale per tensor" in found[static].weights.why
