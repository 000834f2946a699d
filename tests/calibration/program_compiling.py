"""Compile the kernels for GPUs that this machine need not have; Triton brings the assembler."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8calib.calibration import kernels

ARCHITECTURES = (80, 90, 100)
POINTERS = {
    "lengths": "*i32",
    "bins": "*i64",
    "amax": "*i32",
    "positions": "*i32",
    "sequences": "*i32",
    "histogram": "*i64",
}


def compile_kernel(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile with all numbers as int32, pointers and strides as multiples of 16."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | pointers
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [
        number
        for number, name in enumerate(kernel.arg_names)
        if name in pointers or name.startswith("stride") or name == "width"
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    for architecture in ARCHITECTURES:
        found = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert found.asm["cubin"]
        assert "ld.global.v4" in found.asm["ptx"], "rows are read 16 bytes at a time"


if __name__ == "__main__":
    for by_channel, token_stride, num_columns in ((True, 4, 128), (False, 1, 128), (False, 0, 64)):
        constants = {
            "by_channel": by_channel,
            "token_stride": token_stride,
            "num_columns": num_columns,
        }
        compile_kernel(kernels._reduce, {"x": "*bf16", **POINTERS}, constants)
    print("compiled")
