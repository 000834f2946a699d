"""GPUs by the names that users know, and their generations, as engines tell them apart.

Compute capabilities: developer.nvidia.com/cuda/gpus. Targets of LLVM: rocm.docs.amd.com,
reference/gpu-arch-specs. What a generation serves is in the facts of each engine's releases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from operator import itemgetter

from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.release import Release
from fp8calib.errors import UsageError, suggest
from fp8calib.numerics.schemes import SCHEMES, InputScaling, Scheme

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


GPUS = {name: generation for generation, names in _NAMED.items() for name in names}
"""By the name of a GPU: its generation."""


def find_gpu(name: str) -> str:
    """Find a GPU, a key of `GPUS`, by its name; case and hyphens do not count.

    Raises:
        UsageError: it is not known.
    """
    plain = name.lower().replace("-", "").replace(" ", "").replace("_", "")
    if plain not in GPUS:
        hint = suggest(plain, list(GPUS), what="GPUs")
        raise UsageError(f"--gpu {name}: this GPU is not known", hint=hint)
    return plain


# --- what an engine serves on them ----------------------------------------------------------------

_STORES = "backend stores a cache type on"
_ORDER = "order of the backends on"
_MULTIPLIES = "GPU multiplies quantized inputs in"


def knows_gpus(engine: Engine) -> bool:
    """Tell whether it is known what an engine serves on GPUs."""
    return not engine.is_on_cpu and _STORES in engine.facts.values


@cache
def _read_storage(
    facts: Release,
) -> Mapping[tuple[str, str], Sequence[tuple[int, str, Collection[int]]]]:
    """Read what stores a type of the KV cache on a generation of GPUs.

    Given are the backend's place among those that the engine tries, its name, and the sizes of
    heads that it refuses.
    """
    orders = [each.split(": ") for each in facts.values[_ORDER]]
    ranks = {
        (generation, backend): rank
        for order, generations in orders
        for generation in generations.split(", ")
        for rank, backend in enumerate(order.split(", "))
    }
    found: dict[tuple[str, str], list[tuple[int, str, Collection[int]]]] = defaultdict(list)
    for value in facts.values[_STORES]:
        backend, cache_type, places = value.split(": ")
        for part in places.split("; "):
            generations, _, sizes = part.partition(" but heads of ")
            refused = tuple(map(int, sizes.split()))
            for generation in generations.split(", "):
                found[cache_type, generation].append((ranks[generation, backend], backend, refused))
    return found


def list_backends(
    engine: Engine,
    cache_type: str,
    generations: Collection[str] = GENERATIONS,
    head_sizes: Collection[int] = (),
) -> tuple[str, ...]:
    """List backends that store a type of the KV cache, in the engine's order of preference.

    On any of the generations of GPUs; `head_sizes` are the model's.
    """
    if not knows_gpus(engine) or not set(head_sizes).issubset(HEAD_SIZES):
        return ()
    storage = _read_storage(engine.facts)
    known = [each for place in generations for each in storage.get((cache_type, place), ())]
    fitting = [each for each in known if not set(each[2]).intersection(head_sizes)]
    return tuple(dict.fromkeys(name for _, name, _ in sorted(fitting, key=itemgetter(0))))


def list_generations(
    engine: Engine, cache_type: str, head_sizes: Collection[int] = ()
) -> tuple[str, ...]:
    """List the generations of GPUs with such a backend, oldest first."""
    places = GENERATIONS
    return tuple(each for each in places if list_backends(engine, cache_type, [each], head_sizes))


def explain_unserved(
    engine: Engine, cache_type: str, gpu: str, head_sizes: Collection[int] = ()
) -> str:
    """Say why a GPU does not serve a type of the KV cache; empty if it does."""
    place = GPUS[gpu]
    if list_backends(engine, cache_type, [place], head_sizes):
        return ""
    sizes = " or ".join(map(str, sorted(head_sizes)))
    heads = f" for heads of {sizes}" if list_backends(engine, cache_type, [place]) else ""
    others = join_generations(list_generations(engine, cache_type, head_sizes))
    where = f", but on {others}" if others else ""
    title = f"{gpu.upper()} ({place})"
    return f"{engine.release} is not known to store it{heads} on {title}{where}"


def list_unmultiplied(engine: Engine, gpu: str) -> frozenset[str]:
    """List which of `fp8` and `mxfp8` a GPU cannot multiply: inputs then stay in 16 bits."""
    if not knows_gpus(engine):
        return frozenset()
    kinds = (value.split(": ") for value in engine.facts.values[_MULTIPLIES])
    return frozenset(kind for kind, places in kinds if GPUS[gpu] not in places.split(", "))


def explain_unmultiplied(engine: Engine, scheme: Scheme, gpu: str) -> str:
    """Explain why this GPU keeps the scheme's inputs in 16 bits; empty if it does not."""
    kind = "mxfp8" if scheme.is_mx else "fp8"
    if scheme.inputs is InputScaling.NONE or kind not in list_unmultiplied(engine, gpu):
        return ""
    title = f"{gpu.upper()} ({GPUS[gpu]})"
    return f"{engine.release} leaves inputs in 16 bits on {title}, which has no {kind}"


def list_multiplied(engine: Engine, gpu: str) -> list[str]:
    """Name the schemes whose inputs a GPU multiplies in FP8."""
    return [
        name
        for name, scheme in SCHEMES.items()
        if scheme.inputs is not InputScaling.NONE and not explain_unmultiplied(engine, scheme, gpu)
    ]
