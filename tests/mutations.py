"""Ways to break a valid scales file, by a seeded generator: bytes, JSON, headers, whole folders."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

_RAW = ("NaN", "-Infinity", "1e400", "1e-400", "9" * 5000, "[" * 100_000, '{"a":' * 700 + "1")
"""What no Python value is written as."""
_VALUES: Sequence[object] = (
    *(None, True, 0, -1, 2**63, 10**30, 0.5, -0.5, 1e-46, 3.5e38, [], {}, [[]], {"0": 0.5}),
    *("", "0.5", "NaN", "x" * 100_000, "\ud800", "\x00", "\n\u2028\x1b[2J", "../../etc/passwd"),
    *("/etc/passwd", "model.safetensors", "float8_e4m3fnuz", "float8_e5m2", "fp8", "opt"),
)
_KEYS = ("0", "00", "-1", "1e2", " 0", "٣", "²", "rank1", "rank01", "", "x" * 200_000, "\n\x1b[31m")
_PARTS = ("model", "layers", "0", "self_attn", "attn", "k_proj", "k_scale", "kv_scale", *_KEYS)
Mutate = Callable[[Random, bytes], bytes]


def flip_bytes(random: Random, raw: bytes) -> bytes:
    """Change a few bytes."""
    changed = bytearray(raw or b"\0")
    for _ in range(random.randint(1, 5)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def cut(random: Random, raw: bytes) -> bytes:
    """Keep only the beginning or the end, or remove or repeat a piece of the middle."""
    first, last = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    return random.choice((raw[:first], raw[first:], raw[:first] + raw[last:], raw[:last] + raw))


def mutate_json(random: Random, raw: bytes) -> bytes:
    """Change a value or a key of a JSON document, give a key twice, or encode it otherwise."""
    try:
        text = json.dumps(_change(random, json.loads(raw)))
    except ValueError:
        return flip_bytes(random, raw)
    places = list(re.finditer(r'"([^"]{0,80})": ', text))
    if places and random.random() < 0.3:
        start = random.choice(places).end()
        text = f"{text[:start]}{random.choice(_RAW)}, {random.choice(places).group()}{text[start:]}"
    encoding = random.choice(("utf-8",) * 12 + ("utf-8-sig", "utf-16", "latin-1"))
    return text.encode(encoding, "surrogatepass" if encoding == "utf-8" else "replace")


def _change(random: Random, node: object) -> object:
    """Choose a place in the document and change it."""
    if not isinstance(node, dict | list) or not node or random.random() < 0.1:
        return random.choice(_VALUES)
    if isinstance(node, list):
        place = random.randrange(len(node))
        return [*node[:place], _change(random, node[place]), *node[place + 1 :]]
    key = random.choice(list(node))
    action = random.random()
    if action < 0.1:
        return {name: value for name, value in node.items() if name != key}
    if action < 0.25:
        parts = str(key).split(".")
        parts[random.randrange(len(parts))] = random.choice(_PARTS)
        return {(".".join(parts) if name == key else name): each for name, each in node.items()}
    return {**node, key: _change(random, node[key])}


def mutate_header(random: Random, raw: bytes) -> bytes:
    """Change the header of a safetensors file, and sometimes its stated length."""
    length = int.from_bytes(raw[:8], "little")
    header = mutate_json(random, raw[8 : 8 + length])
    claimed = len(header)
    if random.random() < 0.2:
        claimed = random.choice((0, claimed - 1, claimed + 1, 2**32, 2**63, 2**64 - 1))
    return max(claimed, 0).to_bytes(8, "little") + header + raw[8 + length :]


_MUTATIONS: dict[str, Sequence[Mutate]] = {
    ".json": (mutate_json, mutate_json, flip_bytes, cut),
    ".safetensors": (mutate_header, mutate_header, flip_bytes, cut),
    ".npz": (flip_bytes, cut),
}


def break_file(random: Random, path: Path) -> None:
    """Rewrite a file with a fault in it; a valid file hard-linked to it is unchanged."""
    raw = random.choice(_MUTATIONS[path.suffix])(random, path.read_bytes())
    path.unlink()
    path.write_bytes(raw)


def break_folder(random: Random, folder: Path, *, outside: Path) -> None:
    """Break one of the files, or delete, rename, copy or link one.

    Args:
        random: the source of randomness.
        folder: the folder to change.
        outside: a folder of valid files, as target of links.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _MUTATIONS)
    path = random.choice(files)
    if random.random() < 0.8:
        break_file(random, path)
        return
    other = folder / f"{random.choice(('rank0', 'rank1', 'more', 'rank٣', 'x' * 200))}{path.suffix}"
    target = random.choice([*outside.iterdir(), outside, path, Path("nowhere"), Path("/dev/zero")])
    action = random.choice(("delete", "rename", "copy", "folder", "link", "link beside"))
    raw = path.read_bytes()
    if action not in {"copy", "link beside"}:
        path.unlink()
    other.unlink(missing_ok=True)
    if action in {"rename", "copy"}:
        other.write_bytes(raw)
    elif action == "folder":
        path.mkdir()
    elif action != "delete":
        (path if action == "link" else other).symlink_to(target)
