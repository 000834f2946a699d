"""The dtypes of torch by the names that safetensors gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.numerics.arrays import STORED_DTYPES

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, own) for name, (_, own) in STORED_DTYPES.items()
}
