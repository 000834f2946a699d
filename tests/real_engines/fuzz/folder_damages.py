"""Damages around the scales: tensor names, stray tensors and files, the config."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.real_engines.fuzz.damage import Change, Damage, Select, drop, edit, one_of, rename
from tests.real_engines.fuzz.draft import INDEX, Draft, UnfitError

_WIDTH = 64
_WITH_EXPERTS = ("deepseek_v3", "glm4_moe", "qwen3_moe")
"""Model types that store each expert by itself."""


def _strip_root(name: str) -> str:
    root, _, rest = name.partition(".")
    return rest if rest and root in {"model", "transformer", "backbone"} else name


def _add(name: str, *shape: int) -> Change:
    """Make a change that adds a tensor; `name` may contain {layer} and {attention}."""

    def change(draft: Draft) -> None:
        _, attention = draft.attentions[0]
        added = name.format(attention=attention, layer=attention.rpartition(".")[0])
        if added in set(draft):
            raise UnfitError(f"{added} is stored already")
        draft.put(added, torch.full(shape or (_WIDTH,), 0.5, dtype=torch.bfloat16))

    return change


def _one(*ends: str) -> Select:
    """Select one of the tensors whose names end so."""

    def select(draft: Draft) -> list[str]:
        found = sorted(name for name in draft if name.endswith(ends))
        if not found:
            raise UnfitError(f"no tensor is called {ends}")
        return found

    return one_of(select)


def _put_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = math.nan
    return changed


def _add_expert(draft: Draft) -> None:
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


def _last(write: Callable[[Path], None]) -> Change:
    def change(draft: Draft) -> None:
        draft.written_last[str(write)] = write

    return change


def _list_weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _write_consolidated(folder: Path) -> None:
    tensors = {"layers.0.attention.wq.weight": torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)}
    save_file(tensors, folder / "consolidated.safetensors")


def _write_second(folder: Path) -> None:
    """Store the first shard once more, with other numbers."""
    tensors = load_file(_list_weights(folder)[0])
    doubled = {n: t + t if t.element_size() > 1 else t for n, t in tensors.items()}
    save_file(doubled, folder / "zz.safetensors", metadata={"format": "pt"})


def _write_dangling(folder: Path) -> None:
    (folder / "model-old.safetensors").symlink_to(folder / "not-there")


def _write_folder(folder: Path) -> None:
    (folder / "old.safetensors").mkdir()


def _write_pickle(folder: Path) -> None:
    tensors = {n: t for path in _list_weights(folder) for n, t in load_file(path).items()}
    for path in (*_list_weights(folder), folder / INDEX):
        path.unlink(missing_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")


def _write_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": -1}))


def _write_index(edit: Callable[[str, Path], object]) -> Callable[[Path], None]:
    """Make an index of all files; `edit` gives the name of the file."""

    def write(folder: Path) -> None:
        files = _list_weights(folder)
        weight_map = {name: edit(path.name, folder) for path in files for name in load_file(path)}
        (folder / INDEX).write_text(json.dumps({"metadata": None, "weight_map": weight_map}))

    return write


_DAMAGES: dict[str, Change] = {
    "prefix-more": rename(list, lambda name: f"model.{name}"),
    "prefix-less": rename(list, _strip_root),
    "foo": _add("foo"),
    "head-bias": _add("lm_head.bias"),
    "score": _add("score.weight", 2, _WIDTH),
    "lora": _add("{attention}.q_proj.lora_A.weight", 8, _WIDTH),
    "masked_bias": _add("{attention}.masked_bias", 1),
    "rotary": _add("{attention}.rotary_emb.inv_freq", 32),
    "k_bias": _add("{attention}.k_proj.k_bias", 1),
    "norm-bias": _add("{layer}.input_layernorm.bias", 3),
    "num_batches": _add("{layer}.num_batches_tracked", 1),
    "k-rows-more": edit(_one("k_proj.weight"), lambda t: torch.cat([t, t[:1]])),
    "k-empty": edit(_one("k_proj.weight", "v_proj.weight"), lambda t: t[:0].clone()),
    "norm-short": edit(_one("norm.weight"), lambda t: t[:-1].clone()),
    "norm-nan": edit(_one("norm.weight"), _put_nan),
    "norm-missing": drop(_one("layernorm.weight", "norm.weight")),
    "embedding-missing": drop(_one("embed_tokens.weight", "wte.weight")),
    "head-missing": drop(_one("lm_head.weight")),
    "expert-more": _add_expert,
    "experts-w123": rename(
        list,
        lambda name: (
            name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
            if ".experts." in name
            else name
        ),
    ),
    "experts-parent": rename(
        list, lambda name: name.replace(".mlp.experts.", ".block_sparse_moe.experts.")
    ),
    "consolidated": _last(_write_consolidated),
    "second-file": _last(_write_second),
    "dangling-link": _last(_write_dangling),
    "folder-as-file": _last(_write_folder),
    "pickle": _last(_write_pickle),
    "generation": _last(_write_generation),
    "index-metadata-null": _last(_write_index(lambda name, _: name)),
    "index-dot": _last(_write_index(lambda name, _: f"./{name}")),
    "index-absolute": _last(_write_index(lambda name, folder: str(folder / name))),
}

FOLDER_DAMAGES = tuple(
    Damage(
        name=f"f-{name}",
        change=change,
        fits=lambda _: True,
        architectures=_WITH_EXPERTS if name.startswith("expert") else (),
    )
    for name, change in _DAMAGES.items()
)
