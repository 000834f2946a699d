"""Ways to damage a checkpoint of FP8 weights, and what engines do with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Edit = Callable[[Config, Tensors], None]
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"
K_PROJ = f"{LAYER}.self_attn.k_proj"
FP8 = torch.float8_e4m3fn
CT = "compressed-tensors"
STATIC = ((CT, "fp8-static"), ("autofp8", "fp8-static"), ("modelopt", "fp8-static"))
CHANNEL = ((CT, "fp8-dynamic"), (CT, "w8a16"), ("modelopt", "fp8-dynamic"))
BLOCK = ((CT, "fp8-block"), ("autofp8", "fp8-block"))
EVERY = (*STATIC, *CHANNEL, *BLOCK)
OF_CT = tuple(pair for pair in EVERY if pair[0] == CT)
Pairs = tuple[tuple[str, str], ...]
Verdict = tuple[str, str]
"""The status of the weights, "ok" for none, and words of the reason or of a note."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One damage, the checkpoints to which it is done, and the verdicts."""

    edit: Edit
    pairs: Pairs = EVERY
    vllm: Verdict
    sglang: Verdict | None = None
    sglang_compressed: Verdict | None = None
    """SGLang's on compressed-tensors, where it is another one."""
    transformers: Verdict | None = None
    """Of compressed-tensors alone: transformers loads no other of these forms right."""
    by_pair: Mapping[tuple[str, str], Verdict] = field(default_factory=dict)
    """vLLM's verdicts on some checkpoints, where they are different."""


def copy_damaged(source: Path, target: Path, edit: Edit) -> Path:
    """Copy a checkpoint, and damage the copy."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(config["quantization_config"], tensors)
    (target / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def name_scale(tensors: Tensors, module: str) -> str:
    """Name the scale of a weight."""
    names = (f"{module}.weight_scale_inv", f"{module}.weight_scale")
    return next(name for name in names if name in tensors)


def dequantize(tensors: Tensors, module: str) -> torch.Tensor:
    """Multiply the codes of a weight by its scale."""
    codes, scale = tensors[f"{module}.weight"].float(), tensors[name_scale(tensors, module)].float()
    if scale.dim() == 2 and scale.shape[1] > 1:
        rows, columns = (torch.arange(size) // 128 for size in codes.shape)
        return codes * scale[rows][:, columns]
    return codes * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)


def fill(suffix: str, value: float, module: str = DOWN) -> Edit:
    """Set the first element of a scale."""

    def edit(_: Config, tensors: Tensors) -> None:
        name = name_scale(tensors, module) if suffix == "weight_scale" else f"{module}.{suffix}"
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return edit


def reshape(suffix: str, make: Callable[[int, int], tuple[int, ...]], module: str = DOWN) -> Edit:
    """Give a scale another shape, from the weight's outputs and inputs."""

    def edit(_: Config, tensors: Tensors) -> None:
        name = name_scale(tensors, module) if suffix == "weight_scale" else f"{module}.{suffix}"
        tensors[name] = torch.full(make(*tensors[f"{module}.weight"].shape), 0.01)

    return edit


def add(suffix: str, module: str = DOWN) -> Edit:
    """Add a tensor beside a weight."""
    return lambda _, tensors: tensors.update({f"{module}.{suffix}": torch.tensor([0.5])})


def remove(*suffixes: str, module: str = DOWN) -> Edit:
    """Remove tensors beside a weight, or the weight."""

    def edit(_: Config, tensors: Tensors) -> None:
        names = [
            name_scale(tensors, module) if s == "weight_scale" else f"{module}.{s}"
            for s in suffixes
        ]
        for name in names:
            tensors.pop(name, None)

    return edit


def rename(old: str, new: str, module: str = DOWN) -> Edit:
    """Give a scale another name."""

    def edit(_: Config, tensors: Tensors) -> None:
        name = name_scale(tensors, module) if old == "weight_scale" else f"{module}.{old}"
        tensors[f"{module}.{new}"] = tensors.pop(name)

    return edit


def swap_names(_: Config, tensors: Tensors) -> None:
    """Give a weight's scale the name that other methods use."""
    name = name_scale(tensors, DOWN)
    other = "weight_scale" if name.endswith("_inv") else "weight_scale_inv"
    tensors[f"{DOWN}.{other}"] = tensors.pop(name)


def store_plain(*modules: str) -> Edit:
    """Store linears in 16 bits, without scales."""

    def edit(_: Config, tensors: Tensors) -> None:
        chosen = modules or [
            n.removesuffix(".weight") for n, t in tensors.items() if t.dtype is FP8
        ]
        for module in chosen:
            tensors[f"{module}.weight"] = dequantize(tensors, module).to(torch.bfloat16)
            tensors.pop(name_scale(tensors, module))
            tensors.pop(f"{module}.input_scale", None)

    return edit


def exclude(module: str, *, then: Edit | None = None) -> Edit:
    """Exclude a linear in the config."""

    def edit(config: Config, tensors: Tensors) -> None:
        key = "ignored_layers" if config["quant_method"] == "fp8" else "ignore"
        config[key] = [*config[key], module]
        if then is not None:
            then(config, tensors)

    return edit


def quantize_head(config: Config, tensors: Tensors) -> None:
    """Store the output layer in FP8, and exclude nothing."""
    weight = tensors["lm_head.weight"].float()
    scale = weight.abs().max() / 448
    tensors["lm_head.weight"] = (weight / scale).to(FP8)
    suffix = name_scale(tensors, DOWN).removeprefix(f"{DOWN}.")
    like, (rows, columns) = tensors[f"{DOWN}.{suffix}"], weight.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    shape = tuple(like.shape) if like.numel() == 1 else (rows, 1)[: like.dim()]
    shape = blocks if like.dim() == 2 and like.shape[1] > 1 else shape
    tensors[f"lm_head.{suffix}"] = torch.full(shape, float(scale))
    if f"{DOWN}.input_scale" in tensors:
        tensors["lm_head.input_scale"] = tensors[f"{DOWN}.input_scale"].clone()
    config["ignored_layers" if config["quant_method"] == "fp8" else "ignore"] = []


def include_head(config: Config, _: Tensors) -> None:
    """Exclude nothing, where the output layer is not quantized."""
    config["ignored_layers" if config["quant_method"] == "fp8" else "ignore"] = []


def add_layer(_: Config, tensors: Tensors) -> None:
    """Store a linear of a layer that the model does not have."""
    for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()


def cast_weight(dtype: torch.dtype) -> Edit:
    """Store the codes of a weight in another dtype."""

    def edit(_: Config, tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].float().to(dtype)

    return edit


def cut_weight(rows: int, columns: int, module: str = DOWN) -> Edit:
    """Remove the last rows and columns of a weight."""

    def edit(_: Config, tensors: Tensors) -> None:
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = weight[: len(weight) - rows, : weight.shape[1] - columns]

    return edit


def set_group(**fields: object) -> Edit:
    """Change the config group of compressed-tensors; `format` also that of the whole config."""

    def edit(config: Config, _: Tensors) -> None:
        for group in config["config_groups"].values():
            group.update(fields)
        if "format" in fields:
            config["format"] = fields["format"]

    return edit


def drop_format(config: Config, _: Tensors) -> None:
    """Remove the format of compressed-tensors."""
    config.pop("format")
    for group in config["config_groups"].values():
        group.pop("format", None)


REFUSED, MISREAD, FINE, UNKNOWN = "refused", "misread", "ok", "unknown"
NO_PARAMETER = (REFUSED, "has no parameter in vLLM")
LEFT_OVER = (UNKNOWN, "is not in the model's class")
IGNORED = (FINE, "has no parameter in SGLang, which ignores it")
UNEXPECTED = (FINE, "reports it UNEXPECTED")
LOWEST = (MISREAD, "is missing beside the FP8 weight: the engine uses -3.4e38")
UNSET = (MISREAD, "is missing beside the FP8 weight: the engine uses uninitialised memory")
COMPUTES = "and the engine computes with it"
CASTS = (MISREAD, "is not FP8, but the config quantizes it: {} casts it without a scale")
CODES = (MISREAD, "uses its codes as the weight")
MISFIT = (REFUSED, "has shape")


def _cast(engine: str) -> Verdict:
    return CASTS[0], CASTS[1].format(engine)


def _value(name: str, edit: Edit, pairs: Pairs) -> Damage:
    verdict = (MISREAD, f"holds {name}, {COMPUTES}")
    return Damage(edit=edit, pairs=pairs, vllm=verdict, sglang=verdict, transformers=verdict)


_VALUES = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "0": 0.0,
    "a negative number": -1.0,
    "a number under 1.175e-38": 1e-40,
}
DAMAGES: dict[str, Damage] = {
    "none": Damage(
        edit=lambda *_: None, vllm=(FINE, ""), sglang=(FINE, ""), transformers=(FINE, "")
    ),
    **{
        f"weight scale holds {name}": _value(name, fill("weight_scale", value), EVERY)
        for name, value in _VALUES.items()
    },
    **{
        f"input scale holds {name}": _value(name, fill("input_scale", value), STATIC)
        for name, value in _VALUES.items()
    },
    "fused input scale holds 0": Damage(
        edit=fill("input_scale", 0.0, K_PROJ),
        pairs=STATIC,
        vllm=(FINE, "holds 0: the engine uses the largest of those of"),
        sglang=(FINE, "holds 0: the engine uses the largest of those of"),
        transformers=(MISREAD, f"holds 0, {COMPUTES}"),
    ),
    "input scale of a config without": Damage(
        edit=add("input_scale"),
        pairs=(*CHANNEL, *BLOCK),
        vllm=NO_PARAMETER,
        sglang=IGNORED,
        transformers=UNEXPECTED,
    ),
    "no weight scale": Damage(
        edit=remove("weight_scale"), vllm=LOWEST, sglang=LOWEST, transformers=UNSET
    ),
    "no input scale": Damage(
        edit=remove("input_scale"), pairs=STATIC, vllm=LOWEST, sglang=LOWEST, transformers=UNSET
    ),
    "no fused input scale": Damage(
        edit=remove("input_scale", module=K_PROJ),
        pairs=STATIC,
        vllm=(FINE, "uses the largest of those of q_proj, v_proj"),
        sglang=(FINE, "uses the largest of those of q_proj, v_proj"),
        transformers=UNSET,
    ),
    "no weight": Damage(
        edit=remove("weight"),
        vllm=(MISREAD, "weight is missing: the engine uses uninitialised memory"),
        sglang=(MISREAD, "weight is missing: the engine uses uninitialised memory"),
        transformers=(REFUSED, "weight is missing: loading fails"),
    ),
    "no weight and no scales": Damage(
        edit=remove("weight", "weight_scale", "input_scale"),
        vllm=(MISREAD, "weight is missing: the engine uses uninitialised memory"),
        sglang=(MISREAD, "weight is missing: the engine uses uninitialised memory"),
        transformers=(REFUSED, "weight is missing: loading fails"),
    ),
    "everything in 16 bits": Damage(
        edit=store_plain(),
        vllm=_cast("vLLM"),
        sglang=_cast("SGLang"),
        transformers=(MISREAD, "its scale is uninitialised memory"),
    ),
    "one linear in 16 bits": Damage(
        edit=store_plain(DOWN),
        vllm=_cast("vLLM"),
        sglang=_cast("SGLang"),
        transformers=(MISREAD, "its scale is uninitialised memory"),
    ),
    "one of q, k and v in 16 bits": Damage(
        edit=store_plain(f"{LAYER}.self_attn.q_proj"),
        vllm=_cast("vLLM"),
        sglang=_cast("SGLang"),
        transformers=(MISREAD, "its scale is uninitialised memory"),
    ),
    "an excluded linear in 16 bits": Damage(
        edit=exclude(DOWN, then=store_plain(DOWN)),
        vllm=(FINE, ""),
        sglang=(FINE, ""),
        transformers=(FINE, ""),
    ),
    "an excluded linear in FP8": Damage(
        edit=exclude(DOWN),
        vllm=(REFUSED, "is FP8, but the config excludes"),
        sglang=CODES,
        transformers=CODES,
    ),
    "one of q, k and v excluded": Damage(
        edit=exclude(K_PROJ, then=store_plain(K_PROJ)),
        vllm=(REFUSED, "becomes one weight in the engine"),
        sglang=(REFUSED, "becomes one weight in the engine"),
        sglang_compressed=(MISREAD, "is not FP8, but the config quantizes it: SGLang casts it"),
        transformers=(FINE, ""),
    ),
    "the scale's name of another method": Damage(
        edit=swap_names,
        vllm=NO_PARAMETER,
        sglang=LOWEST,
        transformers=UNSET,
        by_pair={("autofp8", "fp8-static"): (REFUSED, "it looks for per-tensor scales named")},
    ),
    "the scale's name of a model": Damage(
        edit=rename("weight_scale", "scale"), vllm=NO_PARAMETER, sglang=LOWEST, transformers=UNSET
    ),
    "an activation_scale": Damage(
        edit=rename("input_scale", "activation_scale"),
        pairs=STATIC,
        vllm=NO_PARAMETER,
        sglang=LOWEST,
        transformers=UNSET,
    ),
    "a stray output scale": Damage(
        edit=add("output_scale"), vllm=NO_PARAMETER, sglang=IGNORED, transformers=UNEXPECTED
    ),
    "a stray zero point": Damage(
        edit=add("weight_zero_point", K_PROJ),
        vllm=(REFUSED, "has no parameter in vLLM (AttributeError)"),
        sglang=IGNORED,
        transformers=UNEXPECTED,
    ),
    "a stray tensor": Damage(
        edit=add("anything"), vllm=LEFT_OVER, sglang=LEFT_OVER, transformers=UNEXPECTED
    ),
    "a weight scale [1, 1]": Damage(
        edit=reshape("weight_scale", lambda *_: (1, 1)),
        pairs=STATIC,
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "an input scale [1, 1]": Damage(
        edit=reshape("input_scale", lambda *_: (1, 1), K_PROJ),
        pairs=STATIC,
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "a weight scale [out]": Damage(
        edit=reshape("weight_scale", lambda rows, _: (rows,), K_PROJ),
        pairs=(*STATIC, (CT, "fp8-dynamic"), *BLOCK),
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "a weight scale [out, 1]": Damage(
        edit=reshape("weight_scale", lambda rows, _: (rows, 1)),
        pairs=(*STATIC, ("modelopt", "fp8-dynamic"), *BLOCK),
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "a weight scale that is one number": Damage(
        edit=reshape("weight_scale", lambda *_: ()),
        pairs=(*CHANNEL, *BLOCK),
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "a weight scale that is too short": Damage(
        edit=reshape("weight_scale", lambda rows, _: (rows - 1, 1), K_PROJ),
        pairs=((CT, "fp8-dynamic"), (CT, "w8a16")),
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
    ),
    "a weight scale that is too long": Damage(
        edit=reshape("weight_scale", lambda rows, _: (rows + 1, 1), K_PROJ),
        pairs=((CT, "fp8-dynamic"), (CT, "w8a16")),
        vllm=(MISREAD, "the rest is dropped"),
        sglang=(MISREAD, "the rest is dropped"),
        transformers=MISFIT,
    ),
    "a weight that is too short": Damage(
        edit=cut_weight(1, 0),
        vllm=MISFIT,
        sglang=MISFIT,
        transformers=MISFIT,
        pairs=(*STATIC, *CHANNEL),
    ),
    "a weight that is too narrow": Damage(
        edit=cut_weight(0, 1),
        vllm=MISFIT,
        sglang=(MISREAD, "the rest becomes zero"),
        transformers=MISFIT,
        pairs=(*STATIC, *CHANNEL),
    ),
    "a weight in e5m2": Damage(
        edit=cast_weight(torch.float8_e5m2),
        vllm=(MISREAD, "vLLM casts its values"),
        transformers=(MISREAD, "transformers casts its values"),
    ),
    "a weight in INT8": Damage(
        edit=cast_weight(torch.int8),
        vllm=(MISREAD, "vLLM casts its values"),
        transformers=(MISREAD, "multiplies its values by the scale"),
    ),
    "an output layer in FP8": Damage(
        edit=quantize_head,
        vllm=(REFUSED, "lm_head is FP8, but"),
        sglang=(MISREAD, "lm_head is FP8, but"),
        transformers=(FINE, ""),
        by_pair={
            ("modelopt", "fp8-static"): (FINE, ""),
            ("modelopt", "fp8-dynamic"): (FINE, ""),
        },
    ),
    "an output layer that is not excluded": Damage(
        edit=include_head,
        vllm=(FINE, ""),
        transformers=(MISREAD, "lm_head is not FP8"),
        by_pair={
            ("modelopt", "fp8-static"): _cast("vLLM"),
            ("modelopt", "fp8-dynamic"): _cast("vLLM"),
        },
    ),
    "a layer too many": Damage(
        edit=add_layer,
        vllm=(UNKNOWN, "is not in the model's class"),
        sglang=(UNKNOWN, "is not in the model's class"),
        transformers=(FINE, ""),
    ),
    "no format": Damage(
        edit=drop_format,
        pairs=OF_CT,
        vllm=(REFUSED, "there is no scheme for format None"),
        sglang=(REFUSED, "there is no scheme for format None"),
        transformers=(FINE, ""),
    ),
    "the format dense": Damage(
        edit=set_group(format="dense"),
        pairs=OF_CT,
        vllm=(REFUSED, "there is no scheme for format 'dense'"),
        sglang=(REFUSED, "there is no scheme for format 'dense'"),
        transformers=(MISREAD, "its config group is dense"),
    ),
    "blocks without quantized inputs": Damage(
        edit=set_group(input_activations=None),
        pairs=((CT, "fp8-block"),),
        vllm=(REFUSED, "weights in blocks need dynamic inputs"),
        sglang=(REFUSED, "weights in blocks need dynamic inputs"),
        transformers=(FINE, ""),
    ),
    "targets that match nothing": Damage(
        edit=set_group(targets=["re:.*nothing$"]),
        pairs=OF_CT,
        vllm=(REFUSED, "no config group has it"),
        sglang=(REFUSED, "no config group has"),
        transformers=(MISREAD, "no config group has it"),
    ),
    "targets without one of q, k and v": Damage(
        edit=set_group(targets=["re:.*[.][qvo]_proj$", "re:.*mlp.*"]),
        pairs=OF_CT,
        vllm=(REFUSED, "no config group has it"),
        sglang=(REFUSED, "no config group has"),
        transformers=(MISREAD, "no config group has it"),
    ),
}
