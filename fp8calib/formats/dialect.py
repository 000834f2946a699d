"""A dialect: one way to store scales, as one object that recognises, reads and writes it.

Neither this module nor one that declares a dialect imports torch: `--help` names all dialects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.numerics.formats import KV_FORMATS, Fp8Format

if TYPE_CHECKING:
    import torch

    from fp8calib.calibration.origin import CalibrationOrigin
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.formats.quantized_model import QuantizedModel
    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.geometry import ModelGeometry, Site


class Spelling(StrEnum):
    """What a scale's name adds to the path of its attention module."""

    ATTENTION = "k_scale"
    """`self_attn.k_scale`: compressed-tensors, AutoFP8, TGI, and vLLM's own modules."""
    SINGLE = "kv_scale"
    """`self_attn.kv_scale`, for both k and v: TGI, older AutoFP8."""
    PROJECTION = "k_proj.k_scale"
    """`self_attn.k_proj.k_scale`, or under a fused `qkv_proj`: ModelOpt."""
    OUTPUT = "k_proj.output_scale"
    """`self_attn.k_proj.output_scale`: Quark."""
    CACHE = "k_cache.scale"
    """`self_attn.k_cache.scale`, and `self_attn.q.scale`: Hunyuan 3."""
    ZERO_POINT = "k_zero_point"
    """`self_attn.k_zero_point`: compressed-tensors; always zero, as FP8 is symmetric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFiles:
    """The files of a path that may hold KV scales, known by their names and their config."""

    place: Path
    """The folder or file that the user named."""
    tensor_names: Mapping[Path, Collection[str]]
    """The names of the tensors in each `.safetensors` or `.npz` file."""
    documents: Mapping[Path, dict[str, object]] = field(default_factory=dict)
    """The JSON files that have a dialect's `json_keys`; none if there are tensors of KV scales."""
    spellings: frozenset[Spelling] = frozenset()
    """The spellings of the KV scales in the files and in the index."""
    config: Mapping[str, object] | None = None
    """The config.json beside tensors of KV scales; None without one."""
    fills_layers: bool = False
    """Give layers without a scale 1.0, as engines do, instead of refusing the files."""
    drops_bad_query: bool = False
    """If a `q_scale` is not valid, leave out q and note it, instead of refusing the files."""

    @property
    def quant_method(self) -> str:
        """The method that the `quantization_config` names; empty if it names none."""
        section = (self.config or {}).get("quantization_config")
        method = section.get("quant_method") if isinstance(section, dict) else None
        return method if isinstance(method, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedScales:
    """The scales of one file or folder, as they are stored."""

    values: Mapping[Site, torch.Tensor]
    """fp32 [tp], or [1, heads] per head; layers that read another layer's cache may be missing."""
    tp: int = 1
    per_head: bool = False
    fmt: Fp8Format | None = None
    """The format that the file names; None if it names none."""
    origin: CalibrationOrigin | None = None
    """The model and the text that they were calibrated on; None if it is not recorded."""
    has_weights: bool = False
    """FP8 weights are stored beside the scales."""
    files: tuple[Path, ...] = ()
    """The files that held the scales."""
    notes: tuple[str, ...] = ()
    filled: Collection[Site] = ()
    """The sites whose scale is 1.0 because none is stored (`ScaleFiles.fills_layers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """How scales are added to a checkpoint that is quantized already, or has scales."""

    model: str = ""
    """The checkpoint's fingerprint; empty if the scales were calibrated on this checkpoint."""
    accepted: str = ""
    """How its unquantized tensors differ from the calibrated model's, or why this is unknown; empty
    if they are equal."""
    unchecked: str = ""
    """Why its linears were not all compared; empty if they were."""
    compared: str = ""
    """Which of its linears are those of the calibrated model, in words; empty if unknown."""
    replaces_scales: bool = False
    """The KV scales that it has are replaced."""


NO_ATTACHMENT = Attachment()
"""The record of scales that are not added to a quantized checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """The scales to write, and what is written with them."""

    table: ScaleTable
    """Scales of K and V, and of q if asked for, for the ranks or heads that the dialect has."""
    linears: ScaleTable | None = None
    """Scales of weights and inputs for the same ranks; None if only KV scales are known."""
    source: Checkpoint | None = None
    """The model, for dialects that need it."""
    with_rank_weights: bool = False
    """The caller writes the quantized weights of each rank beside the scales."""
    attachment: Attachment = NO_ATTACHMENT
    """How the scales are added to a model that is quantized already, or has scales."""
    quantized: QuantizedModel | None = None
    """The model, if it is quantized already."""
    replaced: frozenset[str] = frozenset()
    """The names of the model's own KV scales, which are left out."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Entries of the model's folder that `save_checkpoint` left out, each with the reason."""
    copied: dict[str, str] = field(default_factory=dict)
    """Files of weights that `save_checkpoint` could not hard-link, each with the reason."""

    def save_checkpoint(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        config_updates: Mapping[str, object],
        fmt: Fp8Format | None,
        documents: Mapping[str, object] | None = None,
    ) -> None:
        """Write the model with extra tensors and a changed config: see `write_overlay`.

        `fmt` is recorded in the scales' file; it is None if the config implies it.
        """
        from fp8calib.checkpoint.overlay import write_overlay  # noqa: PLC0415 -- imports torch
        from fp8calib.formats.metadata import describe_table  # noqa: PLC0415

        assert self.source is not None  # noqa: S101 -- check_overlay_source refused it
        skipped, copied = write_overlay(
            self.source,
            folder,
            scales=tensors,
            config_updates=config_updates,
            metadata=describe_table(self.table, fmt, asdict(self.attachment)),
            without=self.replaced,
            documents=documents,
        )
        self.skipped.update(skipped)
        self.copied.update(copied)

    def save_tensors(
        self, path: Path, tensors: Mapping[str, torch.Tensor], *, fmt: Fp8Format | None
    ) -> None:
        """Write a safetensors file that records `fmt` and the origin of the scales."""
        from fp8calib.checkpoint.tensor_file import save_tensors  # noqa: PLC0415 -- imports torch
        from fp8calib.formats.metadata import describe_table  # noqa: PLC0415

        described = describe_table(self.table, fmt, asdict(self.attachment))
        save_tensors(path, tensors, metadata={"format": "pt", **described})

    def save_json(self, path: Path, document: Mapping[str, object]) -> None:
        """Write a JSON file that records the origin of the scales; floats read back as fp32.

        Engines ignore the keys `_comment` and `_fp8calib` at the top of a document.
        """
        from fp8calib.formats import metadata  # noqa: PLC0415 -- imports safetensors

        origin, source = self.table.origin, metadata.describe_source(self.table)
        comment = {"_comment": source} if source else {}
        measured = {} if origin is None else {metadata.JSON_ORIGIN_KEY: origin.to_fields()}
        text = json.dumps({**comment, **document, **measured}, indent=2, allow_nan=False)
        write_file_atomic(path, f"{text}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way to store scales: its three functions, and what it can hold."""

    name: str
    """The value of `--format`, and the name under which read scales are reported."""
    description: str
    path_pattern: str = ""
    """The file or folder to write under the output folder; `{tp}` is the number of ranks."""
    write: Callable[[WriteJob, Path], None] | None = None
    """Write to a path; None for a dialect that is only read."""
    recognise: Callable[[ScaleFiles], bool] | None = None
    """Tell whether files are of this dialect; None if they are read as another dialect."""
    read: Callable[[ScaleFiles, ModelGeometry], ParsedScales] | None = None
    """Read the scales of a model from recognised files; raise ModelError at any fault."""
    formats: tuple[Fp8Format, ...] = tuple(KV_FORMATS.values())
    """The FP8 formats that its scales can be for. A single one need not be named in the file."""
    requires_dtype: bool = False
    """A file must name the FP8 format."""
    scale_suffixes: tuple[str, ...] = ("_scale", "_scale_inv", ".scale")
    """Endings of the names of its scale tensors, including scales of weights and inputs."""
    json_keys: tuple[str, ...] = ()
    """Keys that identify its JSON files; the first is at the top level."""
    needs_model: bool = False
    """It is a whole checkpoint, with the model's weights."""
    configures_quantization: bool = False
    """It has a `quantization_config`, which is merged with the model's own."""
    per_tp: bool = False
    """It has a scale for each rank, so there is a file for each tensor-parallel degree."""
    per_head: bool = False
    """It has a scale for each KV head."""
    has_query: bool = False
    """It has a place for the scale of q."""
    has_linears: bool = False
    """It has scales of weights and activations."""
    joins_kv: bool = False
    """It has one scale per layer, for both k and v."""
    find_misfit: Callable[[ModelGeometry], str] | None = None
    """Says why it has no place for the scales of a model; None if it has for every model."""
    lists_all_layers: bool = False
    """Layers without K and V have an entry too: 1.0."""
    unread: str = ""
    """Which engines of today do not read it, as a warning says; empty where none is needed."""

    def path(self, tp: int = 1) -> str:
        """Name the folder or file for `tp` ranks."""
        return self.path_pattern.format(tp=tp)

    def degrees(self, tps: Iterable[int]) -> tuple[int, ...]:
        """List the tensor-parallel degrees to write a file for."""
        return tuple(dict.fromkeys(tps)) if self.per_tp else (1,)
