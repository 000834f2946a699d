"""A Hugging Face checkpoint folder whose tensors are read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.locations import refuse_external_link
from fp8calib.checkpoint.model_config import (
    CONFIG_NAME,
    MODELOPT_CONFIG_NAME,
    find_quantization_configs,
)
from fp8calib.checkpoint.tensor_file import TensorFile, TensorReader
from fp8calib.checkpoint.weight_index import INDEX_NAME, WeightIndex, find_weights
from fp8calib.errors import ModelError

_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}


class Checkpoint(TensorReader):
    """The safetensors weights of a folder; headers are checked on opening, tensors read on demand.

    Create it with `Checkpoint.open`; as a context manager it closes its files.

    Attributes:
        folder: the checkpoint's folder.
        index: the weight index; None if one file holds all tensors.
        files: the files that hold the tensors.
        tensors: the tensors, in the order of the files and of the data in each file.
        unlisted: tensors of these files that the index does not map to them: file and tensor.
        form: how the stored weights are quantized, if reading decodes them; else empty.
        has_weights: whether tensors can be read; otherwise only their names and shapes are known.
    """

    form: str = ""
    has_weights: bool = True

    def __init__(
        self, folder: Path, *, files: Collection[TensorFile] = (), index: WeightIndex | None = None
    ) -> None:
        self.folder = self.place = folder
        self._config: dict[str, object] | None = None
        self.index = index
        self.files = tuple(files)
        self._files: dict[str, TensorFile] = {}
        unlisted: list[tuple[str, str]] = []
        for file in files:
            for name in file.tensors:
                if index is None or index["weight_map"].get(name) == file.path.name:
                    self._files[name] = file
                else:
                    unlisted.append((file.path.name, name))
        self.unlisted = tuple(unlisted)
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(
            {name: file.tensors[name] for name, file in self._files.items()}
        )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Find the weights and check every header, without reading data.

        As in transformers, `model.safetensors` takes precedence over an index.

        Raises:
            ModelError: there are no safetensors weights, or index and files disagree.
        """
        names, index = find_weights(folder)
        checkpoint = cls(folder, files=[TensorFile(folder / name) for name in names], index=index)
        for name, file in index["weight_map"].items() if index else ():
            if name not in checkpoint.tensors:
                raise ModelError(
                    f"{folder / INDEX_NAME}: the tensor {name!a:.200} is not in {file}",
                    hint="index and shards do not match; download both again",
                )
        return checkpoint

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it is on disk: itself, unless reading decodes its weights."""
        return self

    @property
    def total_size_bytes(self) -> int:
        """The bytes of all listed tensors."""
        return sum(entry.size_bytes for entry in self.tensors.values())

    def load_config(self) -> dict[str, object]:
        """Load `config.json`, its keys in the file's order."""
        path = self.folder / CONFIG_NAME
        if self._config is None:
            if not path.is_file():
                hint = "name the folder that holds config.json and the weights"
                raise ModelError(f"{self.folder}: there is no config.json", hint=hint)
            self._config = load_json_object(path)
        return dict(self._config)

    def sample_bytes(self, name: str, size_bytes: int) -> bytes:
        """Read `size_bytes` from the middle of a tensor, or the whole tensor if it is smaller."""
        total = self.tensors[name].size_bytes
        size_bytes = min(size_bytes, total)
        start = (total - size_bytes) // 2
        return self.read_array(name, start, start + size_bytes).tobytes()

    def form_of(self, name: str) -> str:  # noqa: ARG002
        """Return how a tensor is quantized, if reading decodes it; else empty."""
        return ""

    def file_of(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.find_file(name).path

    def find_file(self, name: str) -> TensorFile:
        """Find the file that holds a tensor."""
        return self._files[name]

    def close(self) -> None:
        """Close all files; a later read opens its file again."""
        for file in self.files:
            file.close()


def refuse_duplicate_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds a tensor twice: readers differ in which copy they use."""
    for file_name, name in checkpoint.unlisted:
        if name in checkpoint.tensors:
            raise ModelError(
                f"{checkpoint.folder}: {name} is also in {file_name}, but the index names another "
                "file for it",
                hint="remove the copy, or download the checkpoint again",
            )


def open_leniently(folder: Path) -> Checkpoint:
    """Open every weight file of the folder whose header can be read, and ignore the index."""
    files: list[TensorFile] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            refuse_external_link(path)
            files.append(TensorFile(path))
        except ModelError:
            continue
    return Checkpoint(folder, files=files)


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Name the dtype in which most bytes of the checkpoint are stored."""
    sizes: dict[str, int] = {}
    for entry in checkpoint.tensors.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size_bytes
    most = max(sizes, key=lambda name: sizes[name], default="F32")
    return _STORED.get(most, most.lower())


def read_quantization(
    source: Checkpoint,
) -> tuple[Mapping[str, object], Mapping[str, object]] | None:
    """Read how a checkpoint is quantized: from config.json, and from ModelOpt's own file.

    Either may be empty; None for an unquantized checkpoint.

    Raises:
        ModelError: config.json or ModelOpt's own file cannot be read, or no config says how the
            weights are quantized.
    """
    sections = (section for _, section in find_quantization_configs(source.load_config()))
    config = next((section for section in sections if section), {})
    path = source.folder / MODELOPT_CONFIG_NAME
    own_file = load_json_object(path) if path.is_file() else {}
    if config or own_file:
        return config, own_file
    packed = (
        name
        for name, entry in source.tensors.items()
        if entry.dtype.startswith("F8_") or name.endswith((".qweight", ".weight_packed"))
    )
    if (name := next(packed, None)) is not None:
        raise ModelError(
            f"{source.folder}: {name} is quantized, but {CONFIG_NAME} has no quantization_config",
            hint="engines need it to load the weights: restore the config of the checkpoint",
        )
    return None
