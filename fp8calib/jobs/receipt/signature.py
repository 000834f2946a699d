"""Sign a receipt by ssh-keygen or minisign, and check its signature; keys stay with them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.errors import UsageError, VerificationError, first_line

NAMESPACE = "fp8calib-receipt"
"""Keeps a signature of a receipt from being one of something else (`ssh-keygen -Y -n`)."""
SUFFIXES = (".sig", ".minisig")
"""Of the signatures of ssh-keygen and minisign."""
_MINISIGN_FIRST = "untrusted comment:"


def sign(path: Path, key: Path) -> Path:
    """Sign a file by the program of the key; it asks for a passphrase itself.

    Raises:
        UsageError: the program is not installed, or the key cannot be read.
        VerificationError: it failed.
    """
    if _is_minisign(key):
        place = path.with_name(f"{path.name}.minisig")
        _call(["minisign", "-S", "-s", str(key), "-m", str(path), "-x", str(place)])
        return place
    place = path.with_name(f"{path.name}.sig")
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE]
    write_file_atomic(place, _call(command, path.read_bytes()))
    return place


def find_signature(path: Path, key: Path | None = None) -> Path | None:
    """Find the signature beside a file; with a key, the one of its program."""
    suffixes = SUFFIXES if key is None else SUFFIXES[_is_minisign(key) :][:1]
    places = (path.with_name(f"{path.name}{suffix}") for suffix in suffixes)
    return next((place for place in places if place.is_file()), None)


def check_signature(path: Path, signature: Path, key: Path) -> str:
    """Check a signature by the public key of the signer; give what is wrong, empty if nothing.

    Raises:
        UsageError: the program is not installed, or the key cannot be read.
    """
    if signature.suffix == ".minisig":
        command = ["minisign", "-V", "-p", str(key), "-m", str(path), "-x", str(signature)]
        return _try(command, b"")
    with tempfile.NamedTemporaryFile("w", suffix=".allowed") as allowed:
        # of an SSH key, type and base64; what follows is a comment
        allowed.write(f"signer {' '.join(_read_key(key).split()[:2])}\n")
        allowed.flush()
        command = ["ssh-keygen", "-Y", "verify", "-f", allowed.name, "-I", "signer"]
        command += ["-n", NAMESPACE, "-s", str(signature)]
        return _try(command, path.read_bytes())


def _is_minisign(key: Path) -> bool:
    return _read_key(key).startswith(_MINISIGN_FIRST)


def _read_key(key: Path) -> str:
    try:
        return key.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--key {key}: cannot be read: {first_line(error)}") from error


def _try(command: list[str], given: bytes) -> str:
    try:
        _call(command, given)
    except VerificationError as error:
        return error.message
    return ""


def _call(command: list[str], given: bytes | None = None) -> bytes:
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} is not installed", hint="install it, or use another key")
    # Without input for the program, it may ask at the terminal.
    done = subprocess.run(command, input=given, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        tail = " ".join((done.stderr or done.stdout).decode(errors="replace").split())[-300:]
        raise VerificationError(f"{command[0]}: {tail}")
    return done.stdout
