"""What is taken for a linear, from names and shapes alone.

`modules.tsv` has a module a line, and why it is left. `default_lists.tsv` has what other tools
leave by default, pattern by pattern: nvidia-modelopt 0.47.0, auto-round 0.16.1, llmcompressor
0.14.0.1, compressed-tensors 0.20.0, and llm-compressor's FP8 examples at commit ab1ba3ef.
"""

from pathlib import Path

import pytest
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError, UsageError
from fp8calib.quantization.select import Selection, check_unquantized, find_selection
from tests.quantization.by_hand import LAYER, Tensors, make_tensors, random, save

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
