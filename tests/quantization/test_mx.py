"""MXFP8 checkpoints: bytes against llm-compressor's and ModelOpt's own, reading, conversion."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8calib.errors import ModelError
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.numerics.schemes import MX_BLOCK, InputScaling
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.formats.foreign import FOLDER, load_tensors
from tests.kit.checkpoints import change_tensors
from tests.quantization.by_hand import LAYER, run

FORMS = {
    "compressed-tensors": "weight_scale",
    "modelopt": "weight_scale",
    "mxfp8": "weight_scale_inv",
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the llama in every form; tests that change one copy it."""
    folder = tmp_path_factory.mktemp("mx")
    return {form: run(FOLDER / "llama", folder / form, "mxfp8", form).out for form in FORMS}


def load(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def list_linears(tensors: Tensors) -> list[str]:
    return [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dtype is torch.float8_e4m3fn
    ]


def decode(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Multiply each 32 codes by their power of two, in float64."""
    powers = torch.exp2(exponents.double() - 127).repeat_interleave(32, -1)
    return codes.double() * powers[..., : codes.shape[-1]]


def test_every_tensor_is_modelopts_byte_for_byte(written: dict[str, Path]) -> None:
    ours, theirs = load(written["modelopt"]), load_tensors("modelopt-mxfp8")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp8-a16"])
def test_every_block_is_llm_compressors_but_for_the_edge(scheme: str, tmp_path: Path) -> None:
    """llm-compressor gives blocks with an amax of 1.75 times a power of two the next exponent."""
    out = run(FOLDER / "llama", tmp_path / "out", scheme).out
    written, theirs = load(out), load_tensors(f"llmcompressor-{scheme}")
    source = load_file(FOLDER / "llama" / "model.safetensors")
    assert written.keys() == theirs.keys()
    count = 0
    for linear in list_linears(theirs):
        amax = source[f"{linear}.weight"].float().unflatten(-1, (-1, 32)).abs().amax(-1)
        at_edge = torch.frexp(amax).mantissa == 0.875
        raised = written[f"{linear}.weight_scale"] + at_edge.to(torch.uint8)
        assert torch.equal(raised, theirs[f"{linear}.weight_scale"])
        own, other = (
            each[f"{linear}.weight"].view(torch.uint8).unflatten(-1, (-1, 32))[~at_edge]
            for each in (written, theirs)
        )
        assert torch.equal(own, other)
        count += int(at_edge.sum())
    assert 0 < count < 20
    ours, known = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (out, FOLDER / f"llmcompressor-{scheme}")
    )
    assert ours["format"] == known["format"] == "mxfp8-quantized"
    assert set(known["ignore"]) <= set(ours["ignore"])
    group, theirs_too = (each["config_groups"]["group_0"] for each in (ours, known))
    for part in ("weights", "input_activations"):
        if theirs_too[part] is None:
            assert group[part] is None
        else:
            assert group[part].items() <= theirs_too[part].items()


@pytest.mark.parametrize("form", FORMS)
def test_a_written_checkpoint_is_read_as_codes_times_powers_of_two(
    form: str, written: dict[str, Path]
) -> None:
    out = written[form]
    tensors = load(out)
    assert {tensors[f"{each}.{FORMS[form]}"].dtype for each in list_linears(tensors)} == {
        torch.uint8
    }
    with Fp8Checkpoint.open(out, fuse=True) as found:
        assert found.dialect.name == form
        assert {weight.scheme.block for weight in found._weights.values()} == {MX_BLOCK}
        for linear in list_linears(tensors):
            name = f"{linear}.weight"
            exact = decode(tensors[name], tensors[f"{linear}.{FORMS[form]}"])
            assert torch.equal(found.read(name).double(), exact)
            assert torch.equal(found.read_rows(name, 3, 9).double(), exact[3:9])
            scheme = found.scheme(name)
            assert (scheme.inputs, scheme.is_mx) == (InputScaling.GROUP, True)


ONES = torch.full((32, 5), 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (None, "is FP8, but there is no"),
        (ONES.float(), "is of dtype F32"),
        (ONES.T.contiguous(), r"has shape \[5, 32\]"),
        (torch.full((32, 10), 120, dtype=torch.uint8), r"has shape \[32, 10\]"),
        (torch.full((32, 5), 255, dtype=torch.uint8), "nan is not a scale"),
    ],
    ids=["missing", "float", "transposed", "blocks of 16", "NaN"],
)
@pytest.mark.parametrize("form", FORMS)
def test_damaged_scales_are_refused(
    form: str, scale: torch.Tensor | None, told: str, written: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(written[form], tmp_path / "out"))
    change_tensors(out, {f"{LAYER}.mlp.down_proj.{FORMS[form]}": scale})
    with pytest.raises(ModelError, match=told):
        Fp8Checkpoint.open(out, fuse=True)


def test_blocks_of_zeros_have_the_smallest_exponent_as_modelopt_writes_them(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FOLDER / "llama", tmp_path / "model"))
    name = f"{LAYER}.mlp.down_proj.weight"
    weight = load(source)[name]
    weight[:, 32:64] = 0
    weight[1] = 0
    change_tensors(source, {name: weight})
    out = run(source, tmp_path / "out", "mxfp8").out
    scales = load(out)[f"{name}_scale"]
    assert scales[:, 1].tolist() == [0] * 32
    assert scales[1].tolist() == [0] * 5
    with Fp8Checkpoint.open(out, fuse=True) as found:
        assert not found.read(name)[:, 32:64].any()


KV_KEYS = {
    "compressed-tensors": ("kv_cache_scheme", "num_bits"),
    "modelopt": ("kv_cache_scheme", "num_bits"),
    "mxfp8": ("kv_cache_quant_algo", "FP8"),
}


def draw_rows(folder: Path, count: int) -> Path:
    drawn = torch.randint(3, 64, (count, 48), generator=torch.Generator().manual_seed(0)).tolist()
    return write_rows(folder / "rows.jsonl", [{"input_ids": row} for row in drawn])


@pytest.mark.parametrize("form", FORMS)
def test_commands_read_it_and_add_kv_scales(
    form: str, written: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(written[form], tmp_path / "out"))
    data = draw_rows(tmp_path, 4)
    text = ("--data", data, "--seq-len", 48)
    succeed("calibrate", out, *text, "--out", tmp_path / "measured")
    stats = tmp_path / "measured" / "stats.safetensors"
    graft = ("--format", "kv-overlay", "--model", out, "--out", tmp_path / "graft")
    succeed("export", stats, *graft)
    config = json.loads((tmp_path / "graft" / "kv-overlay" / "config.json").read_text())
    key, value = KV_KEYS[form]
    assert value in config["quantization_config"][key]
    verified = succeed("verify", FOLDER / "llama", "--scales", out, *text, "--json").json
    assert 0 < verified["candidates"][0]["kld_mean"] < 0.01
    shown = succeed("show", out).out
    assert "0.000244141" in shown  # 2^-12
