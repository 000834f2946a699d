"""What a folder stores of its weights: files, tensors, scales, and schemes by its config."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.model_config import QUANTIZATION_KEYS, list_text_configs
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.odd_scales import suspect_weight_scales
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Finding
from fp8calib.engines.status import Status
from fp8calib.engines.weights.layers import PLAIN_DTYPES, WEIGHT
from fp8calib.errors import ModelError, shorten
from fp8calib.formats.fp8.modelopt import OLD_BLOCK_ALGORITHM
from fp8calib.formats.fp8.quantization_config import ContradictionError, StoredScheme
from fp8calib.formats.fp8.registry import load_finder, refine_dialect
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, is_linear_scale, name_weight_scales
from fp8calib.formats.kv.overlay import make_quantization_config
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.formats import SMALLEST_EXPONENT, SMALLEST_SCALE

if TYPE_CHECKING:  # only named
    from fp8calib.calibration.calibration_stats import RunStats

Located = Mapping[str, tuple[str, TensorEntry]]
"""The file and the entry of each tensor, by its name."""
_UNCHECKED = "what engines do with the FP8 weights is not checked"
_SCALES_FIX = "quantize the model again"
_AT_ONCE_BYTES = 2**24
NOT_FINITE_FIX = "download the file again; if it is the same, quantize or train again"
_VALUES_FIX = "write the checkpoint again, with each tensor once"


def list_opened_files(folder: ScaleFolder, *, prefers_single: bool = False) -> tuple[str, ...]:
    """List the files that an engine opens, readable or not, in order.

    Some folders contain the same weights again, under other names, in files that the index does not
    name. transformers prefers `model.safetensors` to those that it names.
    """
    weight_map = folder.indexed
    named = set(folder.files) if weight_map is None else set(weight_map.values())
    if prefers_single and SINGLE_FILE_NAME in folder.files:
        named = {SINGLE_FILE_NAME}
    return tuple(file for file in folder.files if file in named)


class OpenedWeights:
    """The weights in the files that an engine opens; `stats` are of the unquantized model."""

    def __init__(
        self,
        folder: ScaleFolder,
        files: Sequence[str],
        geometry: ModelGeometry,
        stats: RunStats | None = None,
    ) -> None:
        self.folder = folder
        self.geometry = geometry
        self._files = [file for file in files if file in folder.tensors]
        self.located = {
            name: (file, entry)
            for file in self._files
            for name, entry in folder.tensors[file].items()
        }
        self.tensors = {name: entry for name, (_, entry) in self.located.items()}
        self.dialect = ""
        """The name of that of the FP8 weights."""
        self.schemes: dict[str, StoredScheme] = {}
        """By the config, of the linears that are stored in FP8, by path."""
        self.suspicious: list[str] = []
        """What looks wrong about scales of FP8 weights."""
        self.odd_scales: set[str] = set()
        """Their names: they tell nothing of K and V."""
        self.doubts: list[str] = []
        """What engines do with these weights and nobody here knows."""
        weight_map = folder.index.get("weight_map") if isinstance(folder.index, dict) else None
        named = weight_map.values() if isinstance(weight_map, dict) else ()
        if path := next((each for each in named if isinstance(each, str) and os.sep in each), ""):
            why = f"{INDEX_NAME} names {shorten(path)}, a path: an engine may not find it"
            self.doubts.append(why)  # engines compare paths as texts
        self.unlike_stats: Finding | None = None
        """A scale that is far from the statistics of the model."""
        fp8 = {name: each for name, each in self.tensors.items() if each.dtype in WEIGHT_FORMATS}
        stacks = (name for name, e in fp8.items() if len(e.shape) == 3 and "experts" in name)
        if (stack := next(stacks, None)) is not None:
            why = f"{_UNCHECKED} where one tensor holds many experts ({shorten(stack)})"
            self.doubts.append(why)
        stored = [
            name.removesuffix(f".{WEIGHT}")
            for name, entry in fp8.items()
            if name.endswith(f".{WEIGHT}") and len(entry.shape) == 2
        ]
        configs = (folder.config.get("quantization_config"), folder.modelopt)
        self.has_old_blocks = bool(stored) and any(
            OLD_BLOCK_ALGORITHM in str(config).upper() for config in configs
        )
        if self.has_old_blocks:
            why = f"engines accept {OLD_BLOCK_ALGORITHM} only for some of the linears"
            self.doubts.append(f"{_UNCHECKED}: {why}")
        elif stored:
            self._find_schemes(stored, stats)

    @cached_property
    def values(self) -> tuple[Mapping[str, str], Mapping[str, float], Mapping[str, float]]:
        """What `read_scale_values` gives."""
        return read_scale_values(self.folder, self.located)

    @cached_property
    def wrong_values(self) -> Finding | None:
        """What is wrong with the values that every engine computes with, without an error.

        A tensor that a later file replaces, a norm or bias that holds NaN or infinity, or a scale
        that is far from the statistics.
        """
        # vLLM 0.32.0 and transformers 5.23 keep the last one (run). KV scales are judged elsewhere.
        folder, indexed = self.folder, self.folder.indexed or {}
        for first, last in combinations(self._files, 2):
            for name in filter(folder.tensors[last].__contains__, folder.tensors[first]):
                is_meant = indexed.get(name) == last or parse_name(name) is not None
                if not is_meant and not is_equal(folder, (first, name), (last, name)):
                    where = f"{shorten(first)} and, with other values, in {shorten(last)}"
                    why = f"{shorten(name)} is in {where}: the later file wins"
                    return Finding(status=Status.MISREAD, why=why, fix=_VALUES_FIX)
        vectors: dict[str, list[str]] = defaultdict(list)
        for name, (file, entry) in self.located.items():
            is_vector = len(entry.shape) == 1 and entry.dtype in PLAIN_DTYPES
            if is_vector and name in self.geometry.parameters:
                vectors[file].append(name)
        for name, values in _read_tensors(folder, vectors):
            if not np.isfinite(values).all():
                why = f"{shorten(name)} holds NaN or infinity"
                return Finding(status=Status.BAD, why=why, fix=NOT_FINITE_FIX)
        return self.unlike_stats

    @cached_property
    def is_plain(self) -> bool:
        """Whether config and tensors quantize no linear: of 16 bits, or a KV overlay of that."""
        sections = [
            section
            for _, owner in list_text_configs(self.folder.config)
            for key in QUANTIZATION_KEYS
            if (section := owner.get(key)) is not None
        ]
        overlays = ([make_quantization_config(strategy)] for strategy in ("tensor", "attn_head"))
        if sections not in ([], *overlays) or self.folder.modelopt is not None:
            return False
        names = (name for name in self.tensors if parse_name(name) is None)
        has_scales = any("scale" in name or "zero_point" in name for name in names)
        return not has_scales and {each.dtype for each in self.tensors.values()} <= {*PLAIN_DTYPES}

    def _find_schemes(self, stored: Sequence[str], stats: RunStats | None) -> None:
        """Find the schemes of FP8 weights by the config, and scales that do not fit them."""
        try:
            dialect, find_scheme = load_finder(self.folder.path, self.folder.config)
            for module in stored:
                with suppress(ContradictionError):
                    self.schemes[module] = find_scheme(module)
        except ModelError as error:
            self.schemes = {}
            self.doubts.append(f"{_UNCHECKED}: {error.message}")
            return
        scales = {
            name: scheme.weights
            for module, scheme in self.schemes.items()
            for name in name_weight_scales(f"{module}.{WEIGHT}")
            if name in self.tensors
        }
        self.dialect = refine_dialect(dialect, scales).name
        _, _, largest = self.values
        unmeasured = self.tensors
        if stats is not None:
            # few checks have some
            from fp8calib.engines.weight_mistakes import (  # noqa: PLC0415
                judge_scale_places,
                judge_weight_scales,
                map_measured,
            )

            measured = map_measured(stats)
            unmeasured = {name: each for name, each in unmeasured.items() if name not in measured}
            why = judge_weight_scales(self.tensors, largest, stats)
            if why := why or judge_scale_places(self._read_places(), stats):
                self.unlike_stats = Finding(status=Status.BAD, why=why, fix=_SCALES_FIX)
        for text, odd in suspect_weight_scales(unmeasured, largest):
            self.suspicious.append(text)
            self.odd_scales.update(odd)

    def _read_places(self) -> dict[str, tuple[NDArray[np.float32], tuple[int, int]]]:
        """Read what scales of weights stand for, and the sizes of blocks; MXFP8's are rounded."""
        weights: dict[str, str] = {}
        by_file: dict[str, list[str]] = defaultdict(list)
        _, _, largest = self.values
        for module in (each for each, scheme in self.schemes.items() if not scheme.is_mx):
            for name in name_weight_scales(f"{module}.{WEIGHT}"):
                if name in largest:
                    weights[name] = f"{module}.{WEIGHT}"
                    by_file[self.located[name][0]].append(name)
        found = {}
        for name, values in _read_tensors(self.folder, by_file):
            most = WEIGHT_FORMATS[self.tensors[weights[name]].dtype].max
            scheme = self.schemes[weights[name].removesuffix(f".{WEIGHT}")]
            found[weights[name]] = (values * most, scheme.block)
        return found


def is_equal(folder: ScaleFolder, first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Compare two tensors, each a file and a name, some megabytes at a time."""
    (file, name), (other_file, other) = first, second
    entry, beside = folder.tensors[file][name], folder.tensors[other_file][other]
    if (entry.dtype, entry.shape) != (beside.dtype, beside.shape):
        return False
    with TensorFile(folder.path / file) as one, TensorFile(folder.path / other_file) as two:
        for start in range(0, entry.size_bytes, _AT_ONCE_BYTES):
            stop = min(start + _AT_ONCE_BYTES, entry.size_bytes)
            part, its = one.read_array(name, start, stop), two.read_array(other, start, stop)
            if not np.array_equal(part, its):
                return False
    return True


def _read_tensors(
    folder: ScaleFolder, names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Read vectors and scales by their files, each file in few requests."""
    for file, held in names.items():
        with TensorFile(folder.path / file) as opened:
            opened.fetch(held)
            yield from ((name, opened.read_floats(name, of_scale=True)) for name in held)


def read_scale_values(
    folder: ScaleFolder, tensors: Located
) -> tuple[Mapping[str, str], Mapping[str, float], Mapping[str, float]]:
    """Read the scales of linears; numbers smaller than a byte are not read.

    Returns:
        By the names of scales: what one holds that is not a finite, normal number above zero, in
        words; the number of each that is a single number; the largest number of each that is not
        bad.
    """
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, (file, entry) in tensors.items():
        if is_linear_scale(name) and entry.dtype not in PACKED_BITS and entry.size_bytes:
            by_file[file].append(name)
    bad: dict[str, str] = {}
    numbers: dict[str, float] = {}
    largest: dict[str, float] = {}
    for name, values in _read_tensors(folder, by_file):
        has_exponents = tensors[name][1].dtype in ("U8", "F8_E8M0")
        if what := describe_bad(values, SMALLEST_EXPONENT if has_exponents else SMALLEST_SCALE):
            bad[name] = what
        else:
            largest[name] = float(values.max())
        if values.size == 1:
            numbers[name] = values.item()
    return bad, numbers, largest


def describe_bad(values: NDArray[np.float32], smallest: float) -> str:
    """Say what a scale holds that no scale may hold; empty if it has none of these."""
    # Kernels on GPUs may take a subnormal number for 0, and its reciprocal is infinite.
    marks = {
        "NaN": np.isnan(values),
        "infinity": np.isinf(values),
        "a negative number": values < 0,
        "0": values == 0,
        f"a number under {smallest:.4g}": values < smallest,
    }
    return next((what for what, found in marks.items() if bool(found.any())), "")
