"""What `check` tells of the numbers that an engine holds."""

import math
from collections.abc import Sequence


def finite(numbers: Sequence[float]) -> float | None:
    return max(numbers) if all(map(math.isfinite, numbers)) else None
