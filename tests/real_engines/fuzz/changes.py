"""The changes that `damages.tsv` names: of a draft, at some place, with a value."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.real_engines.fuzz.compare import dequantize
from tests.real_engines.fuzz.draft import INDEX, Draft, UnfitError
from tests.real_engines.fuzz.forms import draw_scale

Change = Callable[[Draft, str, Any], None]
_WIDTH = 64
_NAN_EXPONENT = 255
_QUANTIZATION = "quantization_config"


def _list_beside(draft: Draft, *ends: str) -> list[str]:
    """List the tensors of these names beside FP8 weights."""
    beside = (name for module in draft.fp8_modules() for name in draft.companions(module))
    return [name for name in beside if name.rpartition(".")[2] in ends]


def _list_first_layer(draft: Draft) -> list[str]:
    first = draft.attentions[0][1]
    return [name for name, (path, _) in draft.kv_scales().items() if path.startswith(first)]


def _list_scales(draft: Draft) -> list[str]:
    return _list_beside(draft, "weight_scale", "weight_scale_inv")


_KINDS: Mapping[str, Callable[[Draft], list[str]]] = {
    "kv": lambda draft: sorted(draft.kv_scales()),
    "k": lambda draft: [name for name, (_, role) in draft.kv_scales().items() if role == "k"],
    "v": lambda draft: [name for name, (_, role) in draft.kv_scales().items() if role == "v"],
    "first-layer": _list_first_layer,
    "modules": Draft.fp8_modules,
    "weights": lambda draft: [f"{module}.weight" for module in draft.fp8_modules()],
    "scales": _list_scales,
    "inputs": lambda draft: _list_beside(draft, "input_scale"),
    "tensors": sorted,
}
"""What a change may be made to: KV scales, linears in FP8, their tensors, or all tensors."""


def _select(draft: Draft, where: str) -> list[str]:
    """List what is meant by a kind, and by ends of names behind it; `one` draws one of them."""
    kind, *ends = where.removeprefix("one ").split()
    found = [name for name in _KINDS[kind](draft) if not ends or name.endswith(tuple(ends))]
    if not found and kind not in ("k", "v"):
        raise UnfitError(f"there is no {where}")
    return [draft.random.choice(found)] if where.startswith("one ") else found


def set_key(draft: Draft, where: str, value: object) -> None:
    """Set a key of config.json; a dot leads into an object."""
    holder, last = _find(draft, where)
    holder[last] = value


def drop_key(draft: Draft, where: str, _: object) -> None:
    """Remove a key of config.json."""
    holder, last = _find(draft, where)
    holder.pop(last, None)


def _find(draft: Draft, key: str) -> tuple[dict[str, Any], str]:
    """Find the object that holds a key, and the key's last part."""
    *path, last = key.split(".")
    found = draft.config
    for part in path:
        found = found.get(part)  # type: ignore[assignment]
        if not isinstance(found, dict):
            raise UnfitError(f"there is no object {part}")
    return found, last


def drop_formats(draft: Draft, where: str, value: object) -> None:
    """Remove the format of compressed-tensors, of the whole and of its group."""
    for path in (_QUANTIZATION, f"{_QUANTIZATION}.config_groups.group_0"):
        drop_key(draft, f"{path}.{where}", value)


def _edit(new: Callable[[torch.Tensor, Any], torch.Tensor]) -> Change:
    """Make a change of tensors."""

    def change(draft: Draft, where: str, value: Any) -> None:
        for name in _select(draft, where):
            draft.put(name, new(draft[name], value))

    return change


def _set_first(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = _NAN_EXPONENT if tensor.dtype is torch.uint8 else value
    return changed


fill = _edit(torch.full_like)
set_first = _edit(_set_first)
cast = _edit(lambda tensor, dtype: tensor.to(getattr(torch, dtype)))
cast_64_times = _edit(lambda tensor, dtype: (tensor.float() * 64).to(getattr(torch, dtype)))
reinterpret = _edit(lambda tensor, dtype: tensor.view(getattr(torch, dtype)))
cut_rows = _edit(lambda tensor, end: tensor[:end].clone())
reshape = _edit(lambda tensor, shape: tensor.reshape(shape).clone())
repeat_first = _edit(
    lambda tensor, shape: tensor.reshape(-1)[:1].repeat(math.prod(shape)).reshape(shape)
)
repeat_row = _edit(lambda tensor, _: torch.cat([tensor, tensor[:1]]))
repeat_columns = _edit(lambda tensor, count: tensor.repeat_interleave(count, 1))
transpose = _edit(lambda tensor, _: tensor.T.contiguous())
raise_two_to = _edit(lambda tensor, bias: torch.exp2(tensor.float() - bias))


def drop(draft: Draft, where: str, _: object) -> None:
    """Remove tensors."""
    for name in _select(draft, where):
        draft.pop(name)


def drop_linear(draft: Draft, where: str, _: object) -> None:
    """Remove linears with all that is beside their weights."""
    for module in _select(draft, where):
        for name in [f"{module}.weight", *draft.companions(module)]:
            draft.pop(name)


def rename(draft: Draft, where: str, value: str) -> None:
    """Rename tensors; the new name has parts of the old one, or of what a KV scale belongs to."""
    scales = draft.kv_scales() if "{path}" in value else {}
    for name in _select(draft, where):
        module, rest = name.rpartition(".")[0], name.partition(".")[2]
        path, role = scales.get(name, ("", ""))
        fields = {"name": name, "module": module, "rest": rest, "path": path}
        draft.rename(name, value.format(**fields, role=role, ROLE=role.upper()))


def replace_names(draft: Draft, where: str, value: Mapping[str, str]) -> None:
    """Replace parts of the names in which there is something."""
    for name in [name for name in draft if where in name]:
        new = name
        for old, part in value.items():
            new = new.replace(old, part)
        draft.rename(name, new)


def strip_root(draft: Draft, *_: object) -> None:
    """Remove the first part of all names."""
    for name in [*draft]:
        root, _, rest = name.partition(".")
        if rest and root in {"model", "transformer", "backbone"}:
            draft.rename(name, rest)


def add_number(draft: Draft, where: str, _: object) -> None:
    """Give every attention module, or its layer, one more scale.

    `where` contains {attention}, {layer}, {mlp} (a linear after attention), or no path.
    """
    stored = set(draft)
    for _, path in draft.attentions:
        layer = path.rpartition(".")[0]
        mlp = _find_mlp(draft, layer, path) if "{mlp}" in where else ""
        added = where.format(attention=path, layer=layer, mlp=mlp)
        if added in stored:
            raise UnfitError(f"{added} is stored already")
        draft.put(added, torch.tensor([draw_scale(draft.random)]))


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


def add_tensor(draft: Draft, where: str, shape: list[int]) -> None:
    """Add a tensor; its name may contain {layer} and {attention}, those of the first layer."""
    _, attention = draft.attentions[0]
    added = where.format(attention=attention, layer=attention.rpartition(".")[0])
    if added in set(draft):
        raise UnfitError(f"{added} is stored already")
    draft.put(added, torch.full(shape, 0.5, dtype=torch.bfloat16))


def add_beside(draft: Draft, where: str, leaf: str) -> None:
    """Give linears in FP8 one more tensor."""
    for module in _select(draft, where):
        draft.put(f"{module}.{leaf}", torch.tensor([0.25]))


def copy_layer(draft: Draft, *_: object) -> None:
    """Add the scales of a layer that the model does not have."""
    for name, (path, _) in list(draft.kv_scales().items()):
        index = next(i for i, attention in draft.attentions if path.startswith(attention))
        if index == draft.attentions[-1][0]:
            added = name.replace(f".{index}.", f".{index + 1}.", 1)
            draft.put(added, torch.tensor([draw_scale(draft.random)]))


def copy_expert(draft: Draft, *_: object) -> None:
    """Copy the last expert of a layer under the next number."""
    names = [name for name in draft if ".experts." in name]
    numbered = {n: n.partition(".experts.")[2].partition(".")[0] for n in names}
    numbers = [int(number) for number in numbered.values() if number.isdigit()]
    if not numbers:
        raise UnfitError("there are no experts of their own")
    last = max(numbers)
    for name in names:
        head, _, rest = name.partition(".experts.")
        if rest.startswith(f"{last}."):
            copy = f"{head}.experts.{last + 1}.{rest.partition('.')[2]}"
            draft.put(copy, draft[name].clone())


def unlist(draft: Draft, *_: object) -> None:
    """Leave KV scales out of the index."""
    if not draft.is_indexed:
        tensors = next(iter(draft.shards.values()))
        draft.shards["kv_scales.safetensors"] = {n: tensors.pop(n) for n in draft.kv_scales()}
    draft.is_indexed = True
    draft.unlisted = set(draft.kv_scales())


def list_missing_file(draft: Draft, *_: object) -> None:
    """List a tensor in a file that is not there."""
    draft.is_indexed = True
    draft.missing_files = {"model.extra_scale": "model-00009-of-00009.safetensors"}


def record_fnuz(draft: Draft, *_: object) -> None:
    """Say in the file that its scales are for the range of AMD's first FP8."""
    draft.metadata = {**draft.metadata, "fp8calib.kv_cache_dtype": "float8_e4m3fnuz"}


def restore(draft: Draft, where: str, ends: list[str]) -> None:
    """Store linears in 16 bits, with the numbers that codes stood for before any damage.

    The tensors beside them whose names end as in `ends` are removed.
    """
    for module in _select(draft, where):
        names = (name for name in draft.undamaged if name.startswith(f"{module}."))
        weight = f"{module}.weight"
        decoded = dequantize({name: draft.undamaged[name] for name in names})
        draft.put(weight, decoded[weight].bfloat16())
        for name in draft.companions(module):
            if name.endswith(tuple(ends)):
                draft.pop(name)


def quantize_head(draft: Draft, *_: object) -> None:
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
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        if isinstance(listed := draft.quantization.get(key), list):
            draft.quantization[key] = [item for item in listed if item != "lm_head"]
    if draft.own_file is not None:
        draft.own_file["quantization"]["exclude_modules"] = []


def exclude(draft: Draft, where: str, _: object) -> None:
    """Exclude linears in FP8 in the config."""
    modules = _select(draft, where)
    for key in ("ignore", "ignored_layers"):
        if key in draft.quantization:
            draft.quantization[key] = [*draft.quantization[key], *modules]


def store_in_e5m2(draft: Draft, *_: object) -> None:
    """Fill the range of another dtype, with scales by which the numbers stay the model's."""
    factor = torch.finfo(torch.float8_e5m2).max / torch.finfo(torch.float8_e4m3fn).max
    for name in _select(draft, "weights"):
        draft.put(name, (draft[name].float() * factor).to(torch.float8_e5m2))
    for name in _list_scales(draft):
        scale = draft[name]
        is_power = scale.dtype is torch.uint8
        draft.put(name, scale - round(math.log2(factor)) if is_power else scale / factor)


def _after_saving(write: Callable[[Path, Any], None]) -> Change:
    """Make a change of the folder that is made when its files are written."""

    def change(draft: Draft, _: str, value: object) -> None:
        draft.written_last[write.__name__] = lambda folder: write(folder, value)

    return change


def _list_weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@_after_saving
def write_consolidated(folder: Path, _: object) -> None:
    """Write a tensor as Mistral's own files name it."""
    tensors = {"layers.0.attention.wq.weight": torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)}
    save_file(tensors, folder / "consolidated.safetensors")


@_after_saving
def write_second(folder: Path, _: object) -> None:
    """Store the first shard once more, with other numbers."""
    tensors = load_file(_list_weights(folder)[0])
    doubled = {n: t + t if t.element_size() > 1 else t for n, t in tensors.items()}
    save_file(doubled, folder / "zz.safetensors", metadata={"format": "pt"})


@_after_saving
def write_dangling(folder: Path, _: object) -> None:
    """Write a link to nothing."""
    (folder / "model-old.safetensors").symlink_to(folder / "not-there")


@_after_saving
def write_folder(folder: Path, _: object) -> None:
    """Make a folder that is called as a file of weights."""
    (folder / "old.safetensors").mkdir()


@_after_saving
def write_pickle(folder: Path, _: object) -> None:
    """Store all tensors in PyTorch's own format instead."""
    tensors = {n: t for path in _list_weights(folder) for n, t in load_file(path).items()}
    for path in (*_list_weights(folder), folder / INDEX):
        path.unlink(missing_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")


@_after_saving
def write_generation(folder: Path, value: object) -> None:
    """Write a generation config."""
    (folder / "generation_config.json").write_text(json.dumps(value))


@_after_saving
def write_index(folder: Path, value: str) -> None:
    """Make an index of all files; `value` is how it spells them."""
    weight_map = {
        name: value.format(name=path.name, folder=folder)
        for path in _list_weights(folder)
        for name in load_file(path)
    }
    (folder / INDEX).write_text(json.dumps({"metadata": None, "weight_map": weight_map}))
