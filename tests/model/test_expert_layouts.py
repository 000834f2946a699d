"""Experts stacked on disk: what is taken out of them, against transformers and by brute force."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.expert_layouts import EXPERT_LAYOUTS, UNSERVED_STACKS
from fp8calib.quantization.select import find_selection
from tests.architectures import families
from tests.architectures.families import FAMILIES
from tests.architectures.families import save as save_family
from tests.quantization.by_hand import Tensors, run, save
from tests.quantization.stacked import STACKED
from tests.zoo import save as save_zoo

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def test_every_layout_is_tried_here() -> None:
    """But for `gemma4` and `qwen3_vl_moe_text`, which are other names for a part or a whole."""
    assert set(EXPERT_LAYOUTS) - set(STACKED) == {"gemma4", "qwen3_vl_moe_text"}


HIDDEN, INTERMEDIATE, EXPERTS = 200, 1300, 3
STACK = "model.layers.0.mlp.experts"


def make_stacks(*, is_turned: bool) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Make a layer's stacks of bfloat16, and list the matrices in them by module."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    matrices: dict[str, torch.Tensor] = {}
    tensors: Tensors = {}
    for name, (rows, columns) in sizes.items():
        stack = torch.randn(EXPERTS, rows, columns, generator=generator).bfloat16()
        stack *= torch.tensor([1.0, 9.0, 0.1])[:, None, None].bfloat16()
        for expert, matrix in enumerate(stack):
            parts = matrix.chunk(2) if name == "gate_up_proj" else [matrix]
            names = PROJECTIONS[:2] if name == "gate_up_proj" else [name]
            for part, projection in zip(parts, names, strict=True):
                matrices[f"{STACK}.{expert}.{projection}"] = part
        tensors[f"{STACK}.{name}"] = stack.transpose(1, 2).contiguous() if is_turned else stack
    return tensors, matrices


def refuse(folder: Path, *ignore: str) -> str:
    with pytest.raises(ModelError) as caught:
        run(folder, folder.parent / "out", "fp8-dynamic", ignore=ignore)
    return caught.value.message


def test_what_engines_load_no_single_experts_of_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_family("dbrx", FAMILIES["dbrx"], tmp_path / "dbrx")
    save_zoo("gpt_oss", tmp_path / "gpt_oss")
    assert set(UNSERVED_STACKS) == {"dbrx", "gpt_oss"}
    message = refuse(tmp_path / "dbrx")
    assert "transformer.blocks.0.ffn.experts.mlp.v1 [192, 32] holds several" in message
    assert "vLLM 0.32.0 loads no tensors of single experts for dbrx" in message
    message = refuse(tmp_path / "gpt_oss")
    assert "model.layers.0.mlp.experts.down_proj [4, 48, 32] holds several" in message
    assert "rows of gate and up alternate and have biases" in message


def stack(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).bfloat16()


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "why"),
    [
        ("nobody-knows", "gate_up_proj", (4, 64, 200), "in an unknown layout"),
        ("qwen3_5_moe_text", "gate_up_proj", (4, 200, 64), "has [experts, out, in] with"),
        ("llama4_text", "gate_up_proj", (4, 64, 200), "has [experts, in, out] with"),
        ("qwen3_vl_moe_text", "gate_up_proj", (4, 64, 96), "with the hidden size 200"),
        ("qwen3_vl_moe_text", "gate_up_proj", (4, 200, 200), "in an unknown layout"),
        ("qwen3_5_moe_text", "gate_up_proj", (4, 63, 200), "in an unknown layout"),
        ("qwen3_5_moe_text", "w13_weight", (4, 64, 200), "in an unknown layout"),
    ],
)
def test_a_stack_that_is_not_what_the_type_has_is_refused_by_name(
    tmp_path: Path, model_type: str, name: str, shape: tuple[int, ...], why: str
) -> None:
    save(tmp_path / "m", {f"{STACK}.{name}": stack(*shape)}, model_type=model_type)
    message = refuse(tmp_path / "m")
    assert f"{STACK}.{name} {list(shape)} holds several matrices" in message
    assert why in message


@pytest.mark.parametrize("pattern", [STACK, f"{STACK}.*_proj", r"re:.*\.experts\.\d+\..*"])
@pytest.mark.parametrize("form", ["compressed-tensors", "autofp8"])
def test_a_stack_left_alone_is_named_expert_by_expert(
    tmp_path: Path, pattern: str, form: str
) -> None:
    """Engines ask for the linears of experts by the names these have apart."""
    tensors, matrices = make_stacks(is_turned=False)
    tensors["model.layers.0.self_attn.q_proj.weight"] = stack(64, HIDDEN)
    save(tmp_path / "m", tensors, model_type="qwen3_5_moe_text")
    found = run(tmp_path / "m", tmp_path / "fp8", "fp8-block", form, ignore=(pattern,))
    config = found.config()
    assert set(matrices) < set(config["ignore" if "ignore" in config else "ignored_layers"])
    for name in (f"{STACK}.gate_up_proj", f"{STACK}.down_proj"):
        assert torch.equal(found.tensors()[name], tensors[name])


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_of_one_layer_left_alone_get_a_tensor_each_as_the_others_do(
    tmp_path: Path, is_turned: bool
) -> None:
    """Llama 4's loader in vLLM takes stacks of all layers or of none."""
    tensors, matrices = make_stacks(is_turned=is_turned)
    other = {name.replace("layers.0", "layers.1"): value + 1 for name, value in tensors.items()}
    config = {"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 2}
    save(tmp_path / "m", {**tensors, **other}, **config)
    found = run(tmp_path / "m", tmp_path / "fp8", "fp8-dynamic", ignore=("*.0.mlp.experts",))
    written = found.tensors()
    assert not any(name.endswith("experts.gate_up_proj") for name in written)
    assert set(matrices) < set(found.config()["ignore"])
    for module, matrix in matrices.items():
        assert torch.equal(written[f"{module}.weight"], matrix)
        assert f"{module}.weight_scale" not in written
        beside = module.replace("layers.0", "layers.1")
        assert written[f"{beside}.weight"].dtype is torch.float8_e4m3fn


def test_a_part_of_a_stack_cannot_be_left_alone(tmp_path: Path) -> None:
    tensors, _ = make_stacks(is_turned=False)
    save(tmp_path / "m", tensors, model_type="qwen3_5_moe_text")
    with pytest.raises(UsageError, match=r"--ignore .*\.0\.gate_proj: names 1 of the 6 matrices"):
        run(tmp_path / "m", tmp_path / "o", "fp8-dynamic", ignore=(f"{STACK}.0.gate_proj",))


@pytest.mark.parametrize("is_turned", [False, True])
def test_nan_is_named_by_its_place_in_the_stack(tmp_path: Path, is_turned: bool) -> None:
    tensors, _ = make_stacks(is_turned=is_turned)
    name = f"{STACK}.gate_up_proj"
    index = [1, 7, INTERMEDIATE + 1100] if is_turned else [1, INTERMEDIATE + 1100, 7]
    tensors[name][tuple(index)] = torch.nan
    save(tmp_path / "m", tensors, model_type="qwen3_vl_moe_text")
    assert refuse(tmp_path / "m") == f"{name} holds nan at {index}"


def test_a_buffer_is_no_stack_of_weights(tmp_path: Path) -> None:
    """The published block of MiniMax has 256 rows; a kernel's sides are shorter than 16."""
    changes = {**families.REFUSED["minimax"][0], "block_size": 32}
    families.save("minimax", changes, tmp_path / "m")
    name = "model.layers.0.self_attn.diagonal_decay"
    written = run(tmp_path / "m", tmp_path / "fp8", "fp8-dynamic").tensors()
    assert torch.equal(written[name], load_file(tmp_path / "m" / "model.safetensors")[name])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        reasons = {each.module: each.why for each in find_selection(checkpoint).unquantized}
    assert "a buffer" in reasons[name]


def test_other_stacks_of_a_known_class_are_left(tmp_path: Path) -> None:
    """Inkling's shared experts are a tensor of matrices, which no router chooses."""
    families.save("inkling_text", {**families.EXPERTS, "intermediate_size": 32}, tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        found = find_selection(checkpoint)
    left = {each.module: each.why for each in found.unquantized}
    assert "several matrices" in left["model.layers.0.mlp.shared_experts.down_proj"]
    assert found.refusal is None
    assert any(".experts.0.gate_proj" in each.module for each in found.quantized)
