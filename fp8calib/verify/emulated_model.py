"""A whole model under emulation: whoever calls or generates with it meets FP8, the KV cache too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fp8calib.geometry.sites import Role
from fp8calib.observe.generation_cache import tapped_caches
from fp8calib.observe.hooks import tapped
from fp8calib.verify.emulate import EmulatingTaps, Emulation
from fp8calib.verify.verify import Subject
from fp8calib.verify.weights import changed_weights


@contextmanager
def emulated_model(subject: Subject, emulation: Emulation) -> Iterator[None]:
    """Hold the subject's model under `emulation` while the context is open.

    Its callers need not know: where `emulated` runs batches through the decoder and keeps no
    cache, here the caller's own cache keeps K and V as quantized, so that `model(...)` and
    `model.generate(...)` both go through it.
    """
    model, geometry = subject.model, subject.geometry
    taps = EmulatingTaps(emulation.quantizers)
    roles = {site.role for site in emulation.quantizers}
    with ExitStack() as stack:
        if emulation.weights:
            stack.enter_context(
                changed_weights(model, emulation.weights, subject.originals, taps.damage)
            )
        seams = tapped(model, geometry, taps, query=Role.Q in roles, inputs=Role.INPUT in roles)
        stack.enter_context(seams)
        stack.enter_context(tapped_caches(model, geometry, taps))
        stack.callback(taps.end_batch)
        yield
