"""Check a receipt: its form, its seal, the files that it names, and its figures measured again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8calib.checkpoint.json_files import load_json, parse_strict
from fp8calib.errors import ModelError
from fp8calib.jobs.receipt.make import encode_receipt, seal
from fp8calib.results.receipt import HashedFile, Receipt

SEALED = frozenset({"seal", "date", "command"})
"""What no second measurement tells: only the seal and a signature keep it."""
_NOT_AGAIN = SEALED | {"versions", "device", "warnings"}
_ERRORS = {"ppl_ratio": "ppl_ratio_se", "kld_mean": "kld_se", "top1_agreement": "top1_se"}
_SHARE_OF_ERROR = 0.1
_RELATIVE = 0.02
"""What figures without a standard error may differ by."""
_SMALLEST_KLD = 1e-9


def read_receipt(path: Path) -> tuple[Receipt, list[str]]:
    """Read a receipt; also give what is wrong with its form and its seal.

    Raises:
        ModelError: it cannot be read, or is no receipt of this version.
    """
    try:
        document = load_json(path, parse=parse_strict)
        receipt = Receipt.model_validate(document)
        canonical, sealed = encode_receipt(receipt), seal(receipt)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelError(
            f"{path}: no receipt of this version: {where}: {first['msg']}",
            hint="the schema is docs/schemas/receipt-file.json",
        ) from error
    except ValueError as error:  # no JSON, or a number that has no canonical form
        raise ModelError(
            f"{path}: no receipt: {error}", hint="name a file that --receipt wrote"
        ) from error
    faults = []
    if path.read_bytes() != canonical:
        faults.append("the file is not canonical JSON (RFC 8785): it was written by another hand")
    if sealed != receipt:
        faults.append("the seal is not that of the fields: one of them was changed")
    return receipt, faults


def compare_files(
    recorded: tuple[HashedFile, ...], found: tuple[HashedFile, ...], what: str
) -> Iterator[str]:
    """List the files that are missing, new, or not those that were measured."""
    before = {each.name: each for each in recorded}
    now = {each.name: each for each in found}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"{what}: {name} is missing"
        elif name not in before:
            yield f"{what}: {name} was not there"
        elif before[name] != now[name]:
            yield f"{what}: {name} is another file: SHA-256 {now[name].sha256[:16]}..."


def compare_again(recorded: Receipt, again: Receipt) -> Iterator[str]:
    """List the fields that a second measurement contradicts; figures may differ a little.

    A tenth of a standard error; without one 2 %; the noise floor by a factor of two.
    """
    before, now = recorded.model_dump(mode="json"), _rename(again, recorded)
    for name in sorted(before.keys() - _NOT_AGAIN):
        yield from _compare(name, before[name], now[name])


def compare_versions(recorded: Receipt, again: Receipt) -> Iterator[str]:
    """List the versions and the device that differ, which explain small differences."""
    for name in sorted(recorded.versions.keys() | again.versions.keys()):
        one, other = (each.versions.get(name, "none") for each in (recorded, again))
        if one != other:
            yield f"measured with {name} {one}, here is {other}"
    if recorded.device != again.device:
        yield f"measured on {recorded.device}, here on {again.device}"


def _rename(again: Receipt, recorded: Receipt) -> dict[str, Any]:
    """Give a second receipt the names of the first, and its rows alone."""
    found = again.model_dump(mode="json")
    found["model"]["name"] = recorded.model.name
    seen: Counter[str] = Counter()
    for row in found["rows"]:
        name = row["candidate"]
        # "x", or "x in vllm"; two paths can have one name, and come in order
        pairs = [
            (one.name, other.name)
            for one, other in zip(again.scales, recorded.scales, strict=True)
            if name == one.name or name.startswith(f"{one.name} in ")
        ]
        if pairs:
            one, other = pairs[min(seen[name], len(pairs) - 1)]
            row["candidate"] = other + name.removeprefix(one)
            seen[name] += 1
    for each, before in zip(found["scales"], recorded.scales, strict=True):
        each["name"] = before.name
    asked = {row.candidate for row in recorded.rows}
    found["rows"] = [row for row in found["rows"] if row["candidate"] in asked]
    found["text"]["specs"] = list(recorded.text.specs)  # the fingerprint tells
    return found


def _compare(where: str, before: Any, now: Any, error: float | None = None) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            known = before.get(_ERRORS.get(name, ""))
            yield from _compare(f"{where}.{name}", before.get(name), now.get(name), known)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _compare(f"{where}.{index}", one, other)
    elif not _agree(where, before, now, error):
        yield f"{where}: recorded {before!r}, measured {now!r}"


def _agree(where: str, before: Any, now: Any, error: float | None) -> bool:
    if isinstance(before, float) and isinstance(now, float) and where.startswith(_FIGURES):
        share = 1.0 if ".noise" in where else _RELATIVE
        allowed = share * min(abs(before), abs(now)) if error is None else _SHARE_OF_ERROR * error
        return abs(before - now) <= max(allowed, _SMALLEST_KLD)
    if where.endswith(".verdict_why") and isinstance(now, str):
        return re.sub(r"[\d.e-]+", "N", str(before)) == re.sub(r"[\d.e-]+", "N", now)
    return bool(before == now)


_FIGURES = ("rows.", "reference_ppl")
