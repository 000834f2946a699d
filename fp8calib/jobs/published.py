"""What of a command line may be published."""

from __future__ import annotations

import shlex
from pathlib import Path


def publish_command(command: str) -> str:
    """Keep only the last component of absolute paths, as files of scales do, and no address."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that does not end: somebody has edited the report
        words = command.split()
    return shlex.join(map(_publish_word, words))


def _publish_word(word: str) -> str:
    option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("http://", "https://")):
        value = "URL"
    return f"{option}{sign}{Path(value).name if value.startswith('/') else value}"
