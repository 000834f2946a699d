"""The shape of a model, in what scales depend on, and the sites in it.

A `ModelGeometry` is found once from a model's modules (`fp8calib.model.topology`) and stored in the
stats file. Exports at any tensor-parallel degree therefore need no model. A site is a place in a
model where tensors are observed or scaled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Shard = Literal["column", "row", "replicated"]
"""How tensor parallelism cuts a linear: its outputs, its inputs, or not at all."""
Section = Literal["attention", "mlp", "other"]


class Role(StrEnum):
    """What the tensor at a site is."""

    K = "k"
    V = "v"
    Q = "q"
    P = "p"
    """The probabilities of attention."""
    INPUT = "input"
    WEIGHT = "weight"


KV_ROLES = (Role.K, Role.V)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A module's path in the model and the role of the tensor there."""

    module: str
    role: Role

    def __str__(self) -> str:
        return f"{self.module}.{self.role}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Parse `model.layers.7.self_attn.v`; ValueError if the role is unknown."""
        module, _, role = text.rpartition(".")
        return cls(module, Role(role))


_PYDANTIC = frozenset(dir(BaseModel))


class Frozen(BaseModel):
    """A record that cannot be changed, and accepts no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __dir__(self) -> Iterable[str]:
        """List the names of the record, without those of pydantic."""
        return [name for name in super().__dir__() if name[0] != "_" and name not in _PYDANTIC]


class Part(Frozen):
    """The output rows of one logical projection inside a (possibly fused) weight.

    They are `count` units of `unit` consecutive rows. A unit is a head of q, k or v, or one row of
    an MLP projection. Unit u begins at row
    `first + (u // per_group) * group_stride + (u % per_group) * unit`. This describes stacked
    ([q;k;v]), interleaved (q k v per head) and grouped (q..q k v) layouts.
    """

    name: str
    """Suffix in Hugging Face's terms (`q_proj`, `gate_proj`, `fc1`)."""
    count: int = Field(ge=1)
    unit: int = Field(ge=1)
    first: int = 0
    per_group: int = Field(ge=1)
    group_stride: int = 0

    def rows(self, units: range) -> list[int]:
        """List the output rows of `units`, in order."""
        rows: list[int] = []
        for group, place in (divmod(unit, self.per_group) for unit in units):
            start = self.first + group * self.group_stride + place * self.unit
            rows += range(start, start + self.unit)
        return rows


class Linear(Frozen):
    """A linear projection of a decoder layer, or one projection of all experts of a layer."""

    module: str
    """Path in the model. For experts, the experts' module and the projection's name."""
    section: Section
    root: str
    """Path of the attention or MLP module to which keys of JSON dialects are relative."""
    in_features: int
    out_features: int
    shard: Shard
    parts: tuple[Part, ...]
    num_experts: int = 0
    expert_block: int = 0
    """Experts: how many consecutive channels of the cut axis share one stored amax."""
    weight_name: str
    """The parameter in the model that holds the weight."""
    checkpoint_name: str | None = None
    """The tensor in the checkpoint, where exactly one tensor is the whole weight."""

    @property
    def runner(self) -> str:
        """Path of the module that runs it; one module runs all experts of a layer."""
        return self.module.rpartition(".")[0] if self.num_experts else self.module

    def logical(self, part: Part, expert: int | None = None) -> str:
        """Path of `part` if nothing were fused: `...attn.q_proj`, `...experts.3.up_proj`."""
        parent = self.module.rpartition(".")[0]
        middle = "" if expert is None else f"{expert}."
        return f"{parent}.{middle}{part.name}"

    def key(self, part: Part, expert: int | None = None) -> str:
        """Path of `part` relative to its attention or MLP module, as JSON dialects spell it."""
        return self.logical(part, expert).removeprefix(f"{self.root}.")

    @property
    def experts(self) -> tuple[int | None, ...]:
        """The expert numbers, or (None,) for a linear that is not an expert's."""
        return tuple(range(self.num_experts)) if self.num_experts else (None,)


class Attention(Frozen):
    """An attention module that reads a KV cache."""

    module: str
    checkpoint_module: str
    """The module's path as the checkpoint's own tensor names spell it."""
    kind: Literal["heads", "latent"]
    """`latent`: multi-head latent attention; k is the latent, v the rotary part, cached as one."""
    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    sliding_window: int | None = None
    producer: int | None = None
    """The layer whose K and V this layer reads instead of its own (shared KV)."""
    query_divisor: float = 1.0
    """The model multiplies q by this before attention; engines quantize q without it."""

    def site(self, role: Role) -> Site:
        """Give the k, v or q site of this module."""
        return Site(self.module, role)

    @property
    def kv_elements_per_token(self) -> int:
        """How many numbers a server caches per token; 0 if the layer reads another's cache."""
        if self.producer is not None:
            return 0
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)


class Layer(Frozen):
    """A decoder layer."""

    index: int
    module: str
    mixer: str
    """Class name of the module that mixes tokens (attention, linear attention, mamba)."""
    attention: Attention | None
    """None where the layer caches no K and V."""
    linears: tuple[Linear, ...]


class ModelGeometry(Frozen):
    """Everything about a model that scales and their files depend on."""

    architecture: str
    model_type: str
    """`model_type` of the text decoder's config."""
    checkpoint_dtype: str
    layers: tuple[Layer, ...]
    num_draft_layers: int = 0
    """Layers for multi-token prediction that the checkpoint stores after these. A draft model runs
    them, with its own cache."""
    matrices: Mapping[str, tuple[int, int]] = Field(default_factory=dict, exclude=True, repr=False)
    """The shape [out, in] of every linear's weight, in decoder layers or not, by its name in a
    checkpoint, whether it is stored there or missing. Empty where no checkpoint was read."""
    tied: Mapping[str, str] = Field(default_factory=dict, exclude=True, repr=False)
    """The name of the weight that a linear shares by the config, by the name of its own, which may
    be stored too."""
    parameters: Mapping[str, tuple[int, ...]] = Field(
        default_factory=dict, exclude=True, repr=False
    )
    """The shape of every parameter that a checkpoint has to store, by its name there. Parameters in
    several tensors (experts) and tied parameters are left out."""
    leftovers: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """The tensors of the checkpoint that fill no parameter of the model, scales included."""
    renamed: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """The tensors that transformers accepts, but would write under another name."""

    def linears(self) -> Iterator[tuple[Layer, Linear]]:
        """Every linear with its layer, in the model's order."""
        return ((layer, linear) for layer in self.layers for linear in layer.linears)

    def attentions(self) -> Iterator[tuple[Layer, Attention]]:
        """Every layer that reads a KV cache, with its attention module."""
        return ((layer, layer.attention) for layer in self.layers if layer.attention is not None)

    def owners(self) -> dict[int, Attention]:
        """Map the index of each layer that stores its own K and V to its attention."""
        found = self.attentions()
        return {layer.index: attention for layer, attention in found if attention.producer is None}

    def producer_of(self, attention: Attention) -> Attention:
        """Give the attention that stores the K and V that a layer reads: mostly its own."""
        index = attention.producer
        return attention if index is None else self.layers[index].attention or attention

    def index_modules(self) -> dict[str, int]:
        """Map the path of every attention module and linear to its layer."""
        attentions = {attention.module: layer.index for layer, attention in self.attentions()}
        return attentions | {linear.module: layer.index for layer, linear in self.linears()}

    @property
    def kv_elements_per_token(self) -> int:
        """How many numbers a server caches per token over all layers."""
        return sum(attention.kv_elements_per_token for _, attention in self.attentions())

    def with_readers(self, layers: Collection[int]) -> tuple[int, ...]:
        """List the layers that own or read the caches of some layers: engines need all named."""
        owners = {
            layer.index: layer.index if attention.producer is None else attention.producer
            for layer, attention in self.attentions()
        }
        wanted = {owners[index] for index in layers}
        return tuple(index for index, owner in owners.items() if owner in wanted)

    @property
    def is_wrapped(self) -> bool:
        """Whether its class has other inputs beside text, and holds the text model."""
        return self.architecture.endswith("ForConditionalGeneration")

    @property
    def has_latent_attention(self) -> bool:
        """Whether any layer is multi-head latent attention."""
        return any(attention.kind == "latent" for _, attention in self.attentions())


def find_difference(one: ModelGeometry, other: ModelGeometry) -> str:
    """Describe the first difference of two models, except names in a checkpoint; empty if none."""
    for name in ("architecture", "model_type"):
        if (own := getattr(one, name)) != (there := getattr(other, name)):
            return f"its {name} is {own}, not {there}"
    if len(one.layers) != len(other.layers):
        return f"it has {len(one.layers)} layers, not {len(other.layers)}"
    names: Any = {"attention": {"checkpoint_module"}, "linears": {"__all__": {"checkpoint_name"}}}
    for a, b in zip(one.layers, other.layers, strict=True):
        if a.model_dump(exclude=names) != b.model_dump(exclude=names):
            return f"{a.module} is of another shape"
    return ""
