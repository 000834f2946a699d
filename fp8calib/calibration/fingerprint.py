"""What identifies a model and the software of a run: its fingerprint, and package versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata

from fp8calib import __version__
from fp8calib.checkpoint.checkpoint import Checkpoint

SAMPLE_BYTES = 4096
_DECODERS = {"image": ("pillow", "torchvision"), "audio": ("soundfile", "soxr")}
_HISTORY_KEYS = frozenset({"_name_or_path", "transformers_version"})


def fingerprint_model(config: Mapping[str, object], checkpoint: Checkpoint) -> str:
    """Hash the config and, of every tensor, its name, dtype, shape and 4 KiB from its middle.

    The fingerprint does not depend on how the weights are sharded; any training step changes the
    sampled bytes. Config keys that record where a model came from are left out.

    Returns:
        64 hexadecimal digits, 32 of the config and 32 of the weights.
    """
    counted = {key: value for key, value in config.items() if key not in _HISTORY_KEYS}
    text = json.dumps(counted, sort_keys=True, default=str)
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        entry = checkpoint.tensors[name]
        digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
        digest.update(checkpoint.sample_bytes(name, SAMPLE_BYTES))
    halves = (hashlib.sha256(text.encode()), digest)
    return "".join(half.hexdigest()[:32] for half in halves)


def versions(kinds: Iterable[str] = ()) -> dict[str, str]:
    """Give the versions of the packages that the numbers depend on, for text and other `kinds`.

    `kinds` are values of `Modality`. Pixels depend on whether torchvision is there: what is not
    installed has no version.
    """
    names = {name for kind in kinds for name in _DECODERS.get(kind, ())}
    found = {"fp8calib": __version__}
    for name in ("torch", "transformers", *sorted(names)):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
