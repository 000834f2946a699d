"""Add KV scales to a checkpoint that is quantized already; its config is merged, never replaced.

Each method of quantization has its own words for the KV cache, and its own names of scales. If no
dialect of fp8calib knows the method, the scales are `self_attn.k_scale` and the config stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint, read_quantization
from fp8calib.checkpoint.model_config import CONFIG_NAME, replace_quantization
from fp8calib.errors import ExportError, UsageError, cut_list
from fp8calib.formats.dialect import Dialect
from fp8calib.formats.fp8.dialect import Fp8Dialect
from fp8calib.formats.fp8.quark import QUARK, names_outputs
from fp8calib.formats.fp8.registry import FP8_DIALECTS
from fp8calib.formats.kv.kv_scales import make_scale_tensors, name_scales
from fp8calib.formats.kv.parse_names import PROBABILITY_SCALES, parse_name
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import Attention, ModelGeometry, Role

_PROJECTION_TYPES = ("qwen3_next",)
"""Model types in which SGLang stops at `self_attn.k_scale`, and loads ModelOpt's names (0.5.23
`srt/models/qwen3_next.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """How a checkpoint is quantized, in what its KV cache depends on."""

    source: Checkpoint
    config: Mapping[str, object]
    """The section of config.json; empty if there is none."""
    own_file: Mapping[str, object] = field(default_factory=dict)
    """ModelOpt's own file; empty if there is none."""

    @property
    def method(self) -> str:
        """The method, as messages name it."""
        if not self.config:
            return "modelopt"
        method = self.config.get("quant_method")
        return method if isinstance(method, str) else "unnamed"

    @property
    def dialect(self) -> Fp8Dialect | None:
        """The dialect of the method; None if fp8calib has none."""
        return next((d for d in FP8_DIALECTS.values() if d.has_method(self.method)), None)

    def merge(self, strategy: str) -> tuple[dict[str, object], dict[str, object]]:
        """Add the KV cache: new entries of config.json, and other JSON files by name.

        Raises:
            ExportError: engines refuse the config.
        """
        updates: dict[str, object] = {}
        documents: dict[str, object] = {}
        dialect, folder = self.dialect, self.source.folder
        if dialect is None or dialect.add_kv is None:
            return updates, documents
        if self.config:
            section = dialect.add_kv(folder / CONFIG_NAME, self.config, strategy)
            updates = replace_quantization(self.source.load_config(), section)
        if self.own_file and dialect.own_file:
            path = folder / dialect.own_file
            documents[path.name] = dialect.add_kv(path, self.own_file, strategy)
        return updates, documents

    def make_tensors(self, table: ScaleTable) -> dict[str, torch.Tensor]:
        """Make the scale tensors under the names that the method's engines read."""
        shape = () if self.dialect is None else self.dialect.scalar_shape
        name = name_scales if table.per_head else self._name
        return make_scale_tensors(table, scalar_shape=shape, name=name)

    def _name(self, geometry: ModelGeometry, attention: Attention, role: Role) -> tuple[str, ...]:
        path, dialect = f"{attention.checkpoint_module}.{role}_proj.", self.dialect
        has_projection = any(name.startswith(path) for name in self.source.tensors)
        if dialect is not None and role is not Role.Q and has_projection:
            if dialect is QUARK and names_outputs(self.config):
                return (f"{path}output_scale",)
            if geometry.model_type in _PROJECTION_TYPES:
                return dialect.name_kv(geometry, attention, role, has_projections=True)
        return name_scales(geometry, attention, role)

    def list_schemes(self) -> Iterator[tuple[str, object]]:
        """List the schemes of the KV cache in the configs, with their keys."""
        nested = self.config.get("quantization")
        own = self.own_file.get("quantization")
        sections = [each for each in (self.config, nested, own) if isinstance(each, Mapping)]
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            yield from ((key, section[key]) for section in sections if section.get(key) is not None)


def find_quantized(source: Checkpoint) -> QuantizedModel | None:
    """Find how a checkpoint is quantized; None for an unquantized one."""
    if (found := read_quantization(source)) is None:
        return None
    return QuantizedModel(source=source, config=found[0], own_file=found[1])


def list_kv_scales(source: Checkpoint, geometry: ModelGeometry) -> frozenset[str]:
    """List the KV scales and zero points that a checkpoint holds for the layers of a model."""
    modules = {
        spelling
        for _, attention in geometry.attentions()
        for path in (attention.module, attention.checkpoint_module)
        for spelling in (path, f"{path}.attn")
    }
    names = (name for file in source.files for name in file.tensors)
    return frozenset(
        name
        for name in names
        if ((parsed := parse_name(name)) is not None and parsed.path in modules)
        or (name.endswith(PROBABILITY_SCALES) and name.rpartition(".")[0] in modules)
    )


def check_attachable(
    source: Checkpoint, geometry: ModelGeometry, dialect: Dialect, *, replaces_scales: bool
) -> None:
    """Refuse a checkpoint that KV scales cannot be added to in a dialect; write nothing."""
    if (present := sorted(list_kv_scales(source, geometry))) and not replaces_scales:
        raise ExportError(
            f"{source.folder}: the checkpoint already has a tensor {present[0]}, and "
            f"{len(present)} KV scales in all ({cut_list(present, 4)})",
            hint="start from the model without scales, or add --replace-scales",
        )
    quantized = find_quantized(source)
    if quantized is None or not dialect.configures_quantization:
        return
    strategies = ("tensor",) if quantized.dialect is None else quantized.dialect.kv_strategies
    strategy = "attn_head" if dialect.per_head else "tensor"
    if strategy not in strategies:
        raise UsageError(
            f"{source.folder}: beside quant_method {quantized.method} engines read one KV scale "
            "for a layer, not one for each head",
            hint="use --format kv-overlay; scales per head need a compressed-tensors checkpoint",
        )
    for key, found in quantized.list_schemes():
        if not (replaces_scales or _is_fp8(found)):
            raise ExportError(
                f"{source.folder}: its config has a KV cache of another kind already: {key} is "
                f"{found!a:.200}",
                hint="add --replace-scales to replace it with FP8 scales",
            )
    quantized.merge(strategy)


def _is_fp8(scheme: object) -> bool:
    if isinstance(scheme, Mapping):
        is_static = scheme.get("symmetric", True) is True and not scheme.get("dynamic")
        return is_static and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return str(scheme).upper() in ("FP8", "STATIC")
