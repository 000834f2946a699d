"""Ask transformers once about what is the same to it: checkpoints, and configs.

Nearly every command asks it, for a tenth of a second each, and most tests write the same few tiny
checkpoints. What it answers depends on files and the model's geometry alone, and the model on the
meta device, of which a geometry is read, on the config.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.transformers import report
from fp8calib.engines.weights.stored import read_scale_values
from fp8calib.model import geometry_from_class
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.load import LoadedModel, ModelSource

_ask = report.report_transformers
_build = geometry_from_class.build_skeleton
_ANSWERS: dict[tuple[object, ...], Any] = {}
_SKELETONS: dict[str, LoadedModel] = {}
_MOST_SKELETONS = 16
"""More would be scanned by the garbage collector for longer than they take to build."""


def ask_transformers(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> Any:
    """Report what transformers does with a folder, which is loaded only if it is a new one."""
    key = (json.dumps(folder.config), *map(repr, _list_seen(folder)), repr(geometry))
    if key not in _ANSWERS:
        _ANSWERS[key] = _ask(folder, geometry, tp)
    return _ANSWERS[key]


def build_skeleton(source: ModelSource) -> LoadedModel:
    """Build a model on the meta device; the reader of its geometry changes nothing in it."""
    key = json.dumps(source.raw_config, default=str)
    if key not in _SKELETONS:
        if len(_SKELETONS) == _MOST_SKELETONS:
            _SKELETONS.clear()
        _SKELETONS[key] = _build(source)
    return _SKELETONS[key]


def _list_seen(folder: ScaleFolder) -> Iterator[object]:
    """List what transformers and the replay see of a folder: of weights, only values of biases."""
    yield from (folder.tensors, folder.scales, folder.faults, folder.index, folder.recorded)
    yield from (folder.modelopt, folder.unread, folder.preferred)
    for path in sorted(folder.path.iterdir()):
        if path.suffix != ".safetensors":
            is_config = path.name.endswith("config.json") and path.is_file()
            yield path.name, path.read_bytes() if is_config else b""
        elif path.name in folder.tensors:
            yield _read_header(path)
            with TensorFile(path) as file:
                named = folder.tensors[path.name].items()
                biases = ((name, each) for name, each in named if name.endswith(".bias"))
                yield [file.read_array(name, 0, each.size_bytes).tobytes() for name, each in biases]
    places = {n: (file, e) for file, held in folder.tensors.items() for n, e in held.items()}
    yield sorted(read_scale_values(folder, places)[0].items())


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
