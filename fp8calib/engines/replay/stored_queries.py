"""Scales of q and of attention probabilities, which are noted but not judged."""

from __future__ import annotations

from fp8calib.dialects.dialect import Spelling
from fp8calib.dialects.kv.parse_names import is_probability_scale, parse_name
from fp8calib.engines.replay.folder import StoredScale
from fp8calib.engines.replay.load_context import LoadContext
from fp8calib.geometry.sites import Role


def list_queries(context: LoadContext) -> list[StoredScale]:
    """List the scales of q that the engine's files hold."""
    found = ((stored, parse_name(name)) for name, stored in context.scales.items())
    return [
        stored
        for stored, parsed in found
        if parsed is not None
        and parsed.roles == (Role.Q,)
        and parsed.spelling is not Spelling.ZERO_POINT
    ]


def list_zero_points(context: LoadContext) -> list[StoredScale]:
    """List the zero points of q, k and v that the engine's files hold."""
    found = ((stored, parse_name(name)) for name, stored in context.scales.items())
    return [
        stored
        for stored, parsed in found
        if parsed is not None and parsed.spelling is Spelling.ZERO_POINT
    ]


def list_probabilities(context: LoadContext) -> list[StoredScale]:
    """List the scales of attention probabilities that the engine's files hold."""
    return [stored for name, stored in context.scales.items() if is_probability_scale(name)]


def note_unread(context: LoadContext, why: str) -> None:
    """Note that the engine ignores these scales, where there are any."""
    for what, found in list_optional_scales(context):
        if found:
            context.problems.append(f"{what} ({len(found)}, such as {found[0]}): {why}")


def list_optional_scales(context: LoadContext) -> tuple[tuple[str, list[StoredScale]], ...]:
    """List the scales of both kinds, each kind with its name in messages."""
    return ("q_scale", list_queries(context)), ("prob_scale", list_probabilities(context))
