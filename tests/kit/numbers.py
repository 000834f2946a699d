"""What `check` tells of the numbers that an engine holds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def finite(numbers: Sequence[float]) -> float | None:
    return max(numbers) if all(map(math.isfinite, numbers)) else None
