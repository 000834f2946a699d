"""KV scales and quantization configs that vLLM is asked about, in a whole Llama of two layers.

`vllm_cases.json` has a case a line: its config (`like` a known one, with changes), its scales by
name in the attention layer (whole with a leading `/`), and what `check` says of k and v.
`goldens/vllm-0.32.0.json` has what vLLM held after loading each, or its error;
`scripts/test-engines --record` writes it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.engines.check_handmade import INDEX, MODELOPT, PER_HEAD, PER_TENSOR, QUARK

GOLDENS = Path(__file__).with_name("goldens") / "vllm-0.32.0.json"
"""By case: `error`, or k and v as the two layers hold them; null for what is not finite."""
FILE, LATE_FILE = "model.safetensors", "kv_scales.safetensors"
# vLLM's CPU kernels want FP8 heads of a multiple of 32 elements: 4 heads of 32.
WIDTH = {"hidden_size": 128}
PATH = "model.layers.{}.self_attn"
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
IGNORED = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
KNOWN: Mapping[str, dict[str, Any]] = {
    "ct": dict(PER_TENSOR),
    "per head": dict(PER_HEAD),
    "fp8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": IGNORED},
    "modelopt": {**MODELOPT, "ignore": ["*"]},
    "quark": {
        **QUARK,
        "exclude": [*IGNORED, "lm_head"],
        "export": {**QUARK["export"], "pack_method": "reorder"},
    },
}
Scales = Mapping[str, object]
"""By name: a number, or a list of any depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint, and what `check` is to say of k and v in layers 0 and 1."""

    quantization: object = None
    """The `quantization_config`; none where None."""
    scales: Scales = field(default_factory=dict)
    later: Scales | None = None
    """The scales of layer 1, where they are others."""
    status: str | tuple[str, str] = "used"
    """Of k and v; `unknown` where `check` does not judge the config."""
    later_status: str | None = None
    why: str = ""
    """A part of the reason, or of a fix."""
    side: object = None
    """ModelOpt's own file, hf_quant_config.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More of config.json."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """More of the safetensors header."""
    index: str = ""
    """`without scales`: the scales are in a file that the index does not name; `without file`: the
    index names a file that does not exist."""
    dtype: str = "float32"
    """Of the scales."""

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        folder.mkdir()
        scales = self.make_scales()
        tensors, config = _build()
        stored = tensors if self.index == "without scales" else tensors | scales
        save_file(stored, folder / FILE, metadata={"format": "pt", **self.metadata})
        if self.index:
            weight_map = dict.fromkeys(tensors, FILE)
            if self.index == "without scales":
                save_file(scales, folder / LATE_FILE, metadata={"format": "pt"})
            else:
                weight_map |= dict.fromkeys(scales, LATE_FILE)
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        quantized = {} if self.quantization is None else {"quantization_config": self.quantization}
        (folder / "config.json").write_text(json.dumps({**config, **self.config, **quantized}))
        if self.side is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.side))
        return folder

    def make_scales(self) -> dict[str, torch.Tensor]:
        """Make the tensors of the scales."""
        made = {}
        for index, scales in enumerate((self.scales, self.later)):
            for name, number in (self.scales if scales is None else scales).items():
                value = torch.tensor(number, dtype=torch.float32)
                whole = name[1:] if name.startswith("/") else f"{PATH.format(index)}.{name}"
                dtype = getattr(torch, self.dtype)
                made[whole] = value.reshape(value.shape or (1,)).to(dtype)
        return made


@cache
def _build() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Make the tensors and the config of the Llama."""
    with TemporaryDirectory() as place:
        folder = Path(place) / "model"
        zoo.save("llama", folder, **WIDTH)
        return load_file(folder / FILE), json.loads((folder / "config.json").read_text())


def find_config(described: Any, known: Mapping[str, Mapping[str, Any]] = KNOWN) -> Any:
    """Find a config by its name, or by one that it is like: without some keys, with others."""
    if isinstance(described, str):
        return known.get(described, described)
    if not isinstance(described, dict) or "like" not in described:
        return described
    changes = dict(described)
    base = known[changes.pop("like")]
    gone = changes.pop("without", ())
    return {key: value for key, value in base.items() if key not in gone} | changes


def _read_cases() -> dict[str, Case]:
    rows = json.loads(Path(__file__).with_name("vllm_cases.json").read_text())
    return {
        name: Case(**row | {"quantization": find_config(row.get("quantization"))})
        for name, row in rows.items()
    }


CASES: Mapping[str, Case] = _read_cases()
