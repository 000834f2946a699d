"""Damages of KV scales: names, values, dtypes, shapes, and what is missing."""

import math

import torch

from tests.real_engines.fuzz.damage import Change, Damage, Edit, drop, edit, has_kv, one_of, rename
from tests.real_engines.fuzz.draft import Draft, UnfitError
from tests.real_engines.fuzz.forms import draw_scale


def _scales(draft: Draft) -> list[str]:
    return sorted(draft.kv_scales())


def _all_but(role: str) -> Change:
    """Make a change that removes the scales of the other role."""
    kept = {role, "kv"}
    return drop(lambda draft: [n for n, (_, r) in draft.kv_scales().items() if r not in kept])


def _first_layer(draft: Draft) -> list[str]:
    first = draft.attentions[0][1]
    return [name for name, (path, _) in draft.kv_scales().items() if path.startswith(first)]


def _one(new: Edit) -> Change:
    return edit(one_of(_scales), new)


def _all(new: Edit) -> Change:
    return edit(_scales, new)


def _fill(value: float) -> Edit:
    return lambda scale: torch.full_like(scale, value)


def _repeat(*shape: int) -> Change:
    """Make a change of the shape; all elements are the first."""
    return _all(lambda scale: scale.reshape(-1)[:1].repeat(math.prod(shape)).reshape(shape))


def _number(draft: Draft) -> torch.Tensor:
    return torch.tensor([draw_scale(draft.random)])


def _add(name: str) -> Change:
    """Make a change that gives every attention module, or its layer, one more scale.

    `name` contains {attention}, {layer}, {mlp} (a linear after attention), or no path.
    """

    def change(draft: Draft) -> None:
        stored = set(draft)
        for _, path in draft.attentions:
            layer = path.rpartition(".")[0]
            fields = {"attention": path, "layer": layer, "mlp": ""}
            if "{mlp}" in name:
                fields["mlp"] = _find_mlp(draft, layer, path)
            if (added := name.format(**fields)) in stored:
                raise UnfitError(f"{added} is stored already")
            draft.put(added, _number(draft))

    return change


def _find_mlp(draft: Draft, layer: str, attention: str) -> str:
    """Find the last linear of a layer outside its attention."""
    found = [
        name.removesuffix(".weight")
        for name in draft
        if name.startswith(f"{layer}.") and not name.startswith(f"{attention}.")
        if name.endswith(".weight") and draft[name].dim() == 2
    ]
    if not found:
        raise UnfitError("the layer has no linear outside its attention")
    return found[-1]


def _copy_layer(draft: Draft) -> None:
    """Add the scales of a layer that the model does not have."""
    for name, (path, _) in list(draft.kv_scales().items()):
        index = next(i for i, attention in draft.attentions if path.startswith(attention))
        if index == draft.attentions[-1][0]:
            draft.put(name.replace(f".{index}.", f".{index + 1}.", 1), _number(draft))


def _rename(new: str) -> Change:
    """Make a change that renames all scales; `new` contains {path}, and {role} or {ROLE}."""

    def change(draft: Draft) -> None:
        for name, (path, role) in draft.kv_scales().items():
            draft.rename(name, new.format(path=path, role=role, ROLE=role.upper()))

    return change


def _unlist(draft: Draft) -> None:
    if not draft.is_indexed:
        tensors = next(iter(draft.shards.values()))
        draft.shards["kv_scales.safetensors"] = {n: tensors.pop(n) for n in draft.kv_scales()}
    draft.is_indexed = True
    draft.unlisted = set(draft.kv_scales())


def _list_missing_file(draft: Draft) -> None:
    draft.is_indexed = True
    draft.missing_files = {"model.extra_scale": "model-00009-of-00009.safetensors"}


def _record_fnuz(draft: Draft) -> None:
    draft.metadata = {**draft.metadata, "fp8calib.kv_cache_dtype": "float8_e4m3fnuz"}


_NAMES: dict[str, Change] = {
    "extra-layer": _copy_layer,
    "mtp": _add("mtp.{attention}.k_scale"),
    "mtp-layer": _add("mtp.layers.0.self_attn.k_scale"),
    "q_proj.q_scale": _add("{attention}.q_proj.q_scale"),
    "q_scale": _add("{attention}.q_scale"),
    "k_zero_point": _add("{attention}.k_zero_point"),
    "k_proj.k_zero_point": _add("{attention}.k_proj.k_zero_point"),
    "k_cache_scale": _add("{attention}.k_cache_scale"),
    "prob_output_scale": _add("{attention}.prob_output_scale"),
    "both-spellings": _add("{attention}.kv_scale"),
    "inner-kv_scale": _add("{attention}.attn.kv_scale"),
    "mlp.k_scale": _add("{layer}.mlp.k_scale"),
    "stray-input_scale": _add("{mlp}.input_scale"),
    "stray-weight_scale": _add("{mlp}.weight_scale"),
    "stray-output_scale": _add("{mlp}.output_scale"),
    "unknown-K_scale": _rename("{path}.{ROLE}_scale"),
    "unknown-k_cache_scale": _rename("{path}.{role}_cache_scale"),
    "unknown-key_scale": _rename("{path}.{role}ey_scale"),
    "unknown-_k_scale": _rename("{path}._{role}_scale"),
    "unknown-k_scales": _rename("{path}.{role}_scales"),
    "without-root": rename(_scales, lambda name: name.partition(".")[2]),
}
_VALUES: dict[str, Change] = {
    "one-zero": _one(_fill(0.0)),
    "all-zero": _all(_fill(0.0)),
    "one-nan": _one(_fill(math.nan)),
    "one-inf": _one(_fill(math.inf)),
    "one-negative": _one(_fill(-0.5)),
    "all-negative": _all(_fill(-0.5)),
    "one-tiny": _one(_fill(2e-8)),
    "one-subnormal": _one(_fill(1e-40)),
    "one-huge": _one(_fill(70000.0)),
    "one-largest": _one(_fill(3.4e38)),
    "all-one": _all(_fill(1.0)),
    "all-odd": _all(_fill(0.0123456)),
}
_DTYPES: dict[str, Change] = {
    f"dtype-{str(dtype).removeprefix('torch.')}": _all(
        lambda scale, dtype=dtype: (scale.float() * 64).to(dtype)
    )
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool),
        torch.float8_e4m3fn,
    )
}
_SHAPES: dict[str, Change] = {
    "shape-0d": _repeat(),
    "shape-1": _repeat(1),
    "shape-1x1": _repeat(1, 1),
    "shape-1x1x1": _repeat(1, 1, 1),
    "shape-2": _repeat(2),
    "shape-heads": _repeat(2, 1, 1),
    "shape-too-many-heads": _repeat(8, 1, 1),
    "shape-empty": _one(lambda scale: scale.reshape(-1)[:0].clone()),
}
_MISSING: dict[str, Change] = {
    "only-k": _all_but("k"),
    "only-v": _all_but("v"),
    "layer-missing": drop(_first_layer),
    "all-missing": drop(_scales),
}
_FILES: dict[str, Change] = {
    "not-in-index": _unlist,
    "file-missing": _list_missing_file,
    "recorded-fnuz": _record_fnuz,
}
_TENSORS = _NAMES | _VALUES | _DTYPES | _SHAPES | _MISSING

KV_DAMAGES = tuple(
    Damage(name=f"kv-{name}", change=change, fits=has_kv)
    for name, change in (_TENSORS | _FILES).items()
)
TENSOR_DAMAGES = frozenset(f"kv-{name}" for name in _TENSORS)
"""Those that change scales alone, not the config nor the files."""
