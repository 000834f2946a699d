"""Damages of FP8 weights: scales, weights, names, shapes, and the config."""

import math
from collections.abc import Callable

import torch

from tests.real_engines.fuzz.compare import dequantize
from tests.real_engines.fuzz.damage import (
    Change,
    Damage,
    Edit,
    Fits,
    Select,
    drop,
    drop_key,
    edit,
    has_fp8,
    has_method,
    has_scheme,
    one_of,
    rename,
)
from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.forms import Form

_CT = "compressed-tensors"
_SPLIT = ("q_proj", "k_proj", "v_proj")
_QUANTIZATION = "quantization_config"
_NAN_EXPONENT = 255


def _is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in {"weight_scale", "weight_scale_inv"}


def _is_input(name: str) -> bool:
    return name.endswith(".input_scale")


def _beside(draft: Draft, matches: Callable[[str], bool]) -> list[str]:
    found = [n for m in draft.fp8_modules() for n in draft.companions(m) if matches(n)]
    if not found:
        raise UnfitError("there is no such scale")
    return found


def _scales(draft: Draft) -> list[str]:
    return _beside(draft, _is_scale)


def _inputs(draft: Draft) -> list[str]:
    return _beside(draft, _is_input)


def _fill(value: float) -> Edit:
    def new(scale: torch.Tensor) -> torch.Tensor:
        changed = scale.clone()
        changed.view(-1)[0] = _NAN_EXPONENT if scale.dtype is torch.uint8 else value
        return changed

    return new


def _rename(select: Select, new: str) -> Change:
    """Make a change of the last part of the names."""
    return rename(select, lambda name: f"{name.rpartition('.')[0]}.{new}")


def _choose(draft: Draft, *ends: str) -> str:
    """Choose an FP8 linear whose path ends so; any where `ends` is empty."""
    found = [m for m in draft.fp8_modules() if not ends or m.endswith(ends)]
    if not found:
        raise UnfitError(f"no FP8 linear is called {ends}")
    return draft.random.choice(found)


def _restore(draft: Draft, module: str, *, keep_scales: bool = False) -> None:
    """Store a linear in 16 bits, with the numbers that its codes stood for before any damage."""
    own = {name: draft.undamaged[name] for name in draft.undamaged if name.startswith(f"{module}.")}
    weight = f"{module}.weight"
    draft.put(weight, dequantize(own)[weight].bfloat16())
    for name in draft.companions(module):
        if not keep_scales and (_is_scale(name) or _is_input(name)):
            draft.pop(name)


def _restore_one(*ends: str) -> Change:
    return lambda draft: _restore(draft, _choose(draft, *ends))


def _restore_all(*, keep_scales: bool = False) -> Change:
    def change(draft: Draft) -> None:
        for module in draft.fp8_modules():
            _restore(draft, module, keep_scales=keep_scales)

    return change


def _drop_weight(*, with_scales: bool) -> Change:
    def change(draft: Draft) -> None:
        module = _choose(draft)
        for name in [f"{module}.weight", *(draft.companions(module) if with_scales else ())]:
            draft.pop(name)

    return change


def _add(suffix: str, *, to_all: bool = False) -> Change:
    """Make a change that gives one or all FP8 linears another tensor."""

    def change(draft: Draft) -> None:
        for module in draft.fp8_modules() if to_all else [_choose(draft)]:
            draft.put(f"{module}.{suffix}", torch.tensor([0.25]))

    return change


def _quantize_head(draft: Draft) -> None:
    """Store an output head in FP8, and let the config say nothing of it."""
    if "lm_head.weight" not in draft:
        raise UnfitError("there is no lm_head")
    module = draft.fp8_modules()[0]
    head = draft["lm_head.weight"]
    for name in draft.companions(module):
        if name.endswith(".bias"):  # the head has its own
            continue
        scale = draft[name]
        shape = (
            [head.shape[0], *scale.shape[1:]]
            if scale.shape[:1] == (draft[f"{module}.weight"].shape[0],)
            else scale.shape
        )
        filled = torch.full(list(shape), 0.01)
        if scale.dtype is torch.uint8:
            blocks = [head.shape[0], head.shape[1] // 32]
            filled = torch.full(blocks, 127 - 7, dtype=torch.uint8)
        draft.put(f"lm_head.{name.rpartition('.')[2]}", filled)
    factor = 2**7 if scale.dtype is torch.uint8 else 100
    draft.put("lm_head.weight", (head.float() * factor).to(torch.float8_e4m3fn))
    _forget(draft, "lm_head")


def _forget(draft: Draft, name: str) -> None:
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        if isinstance(draft.quantization.get(key), list):
            draft.quantization[key] = [item for item in draft.quantization[key] if item != name]
    if draft.own_file is not None:
        draft.own_file["quantization"]["exclude_modules"] = []


def _exclude_one(draft: Draft) -> None:
    """Exclude an FP8 linear in the config."""
    module = _choose(draft, "down_proj", "fc2", "o_proj", "out_proj", "c_proj", "dense")
    keys = [key for key in ("ignore", "ignored_layers") if key in draft.quantization]
    for key in keys:
        draft.quantization[key] = [*draft.quantization[key], module]


def _shorten_weight(draft: Draft) -> None:
    name = f"{_choose(draft)}.weight"
    draft.put(name, draft[name][:-1].contiguous())


def _store_as_integers(draft: Draft) -> None:
    """Keep the bits of the weights, which the config still calls floats."""
    for module in draft.fp8_modules():
        draft.put(f"{module}.weight", draft[f"{module}.weight"].view(torch.int8))


def _store_in_e5m2(draft: Draft) -> None:
    """Fill the range of another dtype, with scales by which the numbers stay the model's."""
    factor = torch.finfo(torch.float8_e5m2).max / torch.finfo(torch.float8_e4m3fn).max
    for module in draft.fp8_modules():
        codes = draft[f"{module}.weight"].float() * factor
        draft.put(f"{module}.weight", codes.to(torch.float8_e5m2))
        for name in filter(_is_scale, draft.companions(module)):
            scale = draft[name]
            is_power = scale.dtype is torch.uint8
            draft.put(name, scale - round(math.log2(factor)) if is_power else scale / factor)


def _drop_formats(draft: Draft) -> None:
    for path in (_QUANTIZATION, f"{_QUANTIZATION}.config_groups.group_0"):
        drop_key(f"{path}.format")(draft)


def _flatten(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(-1).clone()


def _has_floats(form: Form) -> bool:
    """Whether there are FP8 weights whose scales are no exponents."""
    return has_fp8(form) and not form.scheme.startswith("mxfp8")


_TENSORS: dict[str, tuple[Change, Fits]] = {
    **{
        f"scale-{name}": (
            edit(one_of(_scales), _fill(value)),
            has_fp8 if name == "nan" else _has_floats,
        )
        for name, value in (("nan", math.nan), ("inf", math.inf), ("zero", 0.0), ("negative", -0.5))
    },
    **{
        f"input-{name}": (edit(one_of(_inputs), _fill(value)), has_scheme("fp8-static"))
        for name, value in (("nan", math.nan), ("inf", math.inf), ("zero", 0.0), ("negative", -0.5))
    },
    "extra-input_scale": (
        _add("input_scale", to_all=True),
        has_scheme("fp8-dynamic", "fp8-block", "w8a16", "mxfp8", "mxfp8-a16"),
    ),
    "all-16-bit": (_restore_all(), has_fp8),
    "all-16-bit-with-scales": (_restore_all(keep_scales=True), has_fp8),
    "one-16-bit": (_restore_one(), has_fp8),
    "down-16-bit": (_restore_one("down_proj", "fc2", "c_proj", "o_proj"), has_fp8),
    "part-16-bit": (_restore_one(*_SPLIT), has_fp8),
    "weight-missing": (_drop_weight(with_scales=False), has_fp8),
    "linear-missing": (_drop_weight(with_scales=True), has_fp8),
    "scale-missing": (drop(one_of(_scales)), has_fp8),
    "all-scales-missing": (drop(_scales), has_fp8),
    "input-missing": (drop(one_of(_inputs)), has_scheme("fp8-static")),
    "all-inputs-missing": (drop(_inputs), has_scheme("fp8-static")),
    "weight_scale_inv": (_rename(_scales, "weight_scale_inv"), has_fp8),
    "weight_scale": (_rename(_scales, "weight_scale"), has_scheme("fp8-block", "mxfp8")),
    "named-scale": (_rename(_scales, "scale"), has_fp8),
    "activation_scale": (_rename(_inputs, "activation_scale"), has_scheme("fp8-static")),
    "stray-output_scale": (_add("output_scale"), has_fp8),
    "stray-zero_point": (_add("weight_zero_point"), has_fp8),
    "scale-0d": (edit(_scales, lambda s: s.view(-1)[0].clone()), has_scheme("fp8-static")),
    "scale-1": (edit(_scales, lambda s: s.view(-1)[:1].clone()), has_scheme("fp8-static")),
    "scale-1x1": (
        edit(_scales, lambda s: s.view(-1)[:1].reshape(1, 1).clone()),
        has_scheme("fp8-static"),
    ),
    "scale-flat": (edit(_scales, _flatten), has_scheme("fp8-dynamic", "w8a16")),
    "scale-column": (
        edit(_scales, lambda s: s.reshape(-1, 1).clone()),
        has_scheme("fp8-dynamic", "w8a16"),
    ),
    "scale-short": (
        edit(one_of(_scales), lambda s: s[:-1].clone()),
        has_scheme("fp8-dynamic", "w8a16", "fp8-block", "mxfp8", "mxfp8-a16"),
    ),
    **{
        f"exponents-{name}": (edit(_scales, new), has_scheme("mxfp8", "mxfp8-a16"))
        for name, new in {
            "e8m0": lambda s: s.view(torch.float8_e8m0fnu),
            "float": lambda s: torch.exp2(s.float() - 127),
            "transposed": lambda s: s.T.contiguous(),
            "blocks-16": lambda s: s.repeat_interleave(2, 1),
            "nan": lambda s: torch.full_like(s, _NAN_EXPONENT),
        }.items()
    },
    "scale-bfloat16": (edit(_scales, lambda s: s.bfloat16()), has_fp8),
    "scale-float16": (edit(_scales, lambda s: s.half()), has_fp8),
    "weight-short": (_shorten_weight, has_fp8),
    "weights-int8": (_store_as_integers, has_fp8),
    "weights-e5m2": (_store_in_e5m2, has_fp8),
    "lm_head": (_quantize_head, has_fp8),
    "excluded": (_exclude_one, has_fp8),
    "both-formats-missing": (_drop_formats, has_method(_CT, scheme=True)),
}
WEIGHT_DAMAGES = tuple(
    Damage(name=f"w-{name}", change=change, fits=fits) for name, (change, fits) in _TENSORS.items()
)
