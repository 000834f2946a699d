"""What an engine creates for the linears of a checkpoint, and how its loader fills that.

Each engine with such a loader is one subclass of `LinearLoader`, in the engine's own package.
`loading.py` compares what it creates with what the checkpoint stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.weights.parameters import Parameter
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.geometry.model_geometry import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A linear of the model, with the tensors that the checkpoint stores for it."""

    module: str
    """Its path in the checkpoint."""
    shape: tuple[int, int]
    """[out, in], by the model's config where the model is known."""
    tensors: Mapping[str, TensorEntry]
    """By the last part of their names."""
    shard: Shard | None = None
    """How ranks split it; None where the model is not known."""

    @property
    def projection(self) -> str:
        """The last part of its path."""
        return self.module.rpartition(".")[2]

    def name(self, suffix: str) -> str:
        """Name one of its tensors."""
        return f"{self.module}.{suffix}"


class GroupKind(StrEnum):
    """What an engine makes of a group."""

    LINEAR = "linear"
    EXPERTS = "experts"
    HEAD = "head"
    """The output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGroup:
    """Linears that an engine joins: a linear, fused projections, or the experts of a layer."""

    path: str
    """The engine's module, by the checkpoint's path: `model.layers.0.self_attn.qkv_proj`."""
    kind: GroupKind
    members: tuple[StoredLinear, ...]
    is_known: bool
    """Whether it is a linear of the decoder layers, which engines create by the config."""
    is_tied: bool = False
    """Whether its weight is that of the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unquantized:
    """A group that the engine creates without quantization."""

    why: str
    """What of the config says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A group that the engine creates in another format than FP8."""

    why: str
    """What of the config says so, and what becomes of FP8 weights."""
    effect: Effect = Effect.REFUSED


Found = StoredScheme | Unquantized | Foreign | None


class LinearLoader(ABC):
    """How one engine loads the linears of one checkpoint folder."""

    engine: str
    """Its key."""
    title: str
    """Its name in texts."""
    shape_source: str
    """Where it compares shapes."""
    unfilled_source: str
    """Where it creates parameters."""

    quantizes_tied: bool = False
    """Whether a linear that has the embedding's weight gets parameters by the config."""

    def joins(self, group: LinearGroup) -> bool:
        """Tell whether the engine joins a group; otherwise each linear is a group of its own."""
        del group
        return True

    @abstractmethod
    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which the engine creates a group; None where it cannot be told.

        Raises:
            Refusal: the engine does not start.
        """

    def creates(self, group: LinearGroup) -> bool:
        """Tell whether the engine creates a group by the config, whatever is stored."""
        return group.is_known

    @abstractmethod
    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List the parameters of a quantized linear, by the last part of their names."""

    @abstractmethod
    def judge_stray(self, group: LinearGroup, suffix: str) -> Outcome | None:
        """Judge a tensor beside a linear that has no parameter; None where it does no harm."""

    def judge_codes(self, why: str) -> Outcome | None:
        """Judge an FP8 weight in a parameter of 16 bits: most engines copy its codes.

        Args:
            why: what of the config says that it is not quantized.
        """
        what = f"is FP8, but {why}: {self.title} uses its codes as the weight"
        return Outcome(effect=Effect.MISREAD, what=what, source=self.shape_source)

    @abstractmethod
    def judge_plain(self, group: LinearGroup) -> Outcome | None:
        """Judge a weight that is not FP8 where the engine creates an FP8 one."""

    def judge_plain_dtype(self, dtype: str) -> Outcome | None:
        """Judge the dtype of a weight that is not FP8; None where it is converted."""
        del dtype
        return None

    def judge_sizes(self, linear: StoredLinear, scheme: StoredScheme) -> Outcome | None:
        """Judge the sizes of a quantized linear; None where the engine can run them."""
        del linear, scheme
        return None

    def judge_values(
        self, group: LinearGroup, scheme: StoredScheme, numbers: Mapping[str, float]
    ) -> Outcome | None:
        """Judge the scales of a group together.

        Args:
            group: quantized by `scheme`.
            scheme: the one that the config gives it.
            numbers: the scales that are one number, by name.
        """
        del group, scheme, numbers
        return None

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge the dtype of a tensor that fills a parameter; None where it is converted."""
        del group, suffix, dtype
        return None
