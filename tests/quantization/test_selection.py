"""What is taken for a linear, from names and shapes alone.

`modules.tsv` has a module a line, and why it is left. `default_lists.tsv` has what other tools
leave by default, pattern by pattern: nvidia-modelopt 0.47.0, auto-round 0.16.1, llmcompressor
0.14.0.1, compressed-tensors 0.20.0, and llm-compressor's FP8 examples at commit ab1ba3ef.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.replay.declared import matches_target
from fp8calib.errors import ModelError, UsageError
from fp8calib.quantization.select import Selection, check_unquantized, find_selection
from tests.quantization.by_hand import LAYER, Tensors, make_tensors, random, run, save

MATRIX = random(32, 48, seed=0)


def pick(folder: Path, tensors: Tensors, *ignore: str, **config: object) -> Selection:
    save(folder, tensors, **config)
    with Checkpoint.open(folder) as checkpoint:
        return find_selection(checkpoint, ignore=ignore).require()


def taken(selection: Selection) -> set[str]:
    return {matrix.module for matrix in selection.quantized}


def reasons(selection: Selection) -> dict[str, str]:
    return {item.module: item.why for item in selection.unquantized}


def read_table(name: str) -> list[list[str]]:
    """Read the rows of a table without its head."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[1:]
    return [["" if cell == "-" else cell for cell in line.split("\t")] for line in lines]


MODULES = dict(read_table("modules.tsv"))


def test_linears_are_taken_and_the_rest_is_left_with_its_reason(tmp_path: Path) -> None:
    found = pick(tmp_path, {f"{module}.weight": MATRIX.clone() for module in MODULES})
    assert reasons(found) | dict.fromkeys(taken(found), "quantized") == MODULES


def test_patterns_of_other_tools_are_left_or_have_a_reason(tmp_path: Path) -> None:
    rows = read_table("default_lists.tsv")
    left, quantized = ({module for row in rows for module in row[at].split()} for at in (2, 3))
    tensors = {f"{module}.weight": MATRIX.clone() for module in left | quantized}
    tensors["proj_out.weight"] = random(160, 48, seed=1)  # a row per word
    tensors |= {
        f"{LAYER}.{module}.weight": torch.zeros(48, 1, 4)
        for module in ("linear_attn.conv1d", "self_attention.conv1d", "mixer.conv1d")
    }
    assert taken(pick(tmp_path, tensors, num_hidden_layers=45)) == quantized
    for _, pattern, leaves, takes, why in rows:
        assert leaves or takes, pattern
        assert bool(takes) == bool(why), pattern


def test_an_encoder_beside_a_language_model_is_a_tower(tmp_path: Path) -> None:
    """Granite Speech calls its audio tower so; vLLM makes a part of it without quantization."""
    modules = ("encoder.layers.0.attn.to_q", "language_model.model.layers.0.mlp.up_proj")
    found = pick(tmp_path, {f"{module}.weight": MATRIX.clone() for module in modules})
    assert reasons(found) == {modules[0]: "a vision or audio tower"}
    alone = pick(tmp_path, {f"{modules[0]}.weight": MATRIX.clone()})
    assert taken(alone) == {modules[0]}


def test_outside_the_layers_a_row_per_word_is_no_linear(tmp_path: Path) -> None:
    tensors = {
        "decoder.proj_out.weight": random(160, 8, seed=1),
        "model.layers.0.fc1.weight": random(160, 8, seed=2),
    }
    found = pick(tmp_path, tensors, vocab_size=None, text_config={"vocab_size": 160})
    assert taken(found) == {"model.layers.0.fc1"}
    assert reasons(found)["decoder.proj_out"].startswith("an embedding or an output head")


def test_a_layer_after_the_models_is_a_drafter_if_the_config_says_so(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.fc.weight": MATRIX.clone() for layer in (0, 1, 2)}
    edited = reasons(pick(tmp_path, tensors, num_hidden_layers=2))
    assert list(edited) == ["model.layers.2.fc"]
    assert "the config was edited" in edited["model.layers.2.fc"]
    found = pick(tmp_path, tensors, num_hidden_layers=2, num_nextn_predict_layers=1)
    assert reasons(found)["model.layers.2.fc"].startswith("a drafter")


def test_only_float_matrices_count(tmp_path: Path) -> None:
    tensors = {
        f"{LAYER}.fc.weight": MATRIX,
        f"{LAYER}.fc.bias": MATRIX[0].clone(),
        f"{LAYER}.mask.weight": torch.zeros(4, 4, dtype=torch.int32),
        f"{LAYER}.mixer.conv1d.weight": torch.zeros(48, 1, 4),
        f"{LAYER}.mixer.A": torch.zeros(32, 32),
    }
    found = pick(tmp_path, tensors)
    assert taken(found) == {f"{LAYER}.fc"}
    assert reasons(found) == {
        f"{LAYER}.mask": "stored in I32",
        f"{LAYER}.mixer.conv1d": "not a 2-D *.weight",
        f"{LAYER}.mixer.A": "not a 2-D *.weight",
    }


def test_mixers_of_the_first_mamba_are_left_as_engines_leave_them(tmp_path: Path) -> None:
    """Those of the second have no x_proj, and are quantized."""
    first = [f"model.layers.0.mamba.{name}_proj" for name in ("x", "dt", "in", "out")]
    modules = (*first, "model.layers.1.mamba.in_proj")
    tensors = {f"{module}.weight": MATRIX.clone() for module in modules}
    found = pick(tmp_path, tensors, num_hidden_layers=2)
    assert taken(found) == {"model.layers.1.mamba.in_proj"}
    assert list(reasons(found)) == sorted(first)
    assert all("Mamba" in why for why in reasons(found).values())


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (f"{LAYER}.mlp.down_proj", {"mlp.down_proj"}),
        (f"{LAYER}.mlp.down_proj.weight", {"mlp.down_proj"}),
        (f"{LAYER}.mlp", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("*.o_proj", {"self_attn.o_proj"}),
        ("*.self_attn.[qk]_proj", {"self_attn.q_proj", "self_attn.k_proj"}),
        (r"re:.*\.(gate|up)_proj", {"mlp.gate_proj", "mlp.up_proj"}),
        (r"re:.*down_proj\.weight", {"mlp.down_proj"}),
        (r"re:model\.layers\.\d+\.mlp", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        *((nothing, set()) for nothing in ("mlp", "model.layers.1", "*.w1", "re:.*gate", "")),
    ],
)
def test_patterns_leave_modules_and_all_that_is_in_them(
    tmp_path: Path, pattern: str, expected: set[str]
) -> None:
    if not expected:
        with pytest.raises(UsageError, match="matches no module"):
            pick(tmp_path, make_tensors(), pattern)
        return
    everything = taken(pick(tmp_path / "all", make_tensors()))
    found = pick(tmp_path / "some", make_tensors(), pattern)
    gone = {name.removeprefix(f"{LAYER}.") for name in everything - taken(found)}
    assert gone == expected
    assert {reasons(found)[f"{LAYER}.{name}"] for name in expected} == {f"--ignore {pattern}"}


def test_what_is_left_anyway_may_be_named(tmp_path: Path) -> None:
    """Scripts name lm_head for every model, tied or not."""
    tensors = make_tensors()
    assert reasons(pick(tmp_path / "a", tensors, "lm_head"))["lm_head"] == "--ignore lm_head"
    del tensors["lm_head.weight"]
    pick(tmp_path / "b", tensors, "lm_head", tie_word_embeddings=True)
    with pytest.raises(UsageError):
        pick(tmp_path / "c", tensors, "lm_head", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{LAYER}.mlp.experts.gate_up_proj", (4, 64, 32)),
        (f"{LAYER}.mlp.experts.down_proj", (2, 8, 4)),
        (f"{LAYER}.block_sparse_moe.input_linear.weight", (4, 64, 32)),
        ("transformer.blocks.0.ffn.experts.mlp.w1", (256, 32)),
    ],
)
def test_stacked_experts_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors = {name: torch.zeros(shape), f"{LAYER}.fc.weight": MATRIX}
    with pytest.raises(ModelError) as raised:
        pick(tmp_path / "a", tensors)
    assert name in raised.value.message
    assert taken(pick(tmp_path / "b", tensors, name)) == {f"{LAYER}.fc"}


@pytest.mark.parametrize("model_type", ["gpt2", "imagegpt", "openai-gpt"])
def test_families_of_transposed_weights_are_refused_by_name(
    tmp_path: Path, model_type: str
) -> None:
    for config in ({"model_type": model_type}, {"decoder": {"model_type": model_type}}):
        with pytest.raises(ModelError, match=rf"{model_type}.*h\.0\.attn\.c_attn\.weight"):
            pick(tmp_path, {"h.0.attn.c_attn.weight": MATRIX}, **config)


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (
            {f"{LAYER}.b.weight": MATRIX.int()},
            {"quantization_config": {"quant_method": "mlx"}},
            "mlx",
        ),
        ({}, {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({f"{LAYER}.b.weight": MATRIX.to(torch.float8_e4m3fn)}, {}, "F8_E4M3"),
        ({f"{LAYER}.self_attn.k_scale": torch.ones(1)}, {}, f"{LAYER}.self_attn.k_scale"),
        ({f"{LAYER}.fc.weight_scale_inv": torch.ones(1, 1)}, {}, "weight_scale_inv"),
    ],
)
def test_what_is_quantized_already_is_refused_by_name(
    tmp_path: Path, tensors: Tensors, config: dict[str, object], named: str
) -> None:
    save(tmp_path, {f"{LAYER}.fc.weight": MATRIX, **tensors}, **config)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError) as raised:
        check_unquantized(checkpoint)
    assert "already quantized" in raised.value.message
    assert named in raised.value.message
    assert "dequantize" not in raised.value.hint  # which reads none of these


def test_linears_of_a_part_are_ignored_wherever_an_engine_hangs_them(tmp_path: Path) -> None:
    """Where the whole has several parts, engines begin a path otherwise than the checkpoint."""
    own = f"language_model.{LAYER}"
    tensors = {
        f"{own}.{name}.weight": random(16, 16, seed=0)
        for name in ("mlp.up_proj", "mlp.down_proj", "mlp.experts.0.w1", "mlp.experts.1.w1")
    }
    tensors["head.layers.0.mlp.up_proj.weight"] = random(16, 16, seed=0)
    tensors["other.layers.0.mlp.up_proj.weight"] = random(16, 16, seed=0)
    patterns = (f"{own}.mlp.*", "head")
    source = save(tmp_path / "source", tensors, text_config={"model_type": "llama"})
    found = run(source, tmp_path / "a", "w8a16", ignore=patterns)
    names = {"mlp.down_proj", "mlp.experts.0.w1", "mlp.experts.1.w1"}
    for name in names:
        hung = f"model.language_model.layers.0.{name}"
        assert any(matches_target(pattern, hung) for pattern in found.config()["ignore"]), name
    taken = "other.layers.0.mlp.up_proj"
    assert taken in {matrix.module for matrix in found.plan.selection.quantized}
    assert not any(matches_target(pattern, taken) for pattern in found.config()["ignore"])
    assert len([each for each in found.config()["ignore"] if "experts" in each]) == 3
    blocks = run(source, tmp_path / "b", "fp8-block", "autofp8", ignore=patterns).config()
    assert blocks["modules_to_not_convert"] == [
        *blocks["ignored_layers"],
        "layers.0.mlp.down_proj",
        "layers.0.mlp.experts",
    ]


def test_tensors_that_the_index_does_not_name_are_told(tmp_path: Path) -> None:
    """Engines read shards whole, and would miss them."""
    source = save(tmp_path / "source", make_tensors(), shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    found = run(source, tmp_path / "out", "w8a16")
    assert "model.norm.weight" not in found.tensors()
    assert found.plan.skipped == {
        f"model.norm.weight in {file}": "the index does not list it",
    }


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """The index names one of them, and vLLM takes the last."""
    source = save(tmp_path / "source", make_tensors(), shards=2)
    first, second = sorted(source.glob("*.safetensors"))
    doubled = load_file(second) | dict(list(load_file(first).items())[:1])
    save_file(doubled, second, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"is also in {second.name}"):
        run(source, tmp_path / "out", "w8a16")


def test_modules_behind_the_model_come_along(tmp_path: Path) -> None:
    """Without them vLLM pools as the architecture's default does, and skips the last layer."""
    source = save(tmp_path / "source", make_tensors())
    paths = ("", "1_Pooling", "2_Dense", "3_Old", "../above", 4)
    modules = [{"idx": place, "path": path} for place, path in enumerate(paths)]
    (source / "modules.json").write_text(json.dumps(modules))
    kept = {"1_Pooling/config.json", "2_Dense/model.safetensors", "3_Old/pytorch_model.bin"}
    for name in {*kept, "2_Dense/pytorch_model.bin", "openvino/model.xml", "../above/x"}:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    found = run(source, tmp_path / "out", "w8a16")
    assert set(found.written.files) == {"config.json", "model.safetensors", "modules.json", *kept}
    assert found.plan.skipped.keys() == {"openvino"}


def test_towers_are_ignored_wherever_an_engine_hangs_them(tmp_path: Path) -> None:
    tower = "vision_tower.encoder.layers.0.fc1"
    tensors = make_tensors() | {f"{tower}.weight": random(16, 16, seed=0)}
    source = save(tmp_path / "source", tensors)
    ignored = run(source, tmp_path / "a", "w8a16").config()["ignore"]
    expression = "re:(.*[.]|)vision_tower([.].*|)$"
    # vLLM renames the towers of some models in names, not in expressions
    assert ignored == ["lm_head", "model.embed_tokens", tower, expression]
    from compressed_tensors.utils import match_name  # noqa: PLC0415

    for name in (tower, f"model.{tower}", "vision_tower"):
        assert any(match_name(name, pattern) for pattern in ignored), name
        assert any(matches_target(pattern, name) for pattern in ignored), name
    for name in (f"{LAYER}.mlp.gate_proj", "my_vision_tower2.fc"):
        assert not any(match_name(name, pattern) for pattern in ignored), name
    listed = run(source, tmp_path / "b", "fp8-block", "autofp8").config()["ignored_layers"]
    assert tower in listed
