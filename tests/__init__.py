"""All tests. Without a GPU, kernels run in Triton's interpreter: chosen before it is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
