"""The program, changed to be killed before it finishes the second layer that GPTQ rounds."""

from __future__ import annotations

import os
import signal
from typing import Any

from fp8calib.cli import main
from fp8calib.plugins.gptq.layer_rounding import LayerRounding

finish = LayerRounding.finish_layer


def stop(self: LayerRounding, layer: Any) -> None:
    if layer.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self, layer)


if __name__ == "__main__":
    LayerRounding.finish_layer = stop  # type: ignore[method-assign]
    main()
