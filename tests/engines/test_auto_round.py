"""What `check` says of auto-round's own format: the answers of vLLM 0.32.0, run on such files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fp8calib
from fp8calib.errors import ModelError
from fp8calib.formats.fp8.registry import load_finder
from fp8calib.numerics.schemes import Granularity, InputScaling
from tests import zoo
from tests.formats.fp8_handmade import AUTO_ROUND, AUTO_ROUND_ALONE, AUTO_ROUND_BLOCK, AUTO_ROUND_MX
from tests.kit.checkpoints import change_config, change_tensors
from tests.quantization.by_hand import run

INTEGERS = {
    "bits": 2,
    "block_name_to_quantize": "transformer.h",
    "data_type": "int",
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
DOWN = "model.layers.0.mlp.down_proj"


def ask(folder: Path, engine: str) -> Any:
    (report,) = fp8calib.check(folder, engine=engine).to_json()["engines"].values()
    return report


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model in FP8 blocks, whose tensors have auto-round's names."""
    folder = tmp_path_factory.mktemp(request.param)
    zoo.save(request.param, folder / "model", **SIZES)
    run(folder / "model", folder / "out", "fp8-block", "autofp8")
    return folder / "out"


def save(source: Path, folder: Path, section: dict[str, Any]) -> Path:
    return change_config(Path(shutil.copytree(source, folder)), quantization_config=section)


@pytest.mark.parametrize(
    ("engine", "section", "fault"),
    [
        ("vllm==0.32.0", AUTO_ROUND_BLOCK, ""),
        ("vllm==0.27.1", AUTO_ROUND_BLOCK, "data_type 'fp'"),
        ("sglang==0.5.23", AUTO_ROUND_BLOCK, "data_type 'fp'"),
        ("vllm==0.32.0", AUTO_ROUND, "packing_format 'auto_round:fp8_static'"),
        ("vllm==0.32.0", AUTO_ROUND_ALONE, "other groups than blocks (group_size 0)"),
        ("vllm==0.32.0", AUTO_ROUND_BLOCK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (
            "vllm==0.32.0",
            AUTO_ROUND_MX | {"act_data_type": "mx_fp_rceil"},
            "act_data_type 'mx_fp_rceil'",
        ),
        ("vllm==0.32.0", AUTO_ROUND_MX | {"data_type": "nv_fp"}, "data_type 'nv_fp'"),
        ("sglang==0.5.16", AUTO_ROUND_MX, "data_type 'mx_fp'"),
    ],
)
def test_a_config_is_accepted_or_refused(
    tmp_path: Path, blocks: Path, engine: str, section: dict[str, Any], fault: str
) -> None:
    report = ask(save(blocks, tmp_path / "out", section), engine)
    whys = {layer["k"]["why"] for layer in report["layers"] if layer["k"]["status"] == "refused"}
    if not fault and "mixtral" in str(blocks):
        fault = "loads no experts in FP8 in blocks of auto-round"
    assert len(whys) == bool(fault)
    assert all(fault in why for why in whys)


def test_a_missing_scale_is_found(tmp_path: Path, blocks: Path) -> None:
    if "mixtral" in str(blocks):
        pytest.skip("it is refused")
    folder = save(blocks, tmp_path / "out", AUTO_ROUND_BLOCK)
    change_tensors(folder, {f"{DOWN}.weight_scale_inv": None})
    weights = ask(folder, "vllm==0.32.0")["weights"]
    assert (weights["status"], DOWN in weights["why"]) == ("misread", True)


def test_packed_integers_alone_are_unknown(tmp_path: Path) -> None:
    """auto-round quantizes all linears of gpt2, so that no matrix is left whose config is asked."""
    folder = tmp_path / "model"
    zoo.save("gpt2", folder, n_embd=256, n_head=4)
    tensors = load_file(folder / "model.safetensors")
    packed = {name: value for name, value in tensors.items() if ".h." not in name or "ln" in name}
    for name in tensors.keys() - packed.keys():
        module, _, suffix = name.rpartition(".")
        if suffix == "bias":
            packed[name] = tensors[name]
        else:
            rows, columns = tensors[name].shape
            packed[f"{module}.qweight"] = torch.zeros(rows // 16, columns, dtype=torch.int32)
            packed[f"{module}.scales"] = torch.ones(rows // 128, columns, dtype=torch.float16)
            packed[f"{module}.qzeros"] = torch.zeros(rows // 128, columns // 16, dtype=torch.int32)
    change_config(change_tensors(folder, lambda _: packed), quantization_config=INTEGERS)
    for engine in ("vllm==0.32.0", "sglang==0.5.23"):
        unknown = ask(folder, engine)["unknown"]
        assert "weights of quant_method 'auto-round' are not judged offline" in " ".join(unknown)


@pytest.mark.parametrize(
    ("section", "module", "scheme"),
    [
        (AUTO_ROUND, DOWN, (Granularity.CHANNEL, InputScaling.STATIC)),
        (AUTO_ROUND_ALONE, DOWN, (Granularity.TENSOR, InputScaling.NONE)),
        (AUTO_ROUND_BLOCK, DOWN, (Granularity.BLOCK, InputScaling.GROUP)),
        (AUTO_ROUND_MX, DOWN, (Granularity.BLOCK, InputScaling.GROUP)),
        (AUTO_ROUND, "visual.fc1", None),
        (AUTO_ROUND | {"extra_config": {DOWN: {"bits": 16}}}, DOWN, None),
        (AUTO_ROUND | {"extra_config": {"mlp.down_proj": {"bits": 16}}}, DOWN, None),
        (AUTO_ROUND | {"extra_config": {r"layers\.0\.mlp.*": {"bits": 16}}}, DOWN, None),
        (
            AUTO_ROUND
            | {"extra_config": {r".*mlp\.gate.*": {"bits": 16}, DOWN: {"group_size": 0}}},
            DOWN,
            (Granularity.TENSOR, InputScaling.STATIC),
        ),
    ],
)
def test_each_linear_has_its_own_scheme(
    tmp_path: Path, section: dict[str, Any], module: str, scheme: tuple[str, str] | None
) -> None:
    find = load_finder(tmp_path, {"quantization_config": section})[1]
    if scheme is None:
        with pytest.raises(ModelError, match="the config excludes"):
            find(module)
    else:
        assert (find(module).weights, find(module).inputs) == scheme
