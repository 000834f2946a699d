"""Which sites of a model a calibration observes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fp8calib.model.shapes import Frozen


class Observe(Frozen):
    """Which sites are observed."""

    kv: bool = Field(
        default=True, strict=True, description="K and V per head, as they are stored in the cache"
    )
    query: bool = Field(
        default=True, strict=True, description="q per head, as attention receives it"
    )
    inputs: bool = Field(
        default=True, strict=True, description="inputs of linears and experts, per channel"
    )
    weights: bool = Field(
        default=True, strict=True, description="weights, per output and per input channel"
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        description="modules to exclude: a path, a glob, or `re:` and a regular expression; "
        "a pattern that matches no module is an error",
    )

    @model_validator(mode="after")
    def _observes_something(self) -> Self:
        if not (self.kv or self.query or self.inputs or self.weights):
            raise ValueError("nothing is observed: enable one of kv, query, inputs, weights")
        return self

    @property
    def needs_forward(self) -> bool:
        """Whether a forward pass is needed; weights are read without one."""
        return self.kv or self.query or self.inputs
