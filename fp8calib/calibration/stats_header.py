"""The header of statistics: the run they belong to; without torch: results hold it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import not_
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from fp8calib.calibration.origin import explain_difference
from fp8calib.data.modality import Modality
from fp8calib.errors import cut_list
from fp8calib.model.geometry import Frozen, ModelGeometry


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


class Skipped(Frozen):
    """A site that was not observed, and why."""

    site: str
    why: str


class StatsHeader(Frozen):
    """The run that statistics belong to, without time, path, host, rank, shard or batch size."""

    kind: Literal["fp8calib-stats"] = "fp8calib-stats"
    schema_version: Literal[1, 2] = 2
    """Version 1 has the amax of quarters of the data in place of that of each sequence."""
    geometry: ModelGeometry
    model_fingerprint: str
    data_fingerprint: str
    data_sources: tuple[str, ...]
    num_sequences: int
    num_tokens: int
    recipe_name: str
    recipe_hash: str
    compute_dtype: str
    histogram_sequences: int
    """The stride of the sequences in histograms."""
    input_histogram_tokens: int
    """The stride of the tokens of these sequences in histograms of inputs."""
    skipped: tuple[Skipped, ...]
    versions: dict[str, str]
    # what older files do not have is left out where it is empty, so that their digest is the same
    unquantized: dict[str, str] = Field(default_factory=dict, exclude_if=not_)
    """Hashes of norms and embeddings (`unquantized_tensors`); empty in the files of versions that
    did not record them."""
    measured_quantized: str = Field(default="", exclude_if=not_)
    """How the weights of the measured model were quantized; empty for an unquantized model."""
    engine: str = Field(default="", exclude_if=not_)
    """The engine that ran the text, its version and parallelism; empty for transformers."""
    text_start: str = Field(default="", exclude_if=not_)
    """Hash of the first tokens of the text (`DataPlan.start`)."""
    modality_tokens: dict[Modality, NonNegativeInt] = Field(default_factory=dict, exclude_if=not_)
    """The tokens of each modality; empty for a run of text."""

    def describe_tokens(self) -> str:
        """Count the tokens; in brackets those of each modality, for a run with media."""
        of_kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.modality_tokens.items())
        return f"{self.num_tokens:,} tokens" + (f" ({of_kinds})" if of_kinds else "")

    def describe_skipped(self) -> Iterator[str]:
        """Describe what was not observed in one line for each reason."""
        reasons: dict[str, list[str]] = {}
        for item in self.skipped:
            reasons.setdefault(item.why, []).append(item.site)
        for why, sites in reasons.items():
            yield f"not measured: {cut_list(sites, 3)} ({why})"

    def explain_other(self, other: StatsHeader) -> str:
        """Explain how two runs differ; empty if they are the same.

        Skipped sites, and the file names of equal data, are not compared.
        """
        differences: list[str] = []
        models = self.model_fingerprint, other.model_fingerprint
        if why := explain_difference(*models, between=", and "):
            differences.append(f"different model ({why})")
        elif self.geometry != other.geometry:
            differences.append("other shapes of the same model")
        own, others = self._list_settings(), other._list_settings()
        for name in own | others:
            texts = own.get(name, "none"), others.get(name, "none")
            if texts[0] != texts[1]:
                differences.append(f"different {name} ({', and '.join(texts)})")
        return "; ".join(differences)

    def _list_settings(self) -> dict[str, str]:
        """List what two runs must have in common."""
        return {
            "schema_version": str(self.schema_version),
            "data": (
                f"{self.num_tokens} tokens in {self.num_sequences} sequences, "
                f"{self.data_fingerprint[:16]}"
            ),
            "recipe": f"{self.recipe_name} {self.recipe_hash[:16]}",
            "dtype": self.compute_dtype,
            "engine": self.engine or "transformers",
            **{f"version of {name}": self.versions[name] for name in sorted(self.versions)},
            "histogram_sequences": str(self.histogram_sequences),
            "input_histogram_tokens": str(self.input_histogram_tokens),
        }


class StatsShard(Frozen):
    """One shard of a run, and the sequences it has run."""

    index: int
    """Which shard of the run, from 1."""
    count: int
    """The number of shards."""
    batch_size: int
    """With the data plan it determines the micro-batches."""
    sequences: tuple[tuple[int, int], ...]
    """The sequences that were run, as sorted half-open ranges of global indices."""
    is_checkpoint: bool = False
    """Saved by an unfinished run for `--resume`; statistics of weights may be missing."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences that were run."""
        return sum(stop - first for first, stop in self.sequences)

    def describe(self) -> str:
        """Name the shard for messages."""
        return f"shard {self.index} of {self.count}"

    def explain_other(self, other: StatsShard) -> str:
        """Explain why it cannot be joined with a shard of the same run; empty if it can."""
        if self.count != other.count:
            return f"{self.describe()}, and {other.describe()}"
        if self.count > 1 and self.batch_size != other.batch_size:
            sizes = f"--batch-size {self.batch_size}, and {other.batch_size}"
            return f"{sizes}: the shards depend on it"
        return ""
