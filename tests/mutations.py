"""Ways to break a valid scales file, by a seeded generator: bytes, JSON, headers, whole folders."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

_DEEP = "[" * 100_000
_RAW = {
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@overflow@": "1e400",
    "@tiny@": "1e-400",
    "@huge@": "9" * 400,
    "@longest@": "9" * 5000,
    "@deep@": _DEEP,
    "@nested@": "[" * 950 + "]" * 950,
    "@object@": '{"a":' * 300 + "1" + "}" * 300,
}
"""What no Python value is written as, by the placeholder that stands for it until the end."""
_VALUES: Sequence[object] = (
    *_RAW,
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, 0.0, -0.5, 1e-46, 3.5e38),
    *(
        "",
        "0",
        "0.5",
        "NaN",
        "x" * 100_000,
        "\ud800",
        "\x00",
        "\n\u2028\x1b[2J",
        "../../etc/passwd",
    ),
    *("/etc/passwd", "model.safetensors", "float8_e4m3fnuz", "float8_e5m2", "fp8", "llama", "opt"),
    *([], {}, [1], [[]], {"0": 0.5}, [0.5, 0.25]),
)
_KEYS = (
    "0",
    "1",
    "2",
    "00",
    "01",
    "-1",
    "1e2",
    " 0",
    "٣",
    "²",
    "rank0",
    "rank1",
    "rank01",
    "",
    "x",
)
_PATH = ("model", "layers", "0", "self_attn", "attn", "k_proj", "k_scale", "v_scale", "kv_scale")
Mutate = Callable[[Random, bytes], bytes]


def flip_bytes(random: Random, raw: bytes) -> bytes:
    """Change a few bytes."""
    changed = bytearray(raw or b"\0")
    for _ in range(random.randint(1, 5)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def cut(random: Random, raw: bytes) -> bytes:
    """Keep only the beginning or the end, or remove a piece of the middle."""
    first, last = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    return random.choice((raw[:first], raw[first:], raw[:first] + raw[last:]))


def repeat(random: Random, raw: bytes) -> bytes:
    """Repeat a piece, or everything."""
    first, last = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    return random.choice((raw[:last] + raw[first:], raw + raw))


def mutate_json(random: Random, raw: bytes) -> bytes:
    """Change values and keys of a JSON document, or how it is encoded."""
    try:
        document = json.loads(raw)
    except ValueError:
        return flip_bytes(random, raw)
    for _ in range(random.randint(1, 3)):
        document = _change(random, document)
    text = json.dumps(document)
    for placeholder, token in _RAW.items():
        text = text.replace(f'"{placeholder}"', token)
    if random.random() < 0.15:
        text = _double_a_key(random, text)
    encoding = random.choice(("utf-8",) * 12 + ("utf-8-sig", "utf-16", "utf-32", "latin-1"))
    return text.encode(encoding, "surrogatepass" if encoding == "utf-8" else "replace")


def _change(random: Random, node: object) -> object:
    """Choose a place in the document and change it."""
    if not isinstance(node, dict | list) or not node or random.random() < 0.1:
        return random.choice(_VALUES)
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = random.choice(keys)
    if isinstance(node, list):
        return [_change(random, item) if i == key else item for i, item in enumerate(node)]
    action = random.random()
    if action < 0.1:
        return {name: value for name, value in node.items() if name != key}
    if action < 0.25:
        new = _rename(random, str(key))
        return {(new if name == key else name): value for name, value in node.items()}
    if action < 0.3:
        return {**node, random.choice(_KEYS): random.choice(_VALUES)}
    return {**node, key: _change(random, node[key])}


def _rename(random: Random, key: str) -> str:
    """Return another key, or a tensor name with one part changed."""
    parts = key.split(".")
    if len(parts) < 2 or random.random() < 0.2:
        return random.choice((*_KEYS, "x" * 200_000, key + "\n\x1b[31m", key + "\ud800"))
    parts[random.randrange(len(parts))] = random.choice((*_PATH, *_KEYS, "x" * 100_000))
    return ".".join(parts)


def _double_a_key(random: Random, text: str) -> str:
    places = list(re.finditer(r'"[^"]{0,80}": ', text))
    if not places:
        return text
    place = random.choice(places)
    value = random.choice(("1", "0.5", "null", "{}", "[]"))
    return f"{text[: place.start()]}{place.group()}{value}, {text[place.start() :]}"


def mutate_header(random: Random, raw: bytes) -> bytes:
    """Change the header of a safetensors file, and sometimes its stated length."""
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    if random.random() < 0.8:
        header = mutate_json(random, header)
    claimed = len(header)
    if random.random() < 0.2:
        claimed = random.choice((0, 1, claimed - 1, claimed + 1, 10**8, 2**32, 2**63, 2**64 - 1))
    if random.random() < 0.3:
        data = random.choice((flip_bytes, cut, repeat))(random, data)
    return max(claimed, 0).to_bytes(8, "little") + header + data


_MUTATIONS: dict[str, Sequence[Mutate]] = {
    ".json": (mutate_json, mutate_json, mutate_json, flip_bytes, cut, repeat),
    ".safetensors": (mutate_header, mutate_header, mutate_header, flip_bytes, cut, repeat),
    ".npz": (flip_bytes, cut, repeat),
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
