"""What `gptq` wrote."""

from __future__ import annotations

from fp8calib.commands.quantize import QuantizeResult
from fp8calib.plugins.gptq.core import DAMPING
from fp8calib.plugins.gptq.rounded_codes import GPTQ, RoundedLinear


class GptqResult(QuantizeResult):
    """The checkpoint that was written, and how each linear was rounded."""

    rounded: tuple[RoundedLinear, ...]

    @property
    def by_gptq(self) -> tuple[RoundedLinear, ...]:
        """The linears that GPTQ rounded."""
        return tuple(each for each in self.rounded if each.rounding == GPTQ)

    @property
    def damped(self) -> tuple[RoundedLinear, ...]:
        """The linears that needed more damping than usual: their Hessian was not positive."""
        return tuple(each for each in self.rounded if (each.damping or 0) > DAMPING)
