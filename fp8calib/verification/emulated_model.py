"""Hold a model under emulation, for callers that run it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8calib.observe.generation_cache import open_cache_hooks
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.verify import ReferenceModel


@contextmanager
def emulated_model(reference: ReferenceModel, emulation: Emulation) -> Iterator[None]:
    """Hold the model under `emulation` while the context is open.

    Unlike in `emulated`, callers run the model themselves: their own cache stores the quantized K
    and V, so that both `model(...)` and `model.generate(...)` are emulated.
    """
    model, geometry = reference.model, reference.geometry
    hooks = EmulationHooks(emulation.quantizers, emulation.reads)
    with (
        emulated(model, geometry, emulation, hooks, originals=reference.originals),
        open_cache_hooks(model, geometry, hooks),
    ):
        try:
            yield
        finally:
            hooks.end_batch()
