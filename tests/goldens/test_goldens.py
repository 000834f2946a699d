"""The recorded behaviour holds: files bit for bit, figures of a forward pass to six digits.

`FP8CALIB_WRITE_GOLDENS=1 scripts/test -n 0 tests/goldens` records again; `CHANGES.md` then needs a
line that says what changed and why.
"""

import hashlib
import os
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.goldens.record import NEAR, Entry, list_cases, record

FOLDER = Path(__file__).parent
IS_WRITING = bool(os.environ.get("FP8CALIB_WRITE_GOLDENS"))
_KL_DIVERGENCE_FLOOR = 1e-7
"""A smaller difference of two losses is rounding."""

Recorded = dict[str, dict[tuple[str, str], str]]
"""By feature: the value of each case and key."""


@cache
def read_all() -> Recorded:
    """Read all recorded entries."""
    found: Recorded = {}
    for path in sorted(FOLDER.glob("*.tsv")):
        lines = (line.split("\t") for line in path.read_text().splitlines())
        found[path.stem.replace(".", "/")] = {(case, key): value for case, key, value in lines}
    return found


def write_all(made: dict[str, list[Entry]]) -> None:
    """Replace the recorded entries of these cases."""
    recorded = read_all()
    for entries in recorded.values():
        for case, key in [item for item in entries if item[0] in made]:
            del entries[case, key]
    for case, found in made.items():
        for feature, key, value in found:
            recorded.setdefault(feature, {})[case, key] = value
    for feature, entries in recorded.items():
        path = FOLDER / f"{feature.replace('/', '.')}.tsv"
        lines = [f"{case}\t{key}\t{value}\n" for (case, key), value in sorted(entries.items())]
        path.write_text("".join(lines))
        if not lines:
            path.unlink()


def compute_digest() -> str:
    """Hash all recorded entries."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.tsv")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def differ(feature: str, key: str, recorded: str, found: str) -> bool:
    """Whether a value differs: at all, or in a figure of a forward pass by more than rounding."""
    if recorded == found or feature not in NEAR or not recorded:
        return recorded != found
    if feature == "statistics":
        *counts, largest, total = recorded.split()
        *own_counts, own_largest, own_total = found.split()
        is_near = all(
            abs(float(a) - float(b)) <= 1e-5 * abs(float(a))
            for a, b in ((largest, own_largest), (total, own_total))
        )
        return counts != own_counts or not is_near
    expected, number = float(recorded), float(found)
    if key.startswith("sqnr"):
        return abs(expected - number) > 0.01
    # A last bit that differs can move a value to another FP8 code.
    tolerance = 1e-3 if key.endswith("kld_mean") else 1e-4
    return abs(expected - number) > max(tolerance * abs(expected), _KL_DIVERGENCE_FLOOR)


@pytest.mark.parametrize("case", list_cases())
def test_the_program_does_what_was_recorded(case: str, tmp_path: Path) -> None:
    found = record(case, tmp_path)
    if IS_WRITING:
        write_all({case: found})
        read_all.cache_clear()
        return
    expected = defaultdict(dict)
    for feature, entries in read_all().items():
        for (name, key), value in entries.items():
            if name == case:
                expected[feature][key] = value
    assert len({(feature, key) for feature, key, _ in found}) == len(found), "two equal keys"
    wrong = [
        f"{feature}: {key}: {expected[feature].get(key, '(nothing)')} -> {value}"
        for feature, key, value in found
        if differ(feature, key, expected[feature].get(key, "(nothing)"), value)
    ]
    keys = {(feature, key) for feature, key, _ in found}
    gone = [f"{f}: {k} is gone" for f, held in expected.items() for k in held if (f, k) not in keys]
    assert wrong + gone == [], f"{len(wrong) + len(gone)} of {len(found)} entries"


def test_every_recording_is_explained() -> None:
    lines = [line for line in (FOLDER / "CHANGES.md").read_text().splitlines() if line[:2] == "| "]
    assert IS_WRITING or f"`{compute_digest()}`" in lines[-1]
