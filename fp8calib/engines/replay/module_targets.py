"""Which modules a target of compressed-tensors or Quark means: a name, or an expression."""

from __future__ import annotations

import re

from fp8calib.engines.replay.verdicts import Refusal

_NESTED_QUANTIFIER = re.compile(r"\)[*+{?]")
_LONGEST = 1000
_FIX = "name modules as they are, or by a plain regular expression"


def matches_target(target: object, *names: str) -> bool:
    """Tell whether a target is one of the names, or as `re:...` matches the beginning of one.

    Args:
        target: as it stands in a config.
        names: a module's path, and its class where the engine looks at that too.

    Raises:
        Refusal: the expression is none, or one that could take forever.
    """
    if not isinstance(target, str):
        return False
    if not target.startswith("re:"):
        return target in names
    pattern = target.removeprefix("re:")
    if len(pattern) > _LONGEST or _NESTED_QUANTIFIER.search(pattern):
        raise Refusal(f"target {target!a:.60}: an expression that check does not try", fix=_FIX)
    try:
        return any(re.match(pattern, name) for name in names)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refusal(f"target {target!a:.60}: no expression: {error}", fix=_FIX) from error
