"""GPUs by the names that users know, and their generations, as engines tell them apart.

Compute capabilities: developer.nvidia.com/cuda/gpus. Targets of LLVM: rocm.docs.amd.com,
reference/gpu-arch-specs. What a generation serves is in the facts of each engine's releases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fp8calib.errors import UsageError, suggest

_NAMED = {
    "sm_80": ("a100", "a30"),
    "sm_86": ("a10", "a40", "rtx3090", "rtxa6000"),
    "sm_89": ("l4", "l40", "l40s", "rtx4090", "rtx6000ada"),
    "sm_90": ("h100", "h200", "h20", "gh200"),
    "sm_100": ("b200", "gb200"),
    "sm_103": ("b300", "gb300"),
    "sm_120": ("rtx5090", "rtx6000pro"),
    "sm_121": ("gb10",),
    "gfx942": ("mi300x", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
    "gfx1201": ("rx9070", "r9700"),
}
GENERATIONS = tuple(_NAMED)
"""Compute capabilities of NVIDIA's GPUs and targets of AMD's, as compilers name them."""

HEAD_SIZES = (16, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 512)
"""The sizes of heads that the backends of engines were asked about."""


def join_generations(names: Collection[str]) -> str:
    """Join generations of GPUs, those of a maker that follow one another as a range."""
    runs: list[list[str]] = []
    for before, name in zip(("", *GENERATIONS), GENERATIONS, strict=False):
        if name not in names:
            continue
        is_next = runs and runs[-1][-1] == before and before[:2] == name[:2]
        if is_next:
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = (f"{run[0]} to {run[-1]}" if run[2:] else ", ".join(run) for run in runs)
    return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU."""

    name: str
    generation: str

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return f"{self.name.upper()} ({self.generation})"


GPUS = {
    name: Gpu(name=name, generation=generation)
    for generation, names in _NAMED.items()
    for name in names
}


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name; case and hyphens do not count.

    Raises:
        UsageError: it is not known.
    """
    plain = name.lower().replace("-", "").replace(" ", "").replace("_", "")
    if plain not in GPUS:
        hint = suggest(plain, list(GPUS), what="GPUs")
        raise UsageError(f"--gpu {name}: this GPU is not known", hint=hint)
    return GPUS[plain]
