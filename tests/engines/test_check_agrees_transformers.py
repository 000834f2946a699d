"""What `check` says of transformers is what `from_pretrained` does, case by case."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.status import Status
from fp8calib.formats.convert import convert_table
from fp8calib.formats.read import read_scales
from fp8calib.formats.write import write_table
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.formats import E4M3FN
from tests import zoo
from tests.cli.quantized_children import save_fp4
from tests.engines.check_handmade import FP8, PER_HEAD, PER_TENSOR
from tests.engines.test_check_weights import WHOLE, ask, explain_refusal, make
from tests.engines.test_weight_contents import CT, DOWN
from tests.engines.vllm_cases import find_config
from tests.formats.foreign import FOLDER, LLAMA_ATTENTION, find_geometry
from tests.kit import answers
from tests.kit.checkpoints import change_config, change_quantization, change_tensors
from tests.kit.minutes import in_minutes, takes_minutes
from tests.kit.multimodal import MULTIMODAL, build_config, build_tokenizer

pytest.importorskip("compressed_tensors")
pytestmark = zoo.NEEDS_5_23

PAIR = {"k_scale": [0.25], "v_scale": [0.3]}
_ROWS = json.loads(Path(__file__).with_name("kv_cases.json").read_text())
HANDMADE, SCHEMES = _ROWS["transformers"], _ROWS["schemes of transformers"]
KNOWN = {"ct": dict(PER_TENSOR), "per head": dict(PER_HEAD), "fp8": FP8}
IN_MINUTES = [each for each in SCHEMES if {"strategy", "dynamic"} <= each.keys()]

TOOLS = (
    "llmcompressor-fp8-static-kv",
    "llmcompressor-kv",
    "llmcompressor-kv-head",
    "modelopt-fp8-kv",
    "modelopt-kv",
    "quark-fp8-kv",
    "quark-autofp8-kv",
)


def _save(folder: Path, quantization: object, scales: Mapping[str, object]) -> Path:
    """Write the llama with scales in its one file."""
    tensors = load_file(FOLDER / "llama" / "model.safetensors")
    for index in range(2):
        for suffix, number in scales.items():
            name = f"{LLAMA_ATTENTION.format(index)}.{suffix}"
            tensors[name] = torch.as_tensor(number).clone()
    config = json.loads((FOLDER / "llama" / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    return _save_folder(folder, tensors, config)


def _save_tool(folder: Path, name: str) -> Path:
    """Write what a tool wrote, with the weights that were left out of it."""
    weights = load_file(FOLDER / "llama" / "model.safetensors")
    tensors = weights | load_file(FOLDER / name / "model.safetensors")
    return _save_folder(folder, tensors, json.loads((FOLDER / name / "config.json").read_text()))


def _save_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _compare(folder: Path, *, runs: bool = False) -> EngineReport:
    """Load the folder in transformers and hold every verdict against the modules.

    Where `runs`, the model also runs, which is the first to fail at some scales.
    """
    opened = open_folder(folder)
    report = check_folder(opened, find_geometry("llama"), ["transformers"], 1)["transformers"]
    if report.layers[0].k.status is Status.UNKNOWN:
        with pytest.raises(ImportError):
            _load(folder, runs=runs)
        assert "is not installed here" in report.layers[0].k.why
        return report
    if report.layers[0].k.status is Status.REFUSED:
        with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever the engine raises
            _load(folder, runs=runs)
        return report
    modules, unexpected = _load(folder, runs=runs)
    for layer in report.layers:
        for role, verdict in (("k", layer.k), ("v", layer.v)):
            held = getattr(modules[layer.layer], f"{role}_scale", None)
            if verdict.value is not None and verdict.status is not Status.DROPPED:
                assert held is not None
                assert held.max().item() == verdict.value
            elif "unexpected" in verdict.why:
                assert held is None
            if verdict.status is Status.DROPPED and "unexpected" in verdict.why:
                assert any(name.startswith(f"model.layers.{layer.layer}.") for name in unexpected)
    return report


def _load(folder: Path, *, runs: bool = False) -> tuple[list[Any], set[str]]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    if runs:
        model(torch.tensor([[1, 2, 3]]))
    return [layer.self_attn for layer in model.model.layers], set(info["unexpected_keys"])


@pytest.mark.parametrize("name", HANDMADE)
def test_what_is_made_by_hand(tmp_path: Path, name: str) -> None:
    case = HANDMADE[name]
    config = find_config(case.get("quantization"), KNOWN)
    dtype = getattr(torch, case.get("dtype", "float32"))
    scales = {key: torch.tensor(x).to(dtype) for key, x in case.get("scales", PAIR).items()}
    _compare(_save(tmp_path / "model", config, scales), runs=True)


@pytest.mark.parametrize(
    ("name", "layers", "dtype"),
    [
        # transformers' class of text alone has other names than the checkpoint
        ("llama4", ["language_model.model.layers.0", "language_model.model.layers.1"], "float32"),
        # its text is in float32 and its experts are not, because the text's config has no dtype
        ("qwen3_5_moe", ["model.language_model.layers.1"], "bfloat16"),
    ],
)
def test_what_becomes_of_the_scales_of_a_wrapped_model(
    tmp_path: Path, name: str, layers: list[str], dtype: str
) -> None:
    built = build_config(name, build_tokenizer(MULTIMODAL[name]))
    model = AutoModelForMultimodalLM.from_config(built, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    for number, layer in enumerate(layers):
        scale = torch.tensor([0.25 + number])
        tensors |= {f"{layer}.self_attn.{role}_scale": scale.clone() for role in "kv"}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["quantization_config"] = PER_TENSOR
    folder = _save_folder(tmp_path / "model", tensors, config)
    report = check_folder(open_folder(folder), read_geometry(folder, config), ["transformers"], 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded(torch.tensor([[1, 2, 3]]))
    held = [each.k_scale.item() for each in loaded.modules() if hasattr(each, "k_scale")]
    assert held == [layer.k.value for layer in report["transformers"].layers]
    assert held == [0.25 + number for number in range(len(layers))]


@pytest.mark.parametrize(
    "changes",
    [*(each for each in SCHEMES if each not in IN_MINUTES), *in_minutes(*IN_MINUTES)],
    ids=json.dumps,
)
def test_schemes_of_the_cache(tmp_path: Path, changes: dict[str, object]) -> None:
    scheme = {**PER_TENSOR["kv_cache_scheme"], **changes}  # type: ignore[dict-item]
    config = {**PER_TENSOR, "kv_cache_scheme": scheme}
    _compare(_save(tmp_path / "model", config, PAIR), runs=True)


def test_attention_that_calls_its_cache_otherwise_uses_no_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers 5.24, which renamed the argument; with 5.23 a line says so."""
    folder = _save(tmp_path / "model", PER_TENSOR, PAIR)
    assert any("transformers 5.24 uses no KV scale" in each for each in _compare(folder).problems)
    original = LlamaAttention.forward

    def forward(self: Any, *arguments: Any, cache: Any = None, **others: Any) -> Any:
        del cache  # only its name counts
        return original(self, *arguments, **others)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(answers, "_ANSWERS", {})
    report = _compare(folder)
    assert {(layer.k.status, layer.v.status) for layer in report.layers} == {("dropped", "dropped")}
    assert "finds no attention" in report.layers[0].k.why
    assert not any("5.24" in each for each in report.problems)


@pytest.mark.parametrize("name", TOOLS)
def test_what_tools_wrote(tmp_path: Path, name: str) -> None:
    report = _compare(_save_tool(tmp_path / "model", name), runs=True)
    assert report.ok is name.startswith("llmcompressor")


@pytest.mark.parametrize("form", ["kv-overlay", "kv-overlay-head", "tgi"])
def test_what_we_write(tmp_path: Path, form: str) -> None:
    geometry = find_geometry("llama")
    table = read_scales(FOLDER / "llmcompressor-kv-head", geometry)
    fitted = convert_table(table, fmt=E4M3FN, per_head=form == "kv-overlay-head")
    with Checkpoint.open(FOLDER / "llama") as source:
        write_table(fitted, form, tmp_path / "out", source=source)

    report = _compare(tmp_path / "out")

    assert report.ok is (form != "tgi")
    if report.ok:
        modules, _ = _load(tmp_path / "out")
        for module, (_, attention) in zip(modules, geometry.attentions(), strict=True):
            for role in ("k", "v"):
                stored = getattr(module, f"{role}_scale").float().flatten()
                expected = fitted.scales[attention.site(role)].values.flatten()  # type: ignore[arg-type]
                assert stored.equal(expected)


ROUTED = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
ONE_BLOCK = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
ONES = torch.ones(1)
ATTENTION = "model.layers.1.self_attn"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"
Edit = Callable[[dict[str, torch.Tensor]], None]


def put(name: str, tensor: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


def store(module: str, dtype: torch.dtype) -> Edit:
    """Store a linear's weight in another dtype, without a scale."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        shape = tensors[f"{module}.weight"].shape
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.ones(shape, dtype=dtype)

    return edit


O_PROJ = f"{ATTENTION}.o_proj"
EXPERTS = (CT, "fp8-static", "qwen3_moe", ROUTED)
BLOCKS = ("autofp8", "fp8-block", "llama", WHOLE)


@pytest.mark.parametrize(
    ("made", "edit", "words"),
    [
        ((CT, "fp8-block", "qwen3_moe", ROUTED), None, "experts.down_proj cannot be converted"),
        ((CT, "fp8-block", "qwen3_moe", ONE_BLOCK), None, ""),
        ((CT, "fp8-dynamic", "qwen3_moe", ROUTED), None, ""),
        (EXPERTS, put(f"{EXPERT}.weight_packed", ONES), "AttributeError"),
        *(
            pytest.param(
                EXPERTS, put(f"{EXPERT}.{name}", ONES), "AttributeError", marks=takes_minutes
            )
            for name in ("weight_zero_point", "weight_shape")
        ),
        (EXPERTS, put(f"{EXPERT}.output_scale", ONES), ""),
        ((CT, "fp8-static", "llama", WHOLE), put(f"{O_PROJ}.weight_shape", ONES), ""),
        (BLOCKS, store(O_PROJ, torch.half), "o_proj fails with"),
        (BLOCKS, store(O_PROJ, torch.float32), ""),
        (BLOCKS, store("lm_head", torch.half), "lm_head fails with"),
    ],
)
def test_weights_are_refused_where_loading_or_running_fails(
    tmp_path: Path,
    made: tuple[str, str, str, Mapping[str, int]],
    edit: Edit | None,
    words: str,
) -> None:
    form, scheme, family, sizes = made
    folder = make(tmp_path, form, scheme, family, **sizes)
    if edit is not None:
        change_tensors(folder, edit)

    why = explain_refusal(ask(folder, "transformers"))

    assert (words in why) if words else (why == "")
    with pytest.raises((AttributeError, RuntimeError)) if words else nullcontext():
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(torch.arange(8)[None])


def test_a_value_that_the_config_lacks_is_found_where_kernels_replace_the_linears(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path, "mxfp8", "mxfp8", "mixtral", **WHOLE)
    assert explain_refusal(ask(folder, "transformers")) == ""
    change_config(folder, layer_types=["sliding_attention", "full_attention"], sliding_window=None)

    assert "'NoneType'" in explain_refusal(ask(folder, "transformers"))

    with pytest.raises(TypeError, match="'NoneType'"):
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(torch.arange(8)[None])


@pytest.mark.parametrize("expert", [None, 0, *in_minutes(2)])
def test_experts_are_given_their_scales_in_order(tmp_path: Path, expert: int | None) -> None:
    """One expert in 16 bits moves the scales of those after it, and the last has none."""
    folder = make(tmp_path, CT, "fp8-dynamic", "qwen3_moe", **ROUTED)
    original = load_file(tmp_path / "model" / "model.safetensors")
    if expert is not None:
        module = f"model.layers.1.mlp.experts.{expert}.down_proj"
        change_tensors(folder, store(module, torch.bfloat16))
        change_tensors(folder, put(f"{module}.weight", original[f"{module}.weight"].bfloat16()))

    weights = ask(folder, "transformers").weights

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    held = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    meant = torch.stack(
        [original[f"model.layers.1.mlp.experts.{n}.down_proj.weight"] for n in range(len(held))]
    )
    is_meant = bool(((held - meant).norm() / meant.norm()) < 0.1)
    assert is_meant is (expert is None)
    assert (weights is None) is is_meant
    if weights is not None:
        why = f"down_proj.weight has {len(held)} experts and {len(held) - 1} scales"
        assert (weights.status, why in weights.why) == ("misread", True)


@pytest.mark.parametrize(
    ("family", "form", "is_meant"),
    [
        ("llama", "nvfp4", True),
        ("llama", "mxfp4", True),
        ("qwen3_moe", "nvfp4", False),
        ("qwen3_moe", "mxfp4", True),
    ],
)
def test_global_scales_of_joined_experts_are_left_out(
    tmp_path: Path, family: str, form: str, is_meant: bool
) -> None:
    zoo.save(family, tmp_path / "model", **ONE_BLOCK, intermediate_size=64)
    folder = save_fp4(tmp_path / "child", form, base=tmp_path / "model")
    original = load_file(tmp_path / "model" / "model.safetensors")
    packed = [name for name in load_file(folder / "model.safetensors") if ".gate." in name]
    routers = {name: tensor for name, tensor in original.items() if ".gate." in name}
    change_tensors(folder, dict.fromkeys(packed) | routers)
    change_config(folder, dtype="bfloat16")

    weights = ask(folder, "transformers").weights

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model(torch.arange(8)[None])  # which unpacks linears
    if family == "llama":
        held, meant = model.get_parameter(f"{DOWN}.weight"), original[f"{DOWN}.weight"]
    else:
        held = model.get_parameter("model.layers.1.mlp.experts.down_proj")[2]
        meant = original[f"{EXPERT}.weight"]
    assert bool((held - meant).norm() / meant.norm() < 0.2) is is_meant
    assert (weights is None) is is_meant
    assert weights is None or "weight_global_scale is left out" in weights.why
    assert bool(ask(folder, "vllm").unknown) is (form == "mxfp4")  # sizes of experts are known


def restore(tensors: dict[str, torch.Tensor], original: Mapping[str, torch.Tensor]) -> None:
    """Store the FP8 weights in 16 bits, and keep their scales."""
    names = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    tensors.update({name: original[name].bfloat16() for name in names})


def store_integers(tensors: dict[str, torch.Tensor], _: Mapping[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].view(torch.int8)


def rename_scales(tensors: dict[str, torch.Tensor], _: Mapping[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[f"{name.removesuffix('.weight_scale')}.scale"] = tensors.pop(name)


def add_scale(tensors: dict[str, torch.Tensor], _: Mapping[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("form", "scheme", "edit", "words"),
    [
        ("modelopt", "fp8-dynamic", rename_scales, "is FP8, but transformers uses its codes"),
        ("autofp8", "fp8-block", restore, "is BF16, and transformers multiplies it by"),
        ("autofp8", "fp8-block", add_scale, ""),
        (CT, "fp8-dynamic", store_integers, "is I8: transformers takes its values for floats"),
    ],
)
def test_weights_are_multiplied_by_the_scales_that_are_read(
    tmp_path: Path,
    form: str,
    scheme: str,
    edit: Callable[[dict[str, torch.Tensor], Mapping[str, torch.Tensor]], None],
    words: str,
) -> None:
    folder = make(tmp_path, form, scheme, "llama", **WHOLE)
    original = load_file(tmp_path / "model" / "model.safetensors")
    change_tensors(folder, lambda tensors: edit(tensors, original))

    weights = ask(folder, "transformers").weights

    held = AutoModelForCausalLM.from_pretrained(folder).get_parameter(f"{DOWN}.weight").float()
    meant = original[f"{DOWN}.weight"]
    assert bool((held - meant).norm() / meant.norm() < 0.1) is (not words)
    assert (words in weights.why) if weights else not words


def test_weights_that_transformers_renames_are_judged(tmp_path: Path) -> None:
    """`backbone.` of a checkpoint is `model.` of transformers' nemotron_h."""
    folder = make(tmp_path, CT, "fp8-dynamic", "nemotron_h")
    name = "backbone.layers.0.mixer.in_proj.weight"
    codes = load_file(folder / "model.safetensors")[name]
    change_tensors(folder, {name: codes.view(torch.int8)})

    weights = ask(folder, "transformers").weights

    model = AutoModelForCausalLM.from_pretrained(folder)
    held = model.get_parameter(name.replace("backbone", "model")).float()
    meant = load_file(tmp_path / "model" / "model.safetensors")[name]
    assert (held - meant).norm() / meant.norm() > 0.1
    assert weights is not None
    assert weights.why == f"{name} is I8: transformers takes its values for floats"


@pytest.mark.parametrize(("family", "is_used"), [("llama4_text", True), ("qwen3_moe", False)])
def test_input_scales_of_experts_that_stay_apart_are_used(
    tmp_path: Path, family: str, is_used: bool
) -> None:
    """Those of experts that transformers joins in one tensor have no parameter."""
    folder = make(tmp_path, CT, "fp8-dynamic", family, **(ROUTED if family in zoo.ZOO else {}))
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    group["group_0"]["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    change_quantization(folder, config_groups=group)
    stored = load_file(folder / "model.safetensors")
    weights = [name for name in stored if stored[name].dtype is torch.float8_e4m3fn]
    modules = [name.removesuffix(".weight") for name in weights]
    name = next(f"{each}.input_scale" for each in modules if ".experts." in each)
    for each in modules:
        change_tensors(folder, put(f"{each}.input_scale", torch.ones(1)))
    change_tensors(folder, put(name, torch.zeros(1)))

    verdict = ask(folder, "transformers").weights

    held = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert any(not each.any() for key, each in held.items() if "input_scale" in key) is is_used
    told = None if verdict is None else (verdict.status, verdict.why)
    assert (told == ("bad", f"{name} holds 0")) is is_used


@pytest.mark.parametrize(("value", "sizes"), [(0.0, 1), (0.5, 1), (0.5, 2)])
def test_a_bias_that_the_class_lacks_is_lost(tmp_path: Path, value: float, sizes: int) -> None:
    """As where model_type was edited; some tools store biases of zeros for every linear.

    One of another size belongs to another model.
    """
    tensors = load_file(FOLDER / "llama" / "model.safetensors")
    config = json.loads((FOLDER / "llama" / "config.json").read_text())
    tensors["model.layers.1.input_layernorm.bias"] = torch.full(
        (config["hidden_size"] * sizes,), value
    )
    report = _compare(_save_folder(tmp_path / "model", tensors, config))
    said = "" if report.weights is None else report.weights.why
    lost = "model.layers.1.input_layernorm.bias is left out: its module has no bias by config.json"
    assert said == (lost if value and sizes == 1 else "")
    _, unexpected = _load(tmp_path / "model")
    assert unexpected == {"model.layers.1.input_layernorm.bias"}


@pytest.mark.parametrize("is_per_head", [False, True])
def test_scales_per_head_fail_on_latents(tmp_path: Path, *, is_per_head: bool) -> None:
    """llm-compressor writes one for each expanded head of DeepSeek; transformers caches latents."""
    zoo.save("deepseek_v3", tmp_path)
    shape = (4, 1, 1) if is_per_head else (1,)
    attentions = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for name in (f"{path}.{role}_scale" for path in attentions for role in "kv"):
        change_tensors(tmp_path, put(name, torch.full(shape, 0.25)))
    change_config(tmp_path, quantization_config=PER_HEAD if is_per_head else PER_TENSOR)

    why = explain_refusal(ask(tmp_path, "transformers"))

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    with pytest.raises(RuntimeError) if is_per_head else nullcontext():
        model(torch.arange(8)[None])
    assert bool(why) is is_per_head


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_algo": "FP8"}, "no `quant_method`"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "Activation scheme none"),
        ({"quant_method": "fp8", "activation_scheme": None}, "AttributeError"),
        ({"quant_method": "fp8", "scale_fmt": "e8m0"}, "got 'e8m0'"),
        ({"quant_method": "fp8"}, ""),
    ],
)
def test_a_config_is_refused_where_loading_fails(
    tmp_path: Path, section: Mapping[str, object], words: str
) -> None:
    """The experts of llama4 are replaced under compressed-tensors alone."""
    zoo.save("llama4_text", tmp_path)
    report = ask(change_config(tmp_path, quantization_config=section), "transformers")

    assert words in explain_refusal(report)
    assert bool(explain_refusal(report)) is bool(words)
    assert words or report.weights is None
    with pytest.raises((AttributeError, ValueError)) if words else nullcontext():
        _, loading = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype="auto", output_loading_info=True
        )
        assert not loading["missing_keys"]


@pytest.mark.parametrize("ignore", [["lm_head"], [], *in_minutes(None)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_with_the_weight_of_the_embedding_is_quantized_by_the_config(
    tmp_path: Path, ignore: list[str] | None, *, is_tied: bool
) -> None:
    """Its scale is not stored, so that it is whatever is in memory."""
    folder = make(tmp_path, CT, "fp8-dynamic", "llama", **WHOLE, tie_word_embeddings=is_tied)
    change_quantization(folder, ignore=ignore)
    assert any(name == "lm_head.weight" for name in load_file(folder / "model.safetensors")) is (
        not is_tied
    )

    weights = ask(folder, "transformers").weights

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        logits = model(torch.arange(8)[None]).logits
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(logits.isnan().any()) is (not ignore)
    assert (weights is not None) is (not ignore)
    assert weights is None or weights.status is Status.MISREAD


@pytest.mark.parametrize(
    ("form", "size", "status"),
    [
        (CT, 192, "refused"),
        pytest.param(CT, 100, "refused", marks=takes_minutes),
        (CT, 384, "fine"),
        ("autofp8", 192, "misread"),
        ("autofp8", 257, "refused"),
        ("autofp8", 100, "fine"),
        pytest.param("autofp8", 384, "fine", marks=takes_minutes),
    ],
)
def test_blocks_that_do_not_fill_a_weight(
    tmp_path: Path, form: str, size: int, status: str
) -> None:
    """Compressed-tensors needs whole groups of inputs; the `fp8` method spreads scales evenly."""
    folder = make(tmp_path, form, "fp8-block", **{**WHOLE, "intermediate_size": size})

    report = ask(folder, "transformers")

    judged = report.weights.status if report.weights else "fine"
    assert ("refused" if explain_refusal(report) else judged) == status
    with pytest.raises(RuntimeError) if status == "refused" else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model(torch.arange(8)[None])
    if status != "refused":
        stored = load_file(folder / "model.safetensors")
        codes = stored[f"{DOWN}.weight"].float()
        (scales,) = (stored[name] for name in stored if name.startswith(f"{DOWN}.weight_scale"))
        spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        meant = codes * spread[: codes.shape[0], : codes.shape[1]]
        is_meant = torch.allclose(model.get_submodule(DOWN).weight.float(), meant, rtol=1e-3)
        assert is_meant is (status == "fine")
