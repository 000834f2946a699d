"""Compile the kernels for GPUs that this machine need not have; Triton brings the assembler."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8calib.calibration import kernels
from fp8calib.verification.emulation import kernels as emulation
from tests.kit.minutes import HAS_MINUTES

ARCHITECTURES = (80, 90, 100) if HAS_MINUTES else (90,)
POINTERS = {
    "lengths": "*i32",
    "bins": "*i64",
    "amax": "*i32",
    "positions": "*i32",
    "sequences": "*i32",
    "histogram": "*i64",
}


EMULATED = {"x": "*bf16", "y": "*bf16", "scales": "*fp32", "sums": "*fp64"}
EMULATED["places"] = "*i32"
FLOATS = dict.fromkeys(("limit", "bound", "smallest_scale", "inverse"), "fp32")
E4M3 = {"most": 448.0, "smallest_normal": 2.0**-6, "carry": 2.0**20}
SCORED = {
    "scores": "*fp32",
    "totals": "*fp32",
    "scales": "*fp32",
    "sinks": "*bf16",
    "is_counted": "*i8",
    "sums": "*fp64",
}


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, num_warps: int = 4
) -> None:
    """Compile with numbers as int32 unless `types` has them, pointers and strides by 16 bytes."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | types
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [
        number
        for number, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
        or name.startswith("stride")
        or name in {"width", "num_keys", "tile"}
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    for architecture in ARCHITECTURES:
        target = GPUTarget("cuda", architecture, 32)
        options = {"enable_fp_fusion": False, "num_warps": num_warps}
        found = triton.compile(source, target=target, options=options)
        assert found.asm["cubin"]
        assert "ld.global.v4" in found.asm["ptx"], "rows are read 16 bytes at a time"


if __name__ == "__main__":
    for by_channel, token_stride, num_columns in ((True, 4, 128), (False, 1, 128), (False, 0, 64)):
        numbers = {"token_stride": token_stride, "num_columns": num_columns}
        types = {"x": "*bf16", **POINTERS}
        compile_kernel(kernels._reduce, types, {"by_channel": by_channel, **numbers})
    for token_stride in (0, 4):
        types = {"x": "*bf16", "order": "*i64", "experts": "*i64", **POINTERS}
        types |= {"by_expert": "*i32", "expert_counts": "*i64"}
        numbers = {"token_stride": token_stride, "num_columns": 128}
        compile_kernel(kernels._reduce_experts, types, numbers)
    for per, num_rows in (("token", 4), ("head", 16), ("group", 4), ("mx", 16)):
        constants = {
            "per_head": per == "head",
            "per_token": per == "token",
            "group": {"group": 128, "mx": 32}.get(per, 0),
            "by_reciprocal": per == "token",
            "in_model_dtype": per == "head",
            "scale_by_reciprocal": per == "group",
            "power_of_two": per == "mx",
            "has_one_zero": per == "head",
            **E4M3,
            "is_masked": per in {"head", "group"},
            "flush_stride": 8,
            "num_rows": num_rows,
            "num_columns": 2048 // num_rows,
        }
        compile_kernel(emulation._fake_quantize, {**EMULATED, **FLOATS}, constants, num_warps=8)
    for tile in (80, 128, 176):
        constants = {
            "has_sinks": True,
            "measures": True,
            "is_tiled": tile != 128,
            **E4M3,
            "num_columns": triton.next_power_of_2(tile),
            "num_rows": 2048 // triton.next_power_of_2(tile),
        }
        compile_kernel(emulation._round_probabilities, SCORED, constants, num_warps=8)
    print("compiled")
