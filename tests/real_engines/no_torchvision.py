"""An empty torchvision, of which there is no build beside vLLM's for CPUs.

Classes of models are imported with it. transformers goes on without it: Pillow processes images.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available


def replace_torchvision() -> None:
    """Let `import torchvision` succeed."""
    assert not is_torchvision_available()  # cached
    for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io"):
        module = ModuleType(f"torchvision{name}")
        module.__getattr__ = lambda each: MagicMock(name=each)  # type: ignore[method-assign]
        module.__path__ = []
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
