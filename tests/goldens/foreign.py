"""What is read of other tools' checkpoints: the scales of K and V, and what `check` says."""

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from tests.cli.program import run
from tests.formats.foreign import FOLDER

TOOLS = ("llmcompressor", "modelopt", "quark")


def list_folders() -> list[Path]:
    """List the checkpoints of other tools."""
    return sorted(path for path in FOLDER.iterdir() if path.name.startswith(TOOLS))


def record(folder: Path, place: Path) -> Iterator[tuple[str, str, str]]:
    """Give the scales that are extracted of a checkpoint, as hexadecimal floats."""
    kind = next((name for name in ("gpt2", "mixtral") if name in folder.name), "llama")
    command = ("extract-kv-scales", "--quantized-model", folder, "--model", FOLDER / kind)
    outcome = run(*command, "--format", "kv-scales", "--save-path", place / "out", "--json")
    if outcome.code:
        kind = outcome.json["error"]["kind"]
        yield "foreign", f"{folder.name} refused", f"{outcome.code} {kind}"
        return
    for name, scale in sorted(load_file(place / "out" / "kv_scales.safetensors").items()):
        values = " ".join(float(x).hex() for x in scale.flatten())
        yield "foreign", f"{folder.name} {name}", values
