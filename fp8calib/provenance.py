"""Fingerprints: what a stats file belongs to, told without paths or times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata

from fp8calib import __version__
from fp8calib.checkpoint.reader import Checkpoint

SAMPLE_BYTES = 4096


def fingerprint_model(config: Mapping[str, object], checkpoint: Checkpoint) -> str:
    """Hash the config and, of every tensor, name, dtype, shape and 4 KiB from its middle.

    The same weights give the same fingerprint however they are sharded; any training step moves
    the sampled bytes.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(checkpoint.tensors):
        entry = checkpoint.tensors[name]
        digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
        digest.update(checkpoint.sample_bytes(name, SAMPLE_BYTES))
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Give the versions of the packages that the numbers depend on."""
    others = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"fp8calib": __version__, **others}
