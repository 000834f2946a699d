"""A dialect: one way to store scales, as an object that recognises, reads and writes it.

This module imports neither torch nor safetensors: the command line names the dialects in its help.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.fp8.formats import KV_FORMATS, Fp8Format

if TYPE_CHECKING:
    import torch

    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.dialects.metadata import Provenance
    from fp8calib.geometry.model_geometry import ModelGeometry
    from fp8calib.geometry.sites import Site
    from fp8calib.scales.compute import ScaleTable
    from fp8calib.stats.calibration_origin import CalibrationOrigin


class Spelling(StrEnum):
    """How the name of a scale continues the path of its attention module."""

    ATTENTION = "k_scale"
    """`self_attn.k_scale`: compressed-tensors, AutoFP8, TGI, the names vLLM has inside."""
    SINGLE = "kv_scale"
    """`self_attn.kv_scale`, for k and v: TGI, older AutoFP8."""
    PROJECTION = "k_proj.k_scale"
    """`self_attn.k_proj.k_scale`, or under a fused `qkv_proj`: ModelOpt."""
    OUTPUT = "k_proj.output_scale"
    """`self_attn.k_proj.output_scale`: Quark."""
    CACHE = "k_cache.scale"
    """`self_attn.k_cache.scale`, and `self_attn.q.scale`: Hunyuan 3."""
    ZERO_POINT = "k_zero_point"
    """`self_attn.k_zero_point`: compressed-tensors; zero, as the format is symmetric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFiles:
    """The files of a path that may hold KV scales, as far as names and configs describe them."""

    place: Path
    """The folder or file that the user named."""
    tensor_names: Mapping[Path, Collection[str]]
    """The names of the tensors in each `.safetensors` or `.npz` file."""
    documents: Mapping[Path, dict[str, object]] = field(default_factory=dict)
    """The JSON files that have the keys of a dialect; none where tensors are KV scales."""
    spellings: frozenset[Spelling] = frozenset()
    """Of the KV scales among the tensors and in the index."""
    quant_method: str = ""
    """What `config.json` beside the KV scales calls the quantization."""
    has_config: bool = False
    drops_bad_query: bool = False
    """Read without `q_scale`, and say so, where one is not a scale; else it is refused."""

    @property
    def folder(self) -> Path:
        """The folder whose config describes the files."""
        return self.place if self.place.is_dir() else self.place.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedScales:
    """The scales of one file or folder, as they are stored."""

    values: Mapping[Site, torch.Tensor]
    """fp32 [tp], or [1, heads] per head; layers that share a cache may be missing."""
    tp: int = 1
    per_head: bool = False
    fmt: Fp8Format | None = None
    """The format the file names; None where it names none."""
    origin: CalibrationOrigin | None = None
    """None where the file does not record it."""
    has_weights: bool = False
    """FP8 weights are stored there too."""
    files: tuple[Path, ...] = ()
    """Those that held the scales."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """The scales that a dialect writes, and what goes with them."""

    table: ScaleTable
    """K and V, and q where it was asked for; with the ranks or heads that the dialect has."""
    linears: ScaleTable | None = None
    """Weights and inputs for the same ranks; None where only KV scales are known."""
    source: Checkpoint | None = None
    """The model, for dialects that need it."""
    provenance: Provenance | None = None
    """The quantized model that the scales were read from; None where they were calibrated."""
    with_rank_weights: bool = False
    """Files of quantized weights are written beside the scales."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Entries of the model's folder that `save_checkpoint` left out, each with the reason."""

    def save_checkpoint(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        config_updates: Mapping[str, object],
        fmt: Fp8Format | None,
    ) -> None:
        """Write the model with extra tensors and a changed config.

        Args:
            folder: the checkpoint's folder, empty or not there.
            tensors: the scales by name.
            config_updates: top-level keys of config.json with their new values.
            fmt: the FP8 format to record in the scales' file; None where the config implies it.

        Raises:
            ModelError: the model's config.json is missing or broken.
            ExportError: the model has such tensors already, or the folder cannot be written.
        """
        from fp8calib.checkpoint.overlay import write_overlay  # noqa: PLC0415 -- imports torch

        assert self.source is not None  # noqa: S101 -- check_overlay_source refused it
        skipped = write_overlay(
            self.source,
            folder,
            scales=tensors,
            config_updates=config_updates,
            metadata=self._make_metadata(fmt),
        )
        self.skipped.update(skipped)

    def save_tensors(
        self, path: Path, tensors: Mapping[str, torch.Tensor], *, fmt: Fp8Format | None
    ) -> None:
        """Write a safetensors file that records `fmt` and the origin of the scales.

        Raises:
            ExportError: the file cannot be written.
        """
        from fp8calib.checkpoint.tensor_file import save_tensors  # noqa: PLC0415 -- imports torch

        save_tensors(path, tensors, metadata={"format": "pt", **self._make_metadata(fmt)})

    def save_json(self, path: Path, document: Mapping[str, object]) -> None:
        """Write a JSON file that records the origin of the scales; floats read back as fp32.

        Engines ignore the keys `_comment` and `_fp8calib` at the top of a document.

        Raises:
            ExportError: the file cannot be written.
        """
        from fp8calib.dialects.metadata import JSON_MEASURED_KEY  # noqa: PLC0415 -- imports torch

        origin = self.table.origin
        comment = {} if self.provenance is None else {"_comment": self.provenance.describe()}
        measured = {} if origin is None else {JSON_MEASURED_KEY: origin.to_fields()}
        text = json.dumps({**comment, **document, **measured}, indent=2, allow_nan=False)
        write_file_atomic(path, f"{text}\n".encode())

    def _make_metadata(self, fmt: Fp8Format | None) -> dict[str, str]:
        from fp8calib.dialects.metadata import make_metadata  # noqa: PLC0415 -- imports torch

        return make_metadata(fmt=fmt, origin=self.table.origin, provenance=self.provenance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way to store scales: how it is recognised, read and written, and what it can hold."""

    name: str
    """Of `--format`, and of what was read."""
    description: str
    path_pattern: str = ""
    """The folder or file it writes under the output folder; `{tp}` is the number of ranks."""
    write: Callable[[WriteJob, Path], None] | None = None
    """Write the scales to `path`; None: it is only read."""
    recognise: Callable[[ScaleFiles], bool] | None = None
    """Tell whether files hold scales of this dialect; None: they are read as another dialect."""
    read: Callable[[ScaleFiles, ModelGeometry], ParsedScales] | None = None
    """Read the scales of a model from recognised files, strictly."""
    formats: tuple[Fp8Format, ...] = tuple(KV_FORMATS.values())
    """The FP8 formats its scales can be for; one where the tool knows no other."""
    requires_dtype: bool = False
    """A file that does not name its FP8 format is not valid."""
    scale_suffixes: tuple[str, ...] = ("_scale",)
    """How the names of its tensors of scales end, those of weights and inputs too."""
    json_keys: tuple[str, ...] = ()
    """Keys that its JSON files have; the first is at the top."""
    needs_model: bool = False
    """It is a checkpoint folder, with the model's weights."""
    replaces_quantization: bool = False
    """Its `quantization_config` would take the place of the model's own."""
    per_tp: bool = False
    """It has a scale for each rank: one file for each tensor-parallel degree."""
    per_head: bool = False
    """It has a scale for each KV head."""
    has_query: bool = False
    """It has a place for the scale of q."""
    has_linears: bool = False
    """It has scales of weights and activations too."""
    joins_kv: bool = False
    """It has one scale a layer, for k and v."""
    lists_all_layers: bool = False
    """Layers without K and V have an entry as well, 1.0."""

    def path(self, tp: int = 1) -> str:
        """Name the folder or file for `tp` ranks."""
        return self.path_pattern.format(tp=tp)

    def degrees(self, tps: Iterable[int]) -> tuple[int, ...]:
        """List the tensor-parallel degrees to write a file for."""
        return tuple(dict.fromkeys(tps)) if self.per_tp else (1,)
