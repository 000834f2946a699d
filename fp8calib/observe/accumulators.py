"""The running statistics of one site, on the device of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fp8calib.observe.reductions import Reductions
from fp8calib.stats.statistic import NUM_QUARTERS, STATISTICS, SiteStats


@dataclass(slots=True)
class SiteAccumulator:
    """The running statistics of one site.

    The amax is kept per quarter of the data until the quarter ends: `progress` comes from that.
    """

    count: int = 0
    quarter: torch.Tensor | None = None
    """The amax of the open quarter; the tensor is used again for the next quarter."""
    is_open: bool = False
    """Whether `quarter` holds something that `tensors` does not."""
    progress: list[torch.Tensor | None] = field(default_factory=lambda: [None] * NUM_QUARTERS)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of their statistic; `amax` is that of the closed quarters."""

    def observe(self, seen: Reductions) -> None:
        """Add a tensor of a batch to the open quarter."""
        self.count += seen.num_tokens
        for name, new in seen.tensors.items():
            if name == "amax":
                self._observe_amax(new)
            else:
                self.tensors[name] = STATISTICS[name].update(self.tensors.get(name), new)

    def _observe_amax(self, amax: torch.Tensor) -> None:
        if self.is_open or self.quarter is None:
            self.quarter = STATISTICS["amax"].update(self.quarter, amax)
        else:
            self.quarter.copy_(amax)
        self.is_open = True

    def close_quarter(self, quarter: int) -> None:
        """Add the amax of the open quarter to the running one; the quarter may be opened again."""
        if self.quarter is None or not self.is_open:
            return
        amax, progress = STATISTICS["amax"], STATISTICS["progress"]
        self.tensors["amax"] = amax.update(self.tensors.get("amax"), self.quarter)
        self.progress[quarter] = progress.update(self.progress[quarter], self.quarter.max())
        self.is_open = False

    def freeze(self) -> SiteStats:
        """Give the statistics on the CPU; no quarter may be open."""
        progress = [0.0 if amax is None else float(amax) for amax in self.progress]
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        return SiteStats(count=self.count, tensors=tensors, progress=torch.tensor(progress))
