"""FP8 checkpoints made by hand: codes and scales are typed, configs are those of the tools.

`fp8_configs.json` has what tools write; auto-round 0.16.1 with `--scheme FP8_STATIC --format
auto_round`, others of its schemes, and `--scheme FPW8A16` (alone).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_name("fp8_configs.json").read_text())

LINEAR = "model.layers.0.self_attn.o_proj"
CODES = ((0x38, 0xC0, 0x01, 0x00), (0x3C, 0x7E, 0xB8, 0x08))
"""Of an e4m3fn weight [2, 4]."""
VALUES = [[1.0, -2.0, 2.0**-9, 0.0], [1.5, 448.0, -1.0, 2.0**-6]]


def quantizer(**changes: object) -> dict[str, object]:
    """Describe a quantizer as compressed-tensors 0.19 does: all keys, most of them null."""
    return CONFIGS["quantizer"] | changes


PER_TOKEN = quantizer(dynamic=True, strategy="token", observer=None)
PER_GROUP = quantizer(dynamic=True, strategy="group", group_size=128, observer=None)


def group(
    weights: Mapping[str, object], inputs: Mapping[str, object] | None, *targets: str
) -> dict[str, object]:
    """Describe a group of linears as compressed-tensors does."""
    return {
        "format": "float-quantized",
        "targets": list(targets or ("Linear",)),
        "output_activations": None,
        "input_activations": inputs,
        "weights": weights,
    }


def compressed_tensors(*groups: Mapping[str, object], **changes: object) -> dict[str, object]:
    """Write a config as LLM Compressor does."""
    numbered = {f"group_{index}": item for index, item in enumerate(groups)}
    return CONFIGS["compressed-tensors"] | {"config_groups": numbered} | changes


CT_STATIC = compressed_tensors(group(quantizer(), quantizer()))
CT_CHANNEL = compressed_tensors(group(quantizer(strategy="channel"), PER_TOKEN))
CT_BLOCK = compressed_tensors(
    group(quantizer(strategy="block", block_structure=[128, 128]), PER_GROUP)
)
AUTOFP8_STATIC, FINEGRAINED = CONFIGS["autofp8"], CONFIGS["finegrained"]
AUTOFP8_DYNAMIC = AUTOFP8_STATIC | {"activation_scheme": "dynamic"}
MODELOPT = CONFIGS["modelopt"]
AUTO_ROUND, AUTO_ROUND_ALONE = CONFIGS["auto-round"], CONFIGS["auto-round alone"]
AUTO_ROUND_BLOCK, AUTO_ROUND_MX = CONFIGS["auto-round block"], CONFIGS["auto-round mx"]


def modelopt(algorithm: str) -> dict[str, object]:
    """Write ModelOpt's config of an algorithm that has no groups."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def quark(inputs: object = "static", **changes: object) -> dict[str, object]:
    """Write Quark's config; `inputs` is a spec of activations, or None."""
    spec = CONFIGS["quark spec"]
    given = spec if inputs == "static" else inputs
    rule = {"input_tensors": given, "output_tensors": None, "weight": spec, "bias": None}
    return CONFIGS["quark"] | {"global_quant_config": rule} | changes


def codes(rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Make a weight from its codes."""
    return torch.tensor(rows, dtype=torch.uint8).view(dtype)


def scalar(value: float) -> torch.Tensor:
    """Make a scale: fp32, 0-dim."""
    return torch.tensor(value, dtype=torch.float32)


def linear(
    module: str = LINEAR,
    *,
    scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> Tensors:
    """Make the tensors of an FP8 linear."""
    tensors = {f"{module}.weight": codes(CODES) if weight is None else weight}
    if scale is not None:
        tensors[f"{module}.weight_scale"] = scale
    if input_scale is not None:
        tensors[f"{module}.input_scale"] = input_scale
    return tensors


def save(folder: Path, tensors: Tensors, config: object) -> Path:
    """Write a checkpoint of one file; with `config` None it has no quantization config."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensors[name].clone() for name in tensors}, folder / "model.safetensors")
    document: dict[str, object] = {"model_type": "llama"}
    if config is not None:
        document["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(document))
    return folder


# --- the cases of `fp8_cases.json` ---------------------------------------------------------------

KNOWN: dict[str, Any] = {
    "ct static": CT_STATIC,
    "ct channel": CT_CHANNEL,
    "ct block": CT_BLOCK,
    "autofp8 static": AUTOFP8_STATIC,
    "autofp8 dynamic": AUTOFP8_DYNAMIC,
    "nvfp4": modelopt("NVFP4"),
    "quark": quark(),
    "quantizer": quantizer(),
    "group": group(quantizer(), None),
    **{name: CONFIGS[name] for name in ("finegrained", "fbgemm", "quark spec")},
    **{name: CONFIGS[name] for name in CONFIGS if name.startswith("auto-round")},
}


def find_config(described: Any) -> Any:
    """Find a config by its name, or by parts that are `like` known ones, with other entries."""
    if isinstance(described, str):
        return KNOWN[described]
    return _resolve(described)


def _resolve(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    changes = {key: _resolve(value) for key, value in described.items()}
    base = KNOWN[changes.pop("like")] if "like" in changes else {}
    gone = changes.pop("without", ())
    return {key: value for key, value in base.items() if key not in gone} | changes


def make_tensors(described: Mapping[str, Any]) -> Tensors:
    """Make tensors of `codes`, of a number, or of dtype, shape and numbers; @ is `LINEAR`."""
    return {name.replace("@", LINEAR): _make(each) for name, each in described.items()}


def _make(described: Any) -> torch.Tensor:
    if described == "codes":
        return codes(CODES)
    if not isinstance(described, list):
        return scalar(described)
    dtype, shape, numbers = described
    is_fp8 = dtype.startswith("float8")
    made = torch.tensor(numbers, dtype=torch.uint8 if is_fp8 else torch.float64)
    made = (made.expand(shape) if made.dim() == 0 else made.reshape(shape)).contiguous()
    return made.view(getattr(torch, dtype)) if is_fp8 else made.to(getattr(torch, dtype))


CASES: dict[str, Any] = json.loads(Path(__file__).with_name("fp8_cases.json").read_text())
