"""Match modules with the targets of compressed-tensors and Quark: names or expressions."""

from __future__ import annotations

from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.model.module_paths import matches_expression, refuse_costly

_FIX = "name modules by their paths, or by a plain regular expression"


def matches_target(target: object, *names: str) -> bool:
    """Check whether a target equals one of the names, or as `re:...` matches the start of one.

    Args:
        target: as written in a config.
        names: the path of a module, and its class where the engine compares that too.

    Raises:
        Refusal: the expression is invalid, or could take exponential time.
    """
    if not isinstance(target, str):
        return False
    if not target.startswith("re:"):
        return target in names
    pattern = target.removeprefix("re:")
    try:
        refuse_costly(pattern)
        return matches_expression(pattern, *names)
    except ValueError as error:
        raise Refusal(f"target {target!a:.60}: {error}", fix=_FIX) from error
