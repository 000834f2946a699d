"""A dialect of FP8 checkpoints: names and shapes of scales, and the quantization config.

Neither this module nor one that declares a dialect imports torch: `--help` names all dialects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.fp8.quantization_config import Fields, FindScheme
from fp8calib.formats.kv.kv_scales import name_scales
from fp8calib.model.drafters import DRAFTER_MODULES, name_in_vllm
from fp8calib.model.geometry import Role
from fp8calib.model.module_paths import name_fused_path
from fp8calib.numerics.schemes import SCHEMES, Granularity, Scheme

if TYPE_CHECKING:
    from fp8calib.model.geometry import Attention, ModelGeometry

Shape = tuple[int, ...]
Config = dict[str, object]
HEAD = "lm_head"
_LAYER = re.compile(r"(.*?)[^.]+[.]\d+[.]")
"""What precedes the list of layers in a path."""
NUMBER: Config = {"num_bits": 8, "type": "float"}
"""FP8, in the words of compressed-tensors and ModelOpt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnquantizedMatrix:
    """A matrix that is not quantized."""

    module: str
    why: str
    is_linear: bool
    """Whether engines may see a linear in it, so that the config must exclude it."""
    tree: str = ""
    """The part of its path that names the tower or projector that holds it."""
    experts: tuple[str, ...] = ()
    """The names that engines give the linears of a stack of experts."""
    is_drafted: bool = False
    """Whether it stays unquantized because it is of a drafter."""
    layer: int | None = None
    """The number that vLLM gives the drafter's layer."""
    ends: tuple[str, ...] = ()
    """Ends of the paths of its linears, or of modules around them, that begin at a numbered layer.
    They match under any prefix that an engine uses. No quantized linear's path has such an end."""

    @property
    def linears(self) -> tuple[str, ...]:
        """List the paths of its linears."""
        return (self.module, *self.experts) if self.is_linear else self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigJob:
    """What a quantization config has to express."""

    scheme: Scheme
    """The scheme of all linears that are in no other group."""
    groups: Mapping[Scheme, Collection[str]]
    """The paths of the linears of each scheme, and of the weights that engines fuse them into."""
    unquantized: Sequence[UnquantizedMatrix]
    quantized: Sequence[str]
    """The paths of the linears that get scales."""
    has_kv: bool
    """Whether the checkpoint has scales of K and V."""

    @property
    def drafter_modules(self) -> tuple[str, ...]:
        """Name the modules of a drafter in engines, where none of its linears is quantized."""
        return DRAFTER_MODULES if any(each.is_drafted for each in self.unquantized) else ()

    @property
    def excluded(self) -> list[str]:
        """Name the linears that have no scales, and the output head even if it is tied."""
        names = [HEAD, *self.drafter_modules]
        for item in self.unquantized:
            names += item.linears
            if item.tree:
                # Some classes tell a config nothing of what their towers join, or rename `qkv`
                # (vLLM 0.32.0 models/llava_onevision.py, glm_ocr.py).
                names += map(name_fused_path, item.linears)
                names += (f"{path}_proj" for path in item.linears if path.endswith(".qkv"))
            if item.layer is not None:
                names += (name_in_vllm(path, item.layer) for path in item.linears)
            if layer := _LAYER.match(item.module):  # for engines that rename modules of a layer
                names += (f"{layer[1]}{end}" for end in item.ends)
        return list(dict.fromkeys(names))

    @property
    def excluded_ends(self) -> list[str]:
        """List the ends of the paths of excluded linears, for engines with other prefixes."""
        return list(dict.fromkeys(end for each in self.unquantized for end in each.ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Dialect:
    """One way to store FP8 weights: how its config is read and written, and its scales' names."""

    name: str
    """The value of `--format`, and the name under which checkpoints are reported."""
    description: str
    method: str
    """The `quant_method` of its config."""
    has_variants: bool = False
    """A method that begins with `method` is the dialect's too: `modelopt_mixed`."""
    own_file: str = ""
    """The file that has its config if config.json has none."""
    make_finder: Callable[[Path, Fields], FindScheme]
    """Read a config; raise ModelError at any fault."""
    make_config: Callable[[ConfigJob], Config] | None = None
    """Make the `quantization_config`; None for a dialect that is only read."""
    make_own_file: Callable[[ConfigJob], Config] | None = None
    """Make the content of its own file."""
    expressible: Sequence[str] | None = None
    """The schemes that its config has words for, by name; None: all, by their granularities."""
    has_groups: bool = False
    """The config that is written can give linears different schemes."""
    scale_name: str = "weight_scale"
    """The name of the scale of a linear's weight."""
    block_scale_name: str = "weight_scale"
    """The same for a weight that has a scale per block."""
    input_scale_name: str = "input_scale"
    scalar_shape: Shape = ()
    """The shape of a scale that covers a whole tensor: a weight, an input, K or V."""
    add_kv: Callable[[Path, Fields, str], Config] | None = None
    """Add the KV cache to a `quantization_config` or to its own file, given the file and the
    strategy of the scales; None if neither changes. Raise ExportError if engines refuse it."""
    kv_strategies: Sequence[str] = ("tensor",)
    """The strategies that engines know for KV scales beside its weights: `tensor`, `attn_head`."""
    names_kv_by_projection: bool = False
    """The scales of K and V are stored under k_proj and v_proj, if the model has these."""

    @property
    def schemes(self) -> list[str]:
        """List the schemes that it can express, by name."""
        return [name for name in SCHEMES if self.expressible is None or name in self.expressible]

    def has_method(self, method: object) -> bool:
        """Tell whether its configs have this `quant_method`."""
        is_variant = self.has_variants and isinstance(method, str)
        return method == self.method or (is_variant and str(method).startswith(self.method))

    def name_kv(
        self, geometry: ModelGeometry, attention: Attention, role: Role, has_projections: bool
    ) -> tuple[str, ...]:
        """Name the scale of K or V, given whether the checkpoint has a tensor for k_proj."""
        names = name_scales(geometry, attention, role)
        # engines that load the inner name map none of ModelOpt's, or stop at it
        is_outer = names == (f"{attention.checkpoint_module}.{role}_scale",)
        if self.names_kv_by_projection and has_projections and is_outer:
            return (f"{attention.checkpoint_module}.{role}_proj.{role}_scale",)
        return names

    def name_scale(self, granularity: Granularity) -> str:
        """Name the scale of a weight, without the linear's path."""
        return self.block_scale_name if granularity is Granularity.BLOCK else self.scale_name

    def gives_name(self, name: str, granularity: Granularity) -> bool:
        """Tell whether it gives a scale this name; a stacked parameter `X` has `X_scale`."""
        return name.endswith(self.name_scale(granularity).removeprefix("weight"))
