"""A checkpoint in memory, while it is damaged."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
OWN_FILE = "hf_quant_config.json"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
_KV_SCALE = re.compile(
    r"(.*\.(?:\w*attn|\w*attention|mixer))\."
    r"(?:attn\.|k_proj\.|v_proj\.|qkv_proj\.)?(k|v|kv)_(?:scale|cache\.scale|proj\.output_scale)"
)
_PROCESSOR = re.compile("tokenizer|.*processor|chat_template")
Tensors = dict[str, torch.Tensor]


class UnfitError(Exception):
    """A damage needs something that this checkpoint does not have."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A checkpoint's tensors and JSON files, to be changed and saved."""

    random: Random
    config: dict[str, Any]
    shards: dict[str, Tensors]
    """By file."""
    own_file: dict[str, Any] | None
    """The content of ModelOpt's hf_quant_config.json."""
    attentions: list[tuple[int, str]]
    """The layers with a KV cache, and the paths of their attention modules."""
    is_indexed: bool
    processor: dict[str, bytes] = field(default_factory=dict)
    """By file, what turns text and media into inputs."""
    unlisted: set[str] = field(default_factory=set)
    """Names that the index does not list."""
    missing_files: dict[str, str] = field(default_factory=dict)
    """Names that the index lists in files that do not exist."""
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    written_last: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """What is done to the folder after the files are written, by a name for it."""
    undamaged: Tensors = field(init=False)
    """All tensors before the first damage."""

    def __post_init__(self) -> None:
        self.undamaged = {name: self[name] for name in self}

    @property
    def quantization(self) -> dict[str, Any]:
        """Give the `quantization_config`."""
        found = self.config.get("quantization_config")
        if not isinstance(found, dict):
            raise UnfitError("there is no quantization_config")
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for tensors in self.shards.values() for name in tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._find(name)[name]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor where it was, or in the last file."""
        holder = next((held for held in self.shards.values() if name in held), None)
        (list(self.shards.values())[-1] if holder is None else holder)[name] = tensor

    def pop(self, name: str) -> torch.Tensor:
        """Remove a tensor and give it."""
        return self._find(name).pop(name)

    def rename(self, old: str, new: str) -> None:
        """Store a tensor under another name, in its file."""
        holder = self._find(old)
        holder[new] = holder.pop(old)

    def _find(self, name: str) -> Tensors:
        return next(held for held in self.shards.values() if name in held)

    def kv_scales(self) -> dict[str, tuple[str, str]]:
        """Give the attention module and the role (k, v, kv) of every KV scale by its name."""
        matches = {name: _KV_SCALE.fullmatch(name) for name in self}
        found = {name: (match[1], match[2]) for name, match in matches.items() if match}
        if not found:
            raise UnfitError("there are no KV scales")
        return found

    def fp8_modules(self) -> list[str]:
        """List the linears whose weights are FP8."""
        names = (name for name in self if name.endswith(".weight"))
        found = [n.removesuffix(".weight") for n in names if self[n].dtype in FP8_DTYPES]
        if not found:
            raise UnfitError("there are no FP8 weights")
        return found

    def companions(self, module: str) -> list[str]:
        """List the tensors beside a linear's weight."""
        return [n for n in self if n.startswith(f"{module}.") and n != f"{module}.weight"]

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.own_file is not None:
            (folder / OWN_FILE).write_text(json.dumps(self.own_file))
        for file, content in self.processor.items():
            (folder / file).write_bytes(content)
        weight_map = dict(self.missing_files)
        for file, tensors in self.shards.items():
            save_file(tensors, folder / file, metadata=self.metadata)
            weight_map |= {name: file for name in tensors if name not in self.unlisted}
        if self.is_indexed:
            document = {"metadata": {}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(document))
        for write in self.written_last.values():
            write(folder)


def load_draft(folder: Path, random: Random, attentions: list[tuple[int, str]]) -> Draft:
    """Read a checkpoint."""
    own_file = folder / OWN_FILE
    return Draft(
        random=random,
        config=json.loads((folder / "config.json").read_text()),
        shards={path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))},
        own_file=json.loads(own_file.read_text()) if own_file.is_file() else None,
        attentions=attentions,
        is_indexed=(folder / INDEX).is_file(),
        processor={
            path.name: path.read_bytes() for path in folder.iterdir() if _PROCESSOR.match(path.name)
        },
    )
