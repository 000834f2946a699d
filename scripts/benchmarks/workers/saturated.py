"""Write an MXFP8 checkpoint once more, with the exponents of the OCP specification.

python -m scripts.benchmarks.workers.saturated MODEL WRITTEN OUT

MODEL is what WRITTEN was quantized from, to nearest. The rule saturates the largest values of a
block, so the product writes no such file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fp8calib.fp8.amax import block_amax
from fp8calib.fp8.encode import encode_blocks, encode_exponents
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import MX_BLOCK
from fp8calib.scales.from_amax import SMALLEST_EXPONENT, power_of_two_scale_of


def main(model: Path, written: Path, out: Path) -> None:
    """Write the checkpoint."""
    shutil.copytree(written, out)
    source = {n: t for file in model.glob("*.safetensors") for n, t in load_file(file).items()}
    for file in sorted(out.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name, each in tensors.items() if each.dtype == torch.float8_e4m3fn]:
            codes, exponents = quantize(source[name])
            tensors |= {name: codes, f"{name}_scale": exponents}
        file.unlink()  # it may be a link to that of WRITTEN
        save_file(tensors, file, metadata={"format": "pt"})


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the codes [out, in] and the exponents uint8 [out, in / 32] of a weight."""
    amax = block_amax(weight, MX_BLOCK)
    scales = power_of_two_scale_of(amax, E4M3FN, smallest=SMALLEST_EXPONENT, saturates=True)
    return encode_blocks(weight, scales, MX_BLOCK), encode_exponents(scales)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
