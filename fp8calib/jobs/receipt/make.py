"""Make a receipt of a verification: hashes, text, engine, figures, in canonical JSON (RFC 8785)."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.hashes import hash_file
from fp8calib.checkpoint.json_files import is_result
from fp8calib.data.specs import FileSource, parse_spec
from fp8calib.engines.engine import Engine
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ExportError, UsageError, first_line
from fp8calib.jobs.published import publish_command
from fp8calib.jobs.rows import split_data
from fp8calib.jobs.verification.options import list_engines, list_scales, resolve_options
from fp8calib.model.load import HUB_FILES
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.receipt import (
    HashedFile,
    HashedFiles,
    Receipt,
    ReceiptEngine,
    ReceiptRow,
    ReceiptSettings,
    ReceiptText,
)
from fp8calib.verification.candidates import find_candidate
from fp8calib.verification.judge.gates import GATES, Gate
from fp8calib.verification.report import SERVER, CandidateResult, NoiseResult, VerifyReport

_TEXTS = ("README.md", "LICEN[CS]E*", "NOTICE*", "*.md")
"""Files of a model that no figure depends on."""


def require_files(request: VerifyRequest) -> None:
    """Refuse a receipt of what has no files or can be measured only here, before a model is read.

    Raises:
        UsageError: naming it.
    """
    if not isinstance(request.model, str | Path):
        raise UsageError("--receipt: the model is in memory, and has no files to hash")
    if not all(isinstance(each, str | Path) for each in list_scales(request.scales)):
        raise UsageError("--receipt: statistics are in memory, and have no file to hash")
    if split_data(request.data)[1] is not None:
        raise UsageError("--receipt: the text is in memory: nobody else can get it")
    ignored = {
        "--reference-dump": request.reference_dump,
        "--tasks": request.tasks,
        "--rules": request.rules,
        "--sensitivity": request.sensitivity,
        "--decode": request.decode,
        "--sampled": request.sampled,
        "--reference-server": request.reference_server,
    }
    if found := [option for option, value in ignored.items() if value]:
        raise UsageError(f"--receipt: it has no place for what {found[0]} measures")


def make_receipt(
    report: VerifyReport,
    rows: Sequence[CandidateResult],
    request: VerifyRequest,
    folder: Path,
) -> Receipt:
    """Make the receipt of a report.

    Args:
        report: what was measured.
        rows: the candidates to name.
        request: the options of `verify` that measure the same.
        folder: the files of the unquantized model.

    Raises:
        ExportError: a name or a number has no canonical form.
    """
    assert report.provenance is not None  # noqa: S101 -- a model was run
    options = resolve_options(request)
    engines = ((options.engine, options.numerics), *options.others)
    scales = tuple(str(each) for each in list_scales(request.scales))
    published = {each: _publish(each) for each in (str(request.model), *scales)}
    specs = split_data(request.data)[0]
    receipt = Receipt(
        date=report.provenance.date,
        command=publish_command(report.provenance.command),
        versions={**report.provenance.versions, "python": ".".join(map(str, sys.version_info[:3]))},
        model=hash_model(str(request.model), folder),
        model_hash=report.provenance.model_hash,
        scales=tuple(hash_model(each, find_candidate(each)) for each in scales),
        text=ReceiptText(
            specs=tuple(map(_publish, specs)),
            files=hash_texts(specs),
            samples=request.samples,
            seq_len=request.seq_len,
            pack=request.pack,
            text_column=request.text_column,
            fingerprint=report.provenance.data_hash,
            sequences=report.sequences,
            tokens=report.tokens,
        ),
        engines=tuple(_describe_engine(*each) for each in engines),
        settings=ReceiptSettings(
            engine=tuple(list_engines(request)),
            scheme=request.scheme,
            kv_cache_dtype=tuple(request.kv_cache_dtype or ()),
            gpu=request.gpu,
            fp8_dtype=request.fp8_dtype,
            batch_size=request.batch_size,
            dtype=report.dtype,
            gate=options.gate,
            kv_cache_dtype_skip_layers=tuple(request.kv_cache_dtype_skip_layers or ()),
        ),
        device=report.device,
        reference_ppl=report.reference.ppl,
        rows=tuple(_make_row(each, report, options.gate) for each in rows),
        warnings=report.warnings,
        seal="",
    )
    try:
        return seal(Receipt.model_validate(_rename(receipt.model_dump(mode="json"), published)))
    except ValueError as error:  # such as the name of a file that is no UTF-8
        raise ExportError(f"{request.receipt}: no receipt: {first_line(error)}") from error


def encode_receipt(receipt: Receipt) -> bytes:
    """Encode a receipt as canonical JSON."""
    return _make_canonical(receipt.model_dump(mode="json"))


def seal(receipt: Receipt) -> Receipt:
    """Give a receipt the hash of its other fields."""
    document = receipt.model_dump(mode="json", exclude={"seal"})
    digest = hashlib.sha256(_make_canonical(document)).hexdigest()
    return receipt.model_copy(update={"seal": digest})


def _make_canonical(document: Mapping[str, Any]) -> bytes:
    from rfc8785 import dumps  # noqa: PLC0415 -- most runs need none

    return dumps(document)


def hash_model(name: str, place: Path) -> HashedFiles:
    """Hash the files of a folder by which a model or scales are known, or one file."""
    paths = [place] if place.is_file() else sorted(filter(_counts, place.iterdir()))
    return HashedFiles(name=_publish(name), files=tuple(map(_hash, paths)))


def hash_texts(specs: Sequence[str]) -> tuple[HashedFile, ...]:
    """Hash the files of text."""
    sources = (parse_spec(each).source for each in specs)
    return tuple(
        _hash(path) for source in sources if isinstance(source, FileSource) for path in source.paths
    )


def _hash(path: Path) -> HashedFile:
    return HashedFile(**asdict(hash_file(path)))


def _counts(path: Path) -> bool:
    is_wanted = any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, "*.npz"))
    is_text = any(fnmatch(path.name, pattern) for pattern in _TEXTS)
    return path.is_file() and is_wanted and not is_text and not is_result(path)


def _describe_engine(engine: Engine, numerics: Numerics) -> ReceiptEngine:
    changed = {
        each.name: _plain(getattr(numerics, each.name))
        for each in fields(numerics)
        if each.compare and getattr(numerics, each.name) != _default(each)
    }
    return ReceiptEngine(name=engine.key, release=engine.release, numerics=changed)


def _default(field: Any) -> object:
    return field.default if field.default is not MISSING else field.default_factory()


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value.value if isinstance(value, Enum) else value


def _make_row(found: CandidateResult, report: VerifyReport, gate: Gate | None) -> ReceiptRow:
    share, is_server = found.top1_agreement, found.name == SERVER
    return ReceiptRow(
        candidate=found.name,
        how="server" if is_server else "emulated",
        ppl=found.ppl,
        ppl_ratio=found.ppl_ratio,
        ppl_ratio_se=found.ppl_ratio_se,
        kld_mean=found.kld_mean,
        kld_se=found.kld_se,
        kld_p99=found.kld_p99,
        top1_agreement=share,
        top1_se=None if share is None else math.sqrt(share * (1 - share) / report.tokens),
        noise=_find_server_noise(report) if is_server else report.noise,
        gate=gate or GATES[found.gate],
        verdict=found.verdict,
        verdict_why=found.verdict_why,
    )


def _find_server_noise(report: VerifyReport) -> NoiseResult | None:
    if report.server is None:
        return None
    return NoiseResult(tokens=report.tokens, kld=report.server.noise_rms**2 / 2)


def _publish(name: str) -> str:
    """Keep only the last component of an absolute path."""
    return Path(name).name if name.startswith(("/", "~")) else name


def _rename(value: Any, published: Mapping[str, str]) -> Any:
    """Replace paths in texts by what may be published; of others, keep the last component."""
    if isinstance(value, dict):
        return {key: _rename(each, published) for key, each in value.items()}
    if isinstance(value, list):
        return [_rename(each, published) for each in value]
    if not isinstance(value, str):
        return value
    for path, name in sorted(published.items(), key=lambda item: -len(item[0])):
        value = value.replace(path, name)
    return re.sub(r"(?<![\w.~:/-])/(?:[^\s/'\"]+/)+", "", value)
