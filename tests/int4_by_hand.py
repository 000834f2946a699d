"""Int4 checkpoints as compressed-tensors stores them, made with numpy and loops."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.kit.checkpoints import change_config

Tensors = dict[str, torch.Tensor]
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": True}


@dataclass(frozen=True)
class Int4:
    """A weight: integers from -8 to 7, and their scale."""

    integers: np.ndarray
    scale: np.float32


def pack(integers: np.ndarray) -> torch.Tensor:
    """Pack eight numbers of a row into each int32: the sum of (number i + 8) * 16 ** i."""
    words = []
    for row in integers.tolist():
        eights = [row[start : start + 8] for start in range(0, len(row), 8)]
        sums = [sum((number + 8) * 16**place for place, number in enumerate(e)) for e in eights]
        words.append([total - 2**32 if total >= 2**31 else total for total in sums])
    return torch.tensor(words, dtype=torch.int32)


def round_to_int4(weight: torch.Tensor) -> Int4:
    """Round a weight so that its amax is 7.5 steps; the scale is a bfloat16 number."""
    values = weight.float().numpy()
    scale = torch.tensor(np.abs(values).max() / 7.5).bfloat16().float().numpy()
    return Int4(np.clip(np.round(values / scale), -8, 7).astype(np.int64), np.float32(scale))


def store(name: str, weight: Int4, *, packed: bool) -> Tensors:
    module = name.removesuffix(".weight")
    scale = {f"{module}.weight_scale": torch.tensor([weight.scale]).bfloat16()}
    if not packed:
        return {name: torch.from_numpy(weight.integers.astype(np.int8)), **scale}
    shape = torch.tensor(weight.integers.shape)
    return {
        f"{module}.weight_packed": pack(weight.integers),
        f"{module}.weight_shape": shape,
        **scale,
    }


def make_section(weights: Any = WEIGHTS, *, form: Any = "pack-quantized", **more: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    groups = {"config_groups": {"group_0": group}}
    return {"quant_method": "compressed-tensors", "format": form, **groups, **more}


def quantize(
    model: Path, out: Path, *, ignore: str = "^$", packed: bool = True, inputs: Any = None
) -> dict[str, Int4]:
    """Write a copy of a model in which the matrices of the layers are int4.

    Args:
        model: one file of weights.
        out: the folder to make.
        ignore: a pattern of names that are not quantized.
        packed: eight in an int32, or each in an int8.
        inputs: what the config says of inputs.
    """
    shutil.copytree(model, out)
    tensors, found = Tensors(), dict[str, Int4]()
    for name, tensor in load_file(model / "model.safetensors").items():
        is_linear = tensor.dim() == 2 and ".layers." in name and name.endswith(".weight")
        if is_linear and not re.search(ignore, name):
            found[name] = round_to_int4(tensor)
            tensors |= store(name, found[name], packed=packed)
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    section = make_section(form="pack-quantized" if packed else "int-quantized")
    section["config_groups"]["group_0"]["input_activations"] = inputs
    write_section(out, section)
    return found


def write_section(folder: Path, section: Any) -> None:
    change_config(folder, quantization_config=section)
