"""What is told of the scales of q and of attention's probabilities, which decide no verdict."""

from __future__ import annotations

from fp8calib.dialects.check_files import HeldScale, Scene
from fp8calib.dialects.check_vllm_config import KvMethod
from fp8calib.dialects.kv.tensor_names import is_probability_scale, parse_name
from fp8calib.geometry.sites import Role


def list_queries(scene: Scene) -> list[HeldScale]:
    """List the scales of q that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held
        for held, parsed in found
        if parsed is not None
        and parsed.roles == (Role.Q,)
        and not parsed.form.endswith("zero_point")
    ]


def list_zero_points(scene: Scene) -> list[HeldScale]:
    """List the zero points of q, k and v that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held for held, parsed in found if parsed is not None and parsed.form.endswith("zero_point")
    ]


def list_probabilities(scene: Scene) -> list[HeldScale]:
    """List the scales of attention's probabilities that the engine's files hold."""
    return [held for name, held in scene.scales.items() if is_probability_scale(name)]


def note_unread(scene: Scene, why: str) -> None:
    """Say that the engine does without these scales, where there are any."""
    for what, found in _both(scene):
        if found:
            scene.problems.append(f"{what} ({len(found)}, such as {found[0]}): {why}")


def note_loaded(scene: Scene, method: KvMethod) -> None:
    """Say what vLLM does with these scales, where there are any."""
    for what, found in _both(scene):
        bad = [held for held in found if not all(0 < v < float("inf") for v in held.values)]
        if bad and method is KvMethod.COMPRESSED_TENSORS:
            scene.problems.append(f"{bad[0]} is no scale, and vLLM takes it as it stands")
        elif bad:
            scene.problems.append(f"{bad[0]} is no scale; where it is not above 0, 1.0 is used")
        elif found:
            scene.problems.append(
                f"{what} is loaded ({len(found)}, such as {found[0]}): backends that quantize the "
                "query use it (FlashAttention 3, FlashInfer, Triton on CUDA), others do not"
            )


def _both(scene: Scene) -> tuple[tuple[str, list[HeldScale]], ...]:
    return ("q_scale", list_queries(scene)), ("prob_scale", list_probabilities(scene))
