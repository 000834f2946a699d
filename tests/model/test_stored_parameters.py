"""Checkpoints that hold more or less than the model of their config: whole and streamed alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.model import device as chosen
from fp8calib.model.device import choose_dtype
from fp8calib.quantization.select import check_unquantized
from tests import zoo
from tests.architectures import families
from tests.doors import as_bytes, opened
from tests.kit.checkpoints import change_tensors

LAYER = "model.layers.0.self_attn"
EITHER = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def calibrate(folder: Path, *, streamed: bool) -> RunStats:
    with opened(folder, streamed=streamed) as subject:
        return subject.calibrate()


def list_skipped(folder: Path, *, streamed: bool) -> dict[str, str]:
    skipped = calibrate(folder, streamed=streamed).header.skipped
    return {item.site: item.why for item in skipped}


def drop_tensors(folder: Path, part: str) -> None:
    dropped = [name for name in load_file(folder / "model.safetensors") if part in name]
    assert dropped
    change_tensors(folder, dict.fromkeys(dropped))


@EITHER
def test_values_of_a_parameter_that_the_config_switches_off_are_refused(
    streamed: bool, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m")
    change_tensors(tmp_path / "m", {f"{LAYER}.q_proj.bias": torch.full((32,), 0.5)})
    with pytest.raises(ModelError, match=rf"holds {LAYER}.q_proj.bias, but its config gives the"):
        calibrate(tmp_path / "m", streamed=streamed)


@EITHER
def test_integers_in_place_of_a_weight_are_refused(streamed: bool, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "m")
    codes = torch.ones(16, 32, dtype=torch.int8)
    change_tensors(tmp_path / "m", {f"{LAYER}.k_proj.weight": codes})
    said = rf"{LAYER}.k_proj.weight is stored in I8: the model is quantized, although its config"
    with pytest.raises(ModelError, match=said):
        calibrate(tmp_path / "m", streamed=streamed)
    already = pytest.raises(ModelError, match=r"already quantized: .* is stored in I8")
    with Checkpoint.open(tmp_path / "m") as checkpoint, already:
        check_unquantized(checkpoint)
    zoo.save("mixtral", tmp_path / "m")
    expert = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    change_tensors(tmp_path / "m", {expert: torch.ones(32, 48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=rf"{expert} is stored in I8"):
        calibrate(tmp_path / "m", streamed=streamed)
    change_tensors(tmp_path / "m", {expert: torch.ones(32, 16)})
    said = rf"{expert} is \[32, 16\], and .* is \[32, 48\]|transformers cannot load .* shape"
    with pytest.raises(ModelError, match=said):
        calibrate(tmp_path / "m", streamed=streamed)


@EITHER
def test_what_the_model_has_no_parameter_for_is_listed(streamed: bool, tmp_path: Path) -> None:
    """Zero biases change nothing; rotary frequencies are computed."""
    zoo.save("llama", tmp_path / "m")
    layers = [f"model.layers.{index}.self_attn" for index in range(2)]
    added = {
        **{f"{layer}.q_proj.bias": torch.zeros(32) for layer in layers},
        **{f"{layer}.k_scale": torch.ones(1) for layer in layers[:1]},
        **{f"{layer}.rotary_emb.inv_freq": torch.ones(4) for layer in layers},
        "mtp.norm.weight": torch.ones(32),
        "mtp.proj.weight": torch.ones(32, 32),
    }
    change_tensors(tmp_path / "m", added)
    skipped = list_skipped(tmp_path / "m", streamed=streamed)
    unknown = "in the checkpoint, but not a parameter of the model: neither loaded nor run"
    assert skipped["model.layers.*.self_attn.q_proj.bias"] == unknown
    assert skipped[f"{LAYER}.k_scale"] == unknown
    assert "not part of the text decoder" in skipped["mtp"]
    assert not any("inv_freq" in name or name.startswith("mtp.") for name in skipped)


@EITHER
@pytest.mark.parametrize("part", ["lm_head", "layers.1.mlp.up_proj", "model.norm"])
def test_a_missing_parameter_that_text_needs_is_refused(
    part: str, streamed: bool, tmp_path: Path
) -> None:
    zoo.save("llama", tmp_path / "m", tie_word_embeddings=False)
    drop_tensors(tmp_path / "m", part)
    with pytest.raises(
        ModelError, match=rf"the checkpoint lacks \S*{part}.weight; the model would"
    ):
        calibrate(tmp_path / "m", streamed=streamed)


@zoo.NEEDS_5_23
def test_what_transformers_fills_in_itself_is_filled_in_a_streamed_model(tmp_path: Path) -> None:
    """A.X K1's checkpoints have no score correction, which then is zero."""
    changes = {**families.FAMILIES["deepseek_v2"], "n_shared_experts": 1}
    families.save("axk1", changes, tmp_path / "m")
    drop_tensors(tmp_path / "m", "e_score_correction_bias")
    whole, streamed = (
        as_bytes(calibrate(tmp_path / "m", streamed=way), tmp_path) for way in (False, True)
    )
    assert whole == streamed


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Give 1000 bfloat16 numbers and a single fp32 one."""
    weights = {"a": torch.ones(1000, dtype=torch.bfloat16), "b": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Give a processor with no flag that counts and 1 GiB of free memory."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    monkeypatch.setattr(chosen, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(chosen, "available_bytes", lambda: 2**30)
    return monkeypatch


@pytest.mark.usefixtures("processor")
def test_other_processors_use_float32(checkpoint: Checkpoint) -> None:
    dtype, why = choose_dtype("auto", device="cpu", checkpoint=checkpoint)
    assert (dtype, why) == ("float32", "the processor has neither amx_bf16 nor avx512_bf16")


@pytest.mark.parametrize(("free_bytes", "expected"), [(4804, "bfloat16"), (4805, "float32")])
def test_a_model_that_does_not_fit_in_float32_uses_bfloat16(
    checkpoint: Checkpoint, processor: pytest.MonkeyPatch, free_bytes: int, expected: str
) -> None:
    # 1001 numbers of 4 bytes and a fifth more: 4804.8 bytes
    processor.setattr(chosen, "available_bytes", lambda: free_bytes)
    assert choose_dtype("auto", device="cpu", checkpoint=checkpoint)[0] == expected


@pytest.mark.usefixtures("processor")
def test_a_gpu_uses_the_checkpoints_own(checkpoint: Checkpoint) -> None:
    found = choose_dtype("auto", device="cuda:0", checkpoint=checkpoint)
    assert found == ("bfloat16", "the checkpoint's")
