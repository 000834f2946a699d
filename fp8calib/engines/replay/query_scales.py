"""The scales of q and of attention's probabilities: listed, and noted, but never judged."""

from __future__ import annotations

from fp8calib.dialects.dialect import Spelling
from fp8calib.dialects.kv.tensor_names import is_probability_scale, parse_name
from fp8calib.engines.replay.folder import HeldScale, LoadContext
from fp8calib.geometry.sites import Role


def list_queries(scene: LoadContext) -> list[HeldScale]:
    """List the scales of q that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held
        for held, parsed in found
        if parsed is not None
        and parsed.roles == (Role.Q,)
        and parsed.spelling is not Spelling.ZERO_POINT
    ]


def list_zero_points(scene: LoadContext) -> list[HeldScale]:
    """List the zero points of q, k and v that the engine's files hold."""
    found = ((held, parse_name(name)) for name, held in scene.scales.items())
    return [
        held
        for held, parsed in found
        if parsed is not None and parsed.spelling is Spelling.ZERO_POINT
    ]


def list_probabilities(scene: LoadContext) -> list[HeldScale]:
    """List the scales of attention's probabilities that the engine's files hold."""
    return [held for name, held in scene.scales.items() if is_probability_scale(name)]


def note_unread(scene: LoadContext, why: str) -> None:
    """Say that the engine does without these scales, where there are any."""
    for what, found in list_optional_scales(scene):
        if found:
            scene.problems.append(f"{what} ({len(found)}, such as {found[0]}): {why}")


def list_optional_scales(scene: LoadContext) -> tuple[tuple[str, list[HeldScale]], ...]:
    """List both kinds, each with its name in messages."""
    return ("q_scale", list_queries(scene)), ("prob_scale", list_probabilities(scene))
