"""Check a receipt, sign it, or draw its badge."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.commands.verify import run as verify
from fp8calib.errors import DataError, UsageError
from fp8calib.jobs.function import as_function
from fp8calib.jobs.receipt.check import (
    compare_again,
    compare_files,
    compare_versions,
    read_receipt,
)
from fp8calib.jobs.receipt.make import hash_model, hash_texts
from fp8calib.jobs.receipt.signature import check_signature, find_signature, sign
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.rows import list_specs
from fp8calib.model.load import find_folder
from fp8calib.options.recipe_keys import Specs
from fp8calib.render.badge import draw_badge, write_block
from fp8calib.requests.receipt import ReceiptRequest
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.receipt import Receipt, ReceiptResult
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.judge.gates import GATES, Gate


def run(request: ReceiptRequest, reporter: Reporter) -> ReceiptResult:
    """Check a receipt, sign it, or draw its badge.

    Raises:
        UsageError: an option is invalid, or a program for signatures is missing.
        ModelError: the file is no receipt, or a model cannot be read.
        DataError: the data cannot be read.
        CalibrationError: a forward pass failed.
        VerificationError: the program for signatures failed.
        ExportError: a file cannot be written.
    """
    path = Path(request.file)
    receipt, faults = read_receipt(path)
    if request.action != "verify" and request.rerun:
        raise UsageError(f"--rerun has no effect with {request.action}")
    if request.action == "sign" and request.key is None:
        raise UsageError("receipt sign needs your key", hint="add --key FILE")
    if request.action != "verify" and faults:
        return ReceiptResult(action=request.action, receipt=receipt, faults=tuple(faults))
    if request.action == "sign":
        place = sign(path, Path(request.key or ""))
        return ReceiptResult(action="sign", receipt=receipt, written=str(place))
    if request.action == "badge":
        place = path.with_suffix(".svg")
        if place == path:
            raise UsageError(f"{path}: its badge would replace it", hint="rename the receipt")
        write_file_atomic(place, draw_badge(receipt).encode())
        block = write_block(receipt, badge=place.name, file=path.name)
        return ReceiptResult(action="badge", receipt=receipt, written=str(place), markdown=block)
    checked = [] if faults else ["form and seal"]
    unchecked: list[str] = []
    for name, is_checked, found in _check(request, path, receipt, reporter):
        faults += found
        if is_checked and not found:
            checked.append(name)
        elif not is_checked:
            unchecked.append(name)
    return ReceiptResult(
        action="verify",
        receipt=receipt,
        checked=tuple(checked),
        unchecked=tuple(unchecked),
        faults=tuple(faults),
    )


def _check(
    request: ReceiptRequest, path: Path, receipt: Receipt, reporter: Reporter
) -> Iterator[tuple[str, bool, list[str]]]:
    """Give the name of each check, whether it was made, and what it found."""
    key = None if request.key is None else Path(request.key)
    signature = find_signature(path, key)
    if key is None:
        why = "no signature beside it" if signature is None else f"{signature.name}: add --key FILE"
        yield f"signature ({why})", False, []
    else:
        wrong = (
            "there is none beside it"
            if signature is None
            else check_signature(path, signature, key)
        )
        yield f"signature by {key}", True, [f"signature: {wrong}"] if wrong else []
    scales = _find_scales(request, receipt, path)
    if request.model is None:
        yield f"{len(receipt.model.files)} files of {receipt.model.name} (--model)", False, []
    else:
        folder = find_folder(str(request.model), request.revision)
        now = hash_model(str(request.model), folder)
        found = list(compare_files(receipt.model.files, now.files, receipt.model.name))
        yield f"{len(now.files)} files of {receipt.model.name}", True, found
    for recorded, place in zip(receipt.scales, scales, strict=True):
        if place is None:
            yield f"{len(recorded.files)} files of {recorded.name} (--scales)", False, []
            continue
        now = hash_model(recorded.name, find_candidate(place))
        found = list(compare_files(recorded.files, now.files, recorded.name))
        yield f"{len(now.files)} files of {recorded.name}", True, found
    if request.data is not None:
        texts = hash_texts(list_specs(request.data))
        yield "files of text", True, list(compare_files(receipt.text.files, texts, "text"))
    if not request.rerun:
        yield "figures, tokens, pixels and samples (--rerun)", False, []
        return
    again = _measure_again(request, receipt, scales, reporter)
    for note in compare_versions(receipt, again):
        reporter.warn(note)
    yield "figures, measured again", True, list(compare_again(receipt, again))


def _find_scales(request: ReceiptRequest, receipt: Receipt, path: Path) -> list[str | None]:
    """Find what was measured: as named, or the folder of a receipt that lies in it."""
    if request.scales:
        if len(request.scales) != len(receipt.scales):
            raise UsageError(
                f"--scales: {len(request.scales)} given, and the receipt has {len(receipt.scales)}",
                hint=f"in its order: {', '.join(each.name for each in receipt.scales)}",
            )
        return [str(each) for each in request.scales]
    if len(receipt.scales) == 1 and len(receipt.scales[0].files) > 1:
        files = receipt.scales[0].files
        if all((path.parent / each.name).is_file() for each in files):
            return [str(path.parent)]
    return [None] * len(receipt.scales)


def _measure_again(
    request: ReceiptRequest, receipt: Receipt, scales: list[str | None], reporter: Reporter
) -> Receipt:
    """Measure what the receipt says, with the files that are here.

    Raises:
        UsageError: something is not here, or cannot be measured again.
    """
    if request.model is None:
        raise UsageError("--rerun needs the unquantized model", hint="add --model DIR")
    if None in scales:
        raise UsageError("--rerun needs what was measured", hint="add --scales PATH")
    if any(row.how != "emulated" for row in receipt.rows):
        raise UsageError("--rerun: a server was scored", hint="run verify --server again")
    settings, text = receipt.settings, receipt.text
    data = request.data if request.data is not None else Specs(text.specs)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "again.json"
        asked = VerifyRequest(
            request.model,
            [each for each in scales if each is not None],
            data,
            text_column=text.text_column,
            engine=settings.engine,
            scheme=settings.scheme,
            kv_cache_dtype=settings.kv_cache_dtype or None,
            kv_cache_dtype_skip_layers=settings.kv_cache_dtype_skip_layers,
            gpu=settings.gpu,
            fp8_dtype=settings.fp8_dtype,
            samples=text.samples,
            seq_len=text.seq_len,
            batch_size=settings.batch_size,
            pack=text.pack,
            gate=_spell_gate(settings.gate, Path(folder)),
            receipt=place,
            device=request.device,
            dtype=settings.dtype,
            memory=request.memory,
            revision=request.revision,
            trust_remote_code=request.trust_remote_code,
        )
        try:
            verify(asked, reporter)
        except DataError as error:
            if request.data is not None:
                raise
            hint = (
                f"the receipt names its text {', '.join(text.specs)}: say with --data where it is"
            )
            raise DataError(error.message, hint=hint) from error
        return read_receipt(place)[0]


def _spell_gate(gate: Gate | None, folder: Path) -> str | None:
    """Spell a gate for `--gate`: its name, or a file with its thresholds."""
    if gate is None or GATES.get(gate.name) == gate:
        return None if gate is None else gate.name
    place = folder / "gate.yaml"
    place.write_text(json.dumps(gate.model_dump(exclude_none=True)))
    return str(place)


receipt = as_function("receipt", ReceiptRequest, run)
