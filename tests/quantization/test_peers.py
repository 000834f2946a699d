"""The same bytes as llm-compressor and ModelOpt write of a model, where they divide as we do.

Of a model in float32 both do. In bfloat16 llm-compressor rounds its scales to that, and ModelOpt,
per tensor, the quotients; per channel it does not.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8calib.quantization.plan import CalibratedScales
from tests.formats.foreign import FOLDER, load_tensors
from tests.quantization.by_hand import Tensors, codes_of, run, separate_scales

SAME = {
    "llmcompressor-fp8-static-float32": ("compressed-tensors", "fp8-static"),
    "llmcompressor-fp8-dynamic-float32": ("compressed-tensors", "fp8-dynamic"),
    "llmcompressor-fp8-block-float32": ("compressed-tensors", "fp8-block"),
    "modelopt-fp8-float32": ("modelopt", "fp8-static"),
    "modelopt-fp8-channel-kv": ("modelopt", "fp8-dynamic"),
}
"""By folder: our form and scheme."""


def quantize(theirs: Tensors, out: Path, form: str, scheme: str) -> Tensors:
    """Quantize the model that the tool was given, with its input scales and no shared ones."""
    inputs = {
        name.removesuffix(".input_scale"): value.float().reshape(())
        for name, value in theirs.items()
        if name.endswith(".input_scale")
    }
    scales = CalibratedScales(inputs=inputs, kv={})
    with separate_scales():
        return run(FOLDER / "llama", out, scheme, form, scales=scales).tensors()


@pytest.mark.parametrize("name", SAME)
def test_every_tensor_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    theirs = load_tensors(name)
    ours = quantize(theirs, tmp_path / "out", *SAME[name])
    cache = {key for key in theirs if key.endswith((".k_scale", ".v_scale"))}
    assert ours.keys() == theirs.keys() - cache
    kept = {"model.embed_tokens.weight", "lm_head.weight"}
    for key, tensor in ours.items():
        if key in kept or "norm" in key:  # bfloat16 here, as in the source
            assert torch.equal(tensor.float(), theirs[key].float()), key
            continue
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape), key
        raw = (each.reshape(-1).view(torch.uint8) for each in (tensor, theirs[key]))
        assert torch.equal(*raw), key


def test_in_bfloat16_modelopt_rounds_the_quotient_first(tmp_path: Path) -> None:
    """Its scales are ours; with its quotients our codes would be its own."""
    theirs, source = load_tensors("modelopt-fp8-kv"), load_tensors("llama")
    ours = quantize(theirs, tmp_path / "out", "modelopt", "fp8-static")
    linears = [key.removesuffix("_scale") for key in theirs if key.endswith(".weight_scale")]
    assert len(linears) == 14
    for name in linears:
        scale = theirs[f"{name}_scale"].numpy()
        assert scale == ours[f"{name}_scale"].numpy(), name
        quotient = source[name].float().numpy() / scale
        rounded = quotient.astype(ml_dtypes.bfloat16).astype(np.float32)
        expected = rounded.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(codes_of(theirs[name]), expected), name
