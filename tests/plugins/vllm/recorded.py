"""The file format of recorded answers; vLLM's environment, which lacks pytest, writes it too."""

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_golden(path: Path, answers: Mapping[str, list[Any]]) -> None:
    """Write the last answers of the workers by method; bytes are compressed."""
    coded = {
        method: [
            {"zlib": base64.b64encode(zlib.compress(each, 9)).decode()}
            if isinstance(each, bytes)
            else each
            for each in found
        ]
        for method, found in answers.items()
    }
    path.write_text(json.dumps(coded, indent=0) + "\n")


def read_golden(path: Path) -> dict[str, list[Any]]:
    return {
        method: [
            zlib.decompress(base64.b64decode(each["zlib"])) if isinstance(each, dict) else each
            for each in found
        ]
        for method, found in json.loads(path.read_text()).items()
    }
