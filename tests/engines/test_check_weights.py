"""What `check` says of FP8 weights beside their KV scales, by engine, form and number of ranks."""

import json
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.check import check_folder
from fp8calib.engines.facts.release import SGLANG_RELEASES, VLLM_RUN
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.weights.blocks import list_block_findings
from fp8calib.engines.weights.linears import LinearGroup, StoredLinear
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.formats.fp8.registry import FP8_DIALECTS, list_written_fp8
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.schemes import find_scheme
from fp8calib.quantization.calibrated_scales import find_scales
from fp8calib.quantization.select import find_selection
from fp8calib.quantization.settings import PlanSettings
from tests import zoo
from tests.cli.program import succeed
from tests.doors import make_plan, run_calibration
from tests.kit.checkpoints import (
    WEIGHTS,
    Tensors,
    change_config,
    change_quantization,
    change_tensors,
)
from tests.quantization.by_hand import run
from tests.zoo import draw

WHOLE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
"""A llama of 4 query heads and 2 KV heads, all of whose linears fill blocks of 128."""
CT = "compressed-tensors"
PAIRS = [
    (form.name, scheme)
    for form in list_written_fp8()
    for scheme in form.schemes
    if not find_scheme(scheme).is_mx
]
"""MXFP8 is in `test_check_mx.py`."""


_FOLDER = tempfile.TemporaryDirectory()
EMPTY = ModelGeometry(architecture="", model_type="", checkpoint_dtype="float32", layers=())


def make(
    folder: Path, form: str, scheme: str, family: str = "llama", ignore: str = "", **sizes: int
) -> Path:
    """Quantize a tiny model with KV scales; the same one is made once."""
    made = _make(form, scheme, family, ignore, tuple(sizes.items()))
    return Path(shutil.copytree(made, folder, dirs_exist_ok=True)) / "out"


@cache
def _make(
    form: str, scheme: str, family: str, ignore: str, sizes: tuple[tuple[str, int], ...]
) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    zoo.save(family, folder / "model", **dict(sizes))
    stats = run_calibration(folder / "model", make_plan(draw([20, 20])))[1]
    settings = PlanSettings(scheme=find_scheme(scheme), dialect=FP8_DIALECTS[form])
    with Checkpoint.open(folder / "model") as checkpoint:
        scales = find_scales(stats, checkpoint, settings, find_selection(checkpoint).require())
    ignored = (ignore,) if ignore else ()
    run(folder / "model", folder / "out", scheme, form, scales=scales, ignore=ignored)
    return folder


def ask(folder: Path, engine: str, tp: int = 1) -> EngineReport:
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    return check_folder(opened, geometry, [engine], tp)[engine]


def tell(report: EngineReport) -> str:
    """Give the status of the weights."""
    if report.weights is not None:
        return report.weights.status
    return "unknown" if report.unknown else "ok"


def explain_refusal(report: EngineReport) -> str:
    """Give why an engine does not start; empty where it does."""
    whys = {layer.k.why for layer in report.layers if layer.k.status == "refused"}
    assert len(whys) <= 1
    return next(iter(whys), "")


def explain(report: EngineReport) -> str:
    """Give why an engine does not start, or misreads the weights; empty where it does neither."""
    return explain_refusal(report) or (report.weights.why if report.weights else "")


def read_weights(folder: Path, engine: str = "vllm==0.32") -> tuple[str, str]:
    """Give the status of weights that an engine misreads or refuses, and why; "" where neither."""
    found = ask(folder, engine).weights
    return (found.status, found.why) if found else ("", "")


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


def test_sglang_wants_the_last_part_of_autofp8_whole_too() -> None:
    """Its `fp8.py` looks at every part; `fp8_utils.py`, for compressed-tensors, at all but it."""
    sizes = (("q", 256), ("k", 128), ("v", 100))
    linears = {f"model.layers.0.self_attn.{name}_proj": (rows, 256) for name, rows in sizes}
    for dialect, engines in (("compressed-tensors", []), ("autofp8", ["sglang"])):
        stored, group = describe(linears, "fp8-block", dialect=dialect)
        found = [
            release.key
            for release in (VLLM_RUN, SGLANG_RELEASES[-1])
            if list(list_block_findings(release, stored, [group], 1))
        ]
        assert found == engines


def describe(
    linears: Mapping[str, tuple[int, int]],
    scheme: str,
    *,
    dialect: str = "compressed-tensors",
    config: Mapping[str, object] = types.MappingProxyType({}),
    kind: str = "linear",
) -> tuple[Any, LinearGroup]:
    """Describe linears that an engine joins, all in one scheme."""
    members = (StoredLinear(module=each, shape=linears[each], tensors={}) for each in linears)
    group = LinearGroup(
        path="joined", kind=kind, members=tuple(members), state="config", listed="joined"
    )
    schemes = dict.fromkeys(linears, StoredScheme.of(find_scheme(scheme)))
    folder = types.SimpleNamespace(config=config)
    known = {"dialect": dialect, "folder": folder, "geometry": EMPTY, "schemes": schemes}
    return types.SimpleNamespace(**known), group


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


def test_vllms_fp8_method_doubles_the_scales_that_it_loaded_where_fp8_is_fnuz(
    tmp_path: Path,
) -> None:
    """There is none of q."""
    report = ask(make(tmp_path, "autofp8", "fp8-static", **WHOLE), "vllm")
    assert {(layer, str(role)) for layer, role in report.held} == set(product((0, 1), "qkv"))
    assert {(layer, str(role)) for layer, role in report.doubled} == set(product((0, 1), "kv"))


@pytest.mark.parametrize(
    ("form", "head_dim", "is_refused"),
    [("autofp8", 64, False), ("autofp8", 128, False), ("autofp8", 256, True), (CT, 128, True)],
)
def test_vllm_reorders_rows_of_llama4_inside_of_a_head(
    tmp_path: Path, form: str, head_dim: int, is_refused: bool
) -> None:
    sizes = {"hidden_size": 256, "head_dim": head_dim, "intermediate_size_mlp": 256}
    zoo.save("llama4_text", tmp_path / "m", **sizes)
    run(tmp_path / "m", tmp_path / "q", "fp8-block", form, ignore=["*.feed_forward"])
    assert ("it reorders the rows" in explain(ask(tmp_path / "q", "vllm"))) is is_refused


def test_the_inputs_of_a_row_are_cut_for_ranks(tmp_path: Path) -> None:
    folder = make(tmp_path, "autofp8", "fp8-block", "opt", hidden_size=256, ffn_dim=384)
    assert not explain(ask(folder, "vllm"))
    why = explain(ask(folder, "vllm", 2))
    assert "fc1 has 192 outputs on each of 2 ranks" in why


@pytest.mark.parametrize(
    ("tp", "size", "hidden", "finer"),
    [
        *[(1, 160, 256, 32), (2, 384, 256, 64), (2, 384, 288, 32), (4, 384, 256, 32)],
        *[(1, 144, 256, 0), (4, 320, 256, 0), (4, 512, 256, 0)],
    ],
)
def test_vllms_fp8_method_repeats_the_scales_of_experts(
    tmp_path: Path, tp: int, size: int, hidden: int, finer: int
) -> None:
    """By hand: 4 x 128 fills blocks; 144 and 320 / 4 = 80 share 16 with 128, under its 32."""
    sizes = {
        "hidden_size": hidden,
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


def test_experts_packed_as_integers_are_not_taken_for_misnamed_ones(tmp_path: Path) -> None:
    """As auto-round 0.16.1 writes W4A16; vLLM 0.32.0 has its kernels on GPUs alone."""
    folder = tmp_path / "model"
    zoo.save("qwen3_moe", folder, hidden_size=256, moe_intermediate_size=256)
    packed: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            out, size = weight.shape
            path = name.removesuffix(".weight")
            packed |= {
                name: None,
                f"{path}.qweight": torch.zeros(size // 8, out, dtype=torch.int32),
                f"{path}.qzeros": torch.zeros(size // 128, out // 8, dtype=torch.int32),
                f"{path}.scales": torch.ones(size // 128, out, dtype=torch.float16),
            }
    assert packed
    change_tensors(folder, packed)
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    formats = {"packing_format": "auto_round:auto_gptq", "data_type": "int"}
    change_config(folder, quantization_config={**settings, **formats})
    report = ask(folder, "vllm")
    assert report.weights is None
    assert any("'auto-round' are not judged offline" in why for why in report.unknown)


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
    change_tensors(folder, lambda _: renamed)
    change_quantization(
        folder, quant_method="modelopt", quant_algo=algorithm, quantized_layers=layers
    )
    for engine in ("vllm", "sglang"):
        why = explain_refusal(ask(folder, engine))
        assert ("only with one scale per tensor" in why) is (algorithm == "FP8_PB_WO")


def test_the_older_name_of_blocks_is_told_to_be_unchecked(tmp_path: Path) -> None:
    """For experts alone vLLM knows it: it leaves other linears as if they were unquantized."""
    folder = make(tmp_path, "autofp8", "fp8-block", "llama")
    layers = {"model": {"quant_algo": "FP8_BLOCK_SCALES"}}
    algorithm = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    change_quantization(folder, quant_method="modelopt", **algorithm)
    report = ask(folder, "vllm")
    assert any("not checked: engines accept FP8_BLOCK_SCALES" in text for text in report.unknown)


def test_stacks_of_experts_are_told_to_be_unchecked(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "vocab_size": 128}
    folder = make(tmp_path, "autofp8", "fp8-block", "qwen3_moe", moe_intermediate_size=128, **sizes)
    assert not ask(folder, "vllm").unknown
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change_tensors(folder, {name: torch.ones(4, 256, 256).to(torch.float8_e4m3fn)})
    told = f"not checked where one tensor holds many experts ({name})"
    assert any(told in reason for reason in ask(folder, "vllm").unknown)


def test_ranks_have_to_share_out_every_weight(tmp_path: Path) -> None:
    """250 channels between 4 ranks; transformers has none."""
    sizes = {**WHOLE, "intermediate_size": 250}
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", **sizes)
    for engine in ("vllm", "sglang"):
        assert not explain_refusal(ask(folder, engine, 2))
        assert "does not divide the 250 channels" in explain_refusal(ask(folder, engine, 4))
    assert not explain_refusal(ask(folder, "transformers", 4))


def exclude_all(family: str, folder: Path, key: str, **fields: Any) -> Path:
    """Save a model whose config excludes every tensor from quantization by its stored name."""
    zoo.save(family, folder)
    names = [name.removesuffix(".weight") for name in load_file(folder / WEIGHTS)]
    return change_quantization(folder, **{key: names}, **fields)


QUARK_LISTS = {"key": "exclude", "quant_method": "quark", "export": {"kv_cache_group": []}}


def keep_linears(quantization: dict[str, Any]) -> None:
    """Take the convolutions from the list of what is excluded."""
    excluded = quantization["exclude"]
    quantization["exclude"] = [name for name in excluded if not name.endswith("conv.conv")]
    assert len(quantization["exclude"]) < len(excluded)


@pytest.mark.parametrize("is_excluded", [True, False])
def test_a_quark_config_for_the_cache_excludes_convolutions(
    tmp_path: Path, is_excluded: bool
) -> None:
    """VLLM 0.32.0 has no scheme for them (NotImplementedError, run)."""
    folder = exclude_all("lfm2", tmp_path / "model", **QUARK_LISTS)
    if not is_excluded:
        change_config(folder, lambda config: keep_linears(config["quantization_config"]))
    unknown = ask(folder, "vllm==0.32").unknown
    assert any("conv.conv" in why and "vllm check" in why for why in unknown) is not is_excluded


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
    change_tensors(folder, lambda all_: {n: t for n, t in all_.items() if not re.match(missing, n)})
    try:
        AutoModelForCausalLM.from_pretrained(folder)
        loads = True
    except RuntimeError:
        loads = False

    assert read_weights(folder, "transformers")[0] == status
    assert (status != "refused") is loads


@pytest.mark.parametrize("name", ["experts.0.", "experts."], ids=["an expert", "a layer"])
def test_experts_that_are_not_stored_are_memory_in_vllm(tmp_path: Path, name: str) -> None:
    """As in 0.32.0 (run); they are not quantized."""
    folder = make(tmp_path, "compressed-tensors", "fp8-dynamic", "mixtral", "*.experts", **WHOLE)
    path = f"layers.1.block_sparse_moe.{name}"
    change_tensors(folder, lambda all_: {n: each for n, each in all_.items() if path not in n})
    status, why = read_weights(folder)
    assert status == "misread"
    assert path in why
    assert "is missing: the engine uses uninitialised memory" in why


def test_targets_may_be_the_paths_of_linears(tmp_path: Path) -> None:
    folder = make(tmp_path, CT, "fp8-dynamic", **WHOLE)
    tensors = load_file(folder / "model.safetensors").items()
    paths = [name[: -len(".weight")] for name, x in tensors if x.dtype is torch.float8_e4m3fn]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = {**config["config_groups"]["group_0"], "targets": paths}
    change_quantization(folder, config_groups={"group_0": group})
    assert tell(ask(folder, "vllm==0.32")) == "ok"


@pytest.mark.parametrize(
    ("missing", "scale_of_q", "status"),
    [
        ("v", None, "unknown"),
        ("kv", None, "unknown"),
        ("v", 3.0, "misread"),
        ("q", None, "misread"),
    ],
)
def test_joined_linears_may_have_the_scale_of_those_beside_them(
    tmp_path: Path, missing: str, scale_of_q: float | None, status: str
) -> None:
    """As vLLM 0.32.0 does (run) where the last scale is missing: q, k and v then have one scale.

    SGLang's method `fp8` keeps a scale for each of them.
    """
    folder = make(tmp_path, "autofp8", "fp8-static", **WHOLE)
    path = "model.layers.1.self_attn.{}_proj.weight_scale"
    changed = {path.format(each): None for each in missing}
    if scale_of_q is not None:
        changed[path.format("q")] = torch.tensor(scale_of_q)
    change_tensors(folder, changed)
    assert tell(ask(folder, "vllm==0.32")) == status
    assert tell(ask(folder, "sglang")) == "misread"


def test_an_entry_for_one_expert_leaves_out_those_of_the_layer(tmp_path: Path) -> None:
    """As `is_layer_skipped` of both engines does for the method fp8."""
    folder = make(tmp_path, "autofp8", "fp8-static", "mixtral", "*.experts", **WHOLE)
    experts = [f"model.layers.{n}.block_sparse_moe.experts.0.w1" for n in range(2)]
    routers = [f"model.layers.{n}.block_sparse_moe.gate" for n in range(2)]
    change_quantization(folder, ignored_layers=["lm_head", *experts, *routers])
    assert [tell(ask(folder, engine)) for engine in ("vllm", "sglang")] == ["ok", "ok"]


@pytest.mark.parametrize(("name", "is_misread"), [("gpt_oss", True), ("llama", False)])
def test_quarks_loader_of_gpt_oss_finds_no_stacks(
    tmp_path: Path, name: str, is_misread: bool
) -> None:
    """With Quark's config vLLM 0.32.0 leaves the experts uninitialised (run)."""
    folder = exclude_all(name, tmp_path / "model", **QUARK_LISTS)
    status, why = read_weights(change_quantization(folder, exclude=["re:.*"]))
    assert bool(status) is is_misread
    assert why.endswith("it is uninitialised memory" if is_misread else "")


def store_int8(tensors: Tensors) -> Tensors:
    """Store codes as whole numbers."""
    codes = {name: each for name, each in tensors.items() if each.dtype == torch.float8_e4m3fn}
    return tensors | {n: each.float().clamp(-127, 127).to(torch.int8) for n, each in codes.items()}


def store_e5m2(tensors: Tensors) -> Tensors:
    """Store a weight in another format."""
    name = "model.layers.0.self_attn.q_proj.weight"
    return tensors | {name: tensors[name].float().to(torch.float8_e5m2)}


@pytest.mark.parametrize(
    ("form", "scheme", "change", "config", "dtype"),
    [
        # it takes codes of ModelOpt for weights, whatever their type
        ("modelopt", "fp8-static", store_int8, {}, "I8"),
        # NaN, with compressed-tensors 0.20
        ("compressed-tensors", "fp8-block", store_e5m2, {}, "F8_E5M2"),
        # it derives blocks from the scales, not from the config
        ("autofp8", "fp8-block", dict, {"weight_block_size": [64, 64]}, ""),
    ],
)
def test_what_transformers_makes_of_other_types_and_blocks(
    tmp_path: Path,
    form: str,
    scheme: str,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    dtype: str,
) -> None:
    """Transformers 5.23, run on a CPU."""
    folder = make(tmp_path, form, scheme, **WHOLE)
    change_quantization(change_tensors(folder, change), **config)
    status, why = read_weights(folder, "transformers")
    assert (status, f"is {dtype}" in why) == (("misread", True) if dtype else ("", False))


@pytest.mark.parametrize(("states", "is_refused"), [(8, True), (128, False)])
def test_vllm_splits_the_input_projection_of_mixers(states: int, is_refused: bool) -> None:
    """8 states of one group do not fill a block (granitemoehybrid, vLLM 0.32.0, run)."""
    linears = {"model.layers.0.mamba.in_proj": (2 * 512 + 2 * states + 8, 256)}
    config = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": states}
    stored, group = describe(linears, "fp8-block", config=config)

    for release in (VLLM_RUN, SGLANG_RELEASES[-1]):
        found = list(list_block_findings(release, stored, [group], 1))
        assert bool(found) is (is_refused and release is VLLM_RUN)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latent_projections_in_16_bits_are_named_as_each_engine_joins_them(
    tmp_path: Path, engine: str
) -> None:
    """`fused_qkv_a_proj` in vLLM 0.32.0, `fused_qkv_a_proj_with_mqa` in SGLang 0.5.23."""
    zoo.save("glm4_moe_lite", tmp_path / "model")
    patterns = ("--ignore", "*.q_a_proj", "--ignore", "*.kv_a_proj_with_mqa")
    scheme = ("--scheme", "fp8-dynamic", "--no-check")

    succeed("quantize", tmp_path / "model", *scheme, *patterns, "--out", tmp_path / "out")

    found = ask(tmp_path / "out", engine)
    assert found.weights is None
    assert not found.unknown
