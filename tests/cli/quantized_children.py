"""Quantized checkpoints of the llama of `tests/foreign`, as tools and `quantize` write them."""

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.formats.foreign import FOLDER
from tests.kit.checkpoints import change_config, change_json, change_tensors

BASE = FOLDER / "llama"
NORM = "model.layers.1.input_layernorm.weight"
TOOLS = {
    "llm-compressor, channels": "llmcompressor-fp8-dynamic",
    "llm-compressor, blocks": "llmcompressor-fp8-block",
    "llm-compressor, w8a16": "llmcompressor-w8a16",
    "llm-compressor, static": "llmcompressor-fp8-static-kv",
    "ModelOpt": "modelopt-fp8-kv",
    "ModelOpt, channels": "modelopt-fp8-channel-kv",
    "Quark": "quark-fp8-kv",
    "Quark, as AutoFP8": "quark-autofp8-kv",
}
QUANTIZED = {
    "autofp8": ("--scheme", "fp8-block", "--format", "autofp8", "--allow-unservable"),
    "compressed-tensors": ("--scheme", "fp8-dynamic"),
    "modelopt": ("--scheme", "fp8-dynamic", "--format", "modelopt"),
}
SMALLER = ("int8", "int4", "nvfp4", "mxfp4", "ModelOpt, nvfp4")
"""Integers and FP4, as `save_int` and `save_fp4` write them."""
FORMS = (*TOOLS, *QUANTIZED, *SMALLER)


def calibrate_base(folder: Path) -> Path:
    """Calibrate the llama: statistics and `kv_scales.safetensors`."""
    rows = [{"input_ids": [(7 * i * j + i) % 64 for j in range(16)]} for i in range(1, 5)]
    data = write_rows(folder / "rows.jsonl", rows)
    options = ("--samples", 4, "--seq-len", 16, "--dtype", "float32", "--format", "kv-scales")
    succeed("calibrate", BASE, "--data", data, *options, "--out", folder / "out")
    return folder / "out"


def save_child(form: str, folder: Path, base: Path = BASE) -> Path:
    """Write a checkpoint of a form, without KV scales; what tools wrote is made of `BASE`."""
    if form in QUANTIZED:
        succeed("quantize", base, *QUANTIZED[form], "--out", folder)
        return folder
    if form in ("int8", "int4"):
        return save_int(folder, int(form[3:]), group=32 if form == "int4" else None, base=base)
    if form in SMALLER:
        return save_fp4(folder, "modelopt" if "ModelOpt" in form else form, base=base)
    shutil.copytree(FOLDER / TOOLS[form], folder)
    (folder / "tool.json").unlink()
    change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if not _is_kv(n)})
    change_config(folder, _drop_cache)
    own = folder / "hf_quant_config.json"
    if own.is_file():
        change_json(own, lambda document: document["quantization"].update(kv_cache_quant_algo=None))
    return folder


def _is_kv(name: str) -> bool:
    return name.endswith(("k_scale", "v_scale", "output_scale"))


def _drop_cache(config: dict[str, Any]) -> None:
    section = config["quantization_config"]
    section["kv_cache_scheme"] = None
    if section["quant_method"] == "quark":
        section["export"]["kv_cache_group"] = []
        del section["kv_cache_quant_config"], section["layer_quant_config"]


def set_method(folder: Path, **section: object) -> Path:
    return change_config(folder, quantization_config=section)


def change_norm(folder: Path) -> Path:
    """Double a norm, as methods that fold scales into norms may."""
    return change_tensors(folder, lambda tensors: {**tensors, NORM: tensors[NORM] * 2})


def save_int(folder: Path, bits: int, *, group: int | None = None, base: Path = BASE) -> Path:
    """Write a compressed-tensors checkpoint of symmetric integers, rounded to nearest by hand.

    Eight bits are int8 with a scale per channel and inputs per token, four bits are packed, with a
    scale per channel or per group of columns.
    """
    shutil.copytree(base, folder)
    largest = 2 ** (bits - 1) - 1

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        written = {}
        for name, weight in tensors.items():
            if weight.dim() != 2 or "embed" in name or "lm_head" in name:
                written[name] = weight
                continue
            rows, columns = weight.shape
            groups = weight.float().reshape(rows, -1, group or columns)
            scale = (groups.abs().amax(2, keepdim=True) / largest).to(weight.dtype)
            codes = (groups / scale.float()).round().clamp(-largest - 1, largest)
            codes = codes.reshape(rows, columns).to(torch.int8)
            module = name.removesuffix(".weight")
            written[f"{module}.weight_scale"] = scale.squeeze(2).contiguous()
            if bits == 8:
                written[name] = codes
            else:
                written[f"{module}.weight_packed"] = pack(codes)
                written[f"{module}.weight_shape"] = torch.tensor([rows, columns])
        return written

    change_tensors(folder, quantize)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    inputs = {**weights, "strategy": "token", "dynamic": True} if bits == 8 else None
    form = "int-quantized" if bits == 8 else "pack-quantized"
    return set_method(
        folder,
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    )


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int4 [rows, columns] into int32, eight in a word, the first in the lowest bits."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= (codes[:, place::8].long() + 8) << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def save_fp4(folder: Path, form: str, *, base: Path = BASE) -> Path:
    """Write a checkpoint in `nvfp4` or `mxfp4` of compressed-tensors, or ModelOpt's `modelopt`."""
    shutil.copytree(base, folder)
    group = 32 if form == "mxfp4" else 16

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        written = {}
        for name, weight in tensors.items():
            if weight.dim() != 2 or "embed" in name or "lm_head" in name:
                written[name] = weight
                continue
            module, groups = name.removesuffix(".weight"), weight.float().unflatten(1, (-1, group))
            whole = float(groups.abs().max()) / (6 * 448)
            wanted = groups.abs().amax(2) / 6
            if form == "mxfp4":
                exponents = wanted.log2().ceil().clamp(-127, 127)
                scale, stored = exponents.exp2(), (exponents + 127).to(torch.uint8)
            else:
                stored = (wanted / whole).to(torch.float8_e4m3fn)
                scale = stored.float() * whole
            ratio = groups / scale.clamp(min=1e-30).unsqueeze(2)
            codes = (ratio.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (ratio < 0)
            codes = codes.flatten(1).to(torch.uint8)
            packed = codes[:, ::2] | codes[:, 1::2] << 4
            written[f"{module}.weight_scale"] = stored
            if form == "modelopt":
                written |= {name: packed, f"{module}.weight_scale_2": torch.tensor(whole)}
                written[f"{module}.input_scale"] = torch.tensor(0.5)
            else:
                written[f"{module}.weight_packed"] = packed
            if form == "nvfp4":
                written[f"{module}.weight_global_scale"] = torch.tensor([1 / whole])
        return written

    change_tensors(folder, quantize)
    if form == "modelopt":
        return set_method(folder, quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "tensor_group" if form == "nvfp4" else "group", "group_size": group}
    return set_method(
        folder,
        quant_method="compressed-tensors",
        format=f"{form}-pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )


Blocks = dict[str, tuple[torch.Tensor, torch.Tensor]]


def save_gpt_oss(plain: Path, folder: Path) -> tuple[Path, Blocks]:
    """Write a gpt_oss with random MXFP4 experts; give their blocks and scales by name."""
    shutil.copytree(plain, folder)
    blocks: Blocks = {}

    def replace(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        written = {}
        for name, tensor in tensors.items():
            if tensor.dim() != 3:
                written[name] = tensor
                continue
            experts, columns, rows = tensor.shape
            octets = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, octets.shape[:3], dtype=torch.uint8)
            blocks[name] = octets, scales
            written |= {f"{name}_blocks": octets, f"{name}_scales": scales}
        return written

    change_tensors(folder, replace)
    set_method(folder, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    return folder, blocks
