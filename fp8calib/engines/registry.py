"""The engines this tool knows. An engine that is registered here is known to every command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from fp8calib.engines.engine import Engine, call
from fp8calib.engines.facts.release import FOLDER, parse_version
from fp8calib.engines.sglang.engine import SGLANG
from fp8calib.engines.vllm.engine import VLLM, VLLM_CPU
from fp8calib.errors import UsageError, suggest
from fp8calib.plugin import load_all

if TYPE_CHECKING:
    from fp8calib.engines.arithmetic import Numerics

_QUANTIZED_CACHE = "fp8_quantized_cache"
"""What transformers calls cache_implementation="quantized" with the backend fp8."""
REFERENCE = Engine(
    key="reference",
    title="the plain rule",
    version="",
    make_numerics=partial(call, "fp8calib.engines.arithmetic:Numerics"),
    cache_types=tuple(dict.fromkeys([*VLLM.cache_types, *SGLANG.cache_types, _QUANTIZED_CACHE])),
    no_folder="it is the plain FP8 arithmetic of `verify`, no engine that loads files",
)
_TRANSFORMERS = Engine(
    key="transformers",
    title="transformers",
    version=version("transformers"),
    evidence="run",
    no_numerics="with KV scales transformers keeps no FP8 cache: compressed-tensors rounds K and V "
    "to values of FP8 and stores them in the model's dtype (modeling/kvcache.py of 0.20). --engine "
    "reference rounds to the same format; its --kv-cache-dtype fp8_quantized_cache is that of "
    "QuantizedCache, whose other backends, quanto and hqq, are not emulated",
    replay_folder=partial(call, "fp8calib.engines.transformers.report:report_transformers"),
)
"""The installed one, with the installed compressed-tensors."""
_READ_ONLY = "{title} {version}: KV scales: {kv_scales}; FP8 weights: {weights} ({source})"
ONLY_READ: dict[str, dict[str, str]] = json.loads((FOLDER / "only_read.json").read_bytes())
"""Engines whose source was read once, by the name that `--engine` had for them: a title, the
releases or the commit that was read, what becomes of KV scales and FP8 weights, and the files."""
ENGINES: dict[str, Engine] = {}
"""By key."""


def register_engine(engine: Engine) -> None:
    """Make an engine known under its key.

    Raises:
        ValueError: the key is in use.
    """
    if engine.key in ENGINES:
        raise ValueError(f"engine {engine.key} is registered already")
    ENGINES[engine.key] = engine


for _engine in (REFERENCE, VLLM, VLLM_CPU, SGLANG, _TRANSFORMERS, *load_all("engines")):
    register_engine(_engine)
DEFAULT_ENGINES = tuple(key for key, engine in ENGINES.items() if engine.is_default)
"""The keys of those that `check` asks where none is named."""


def list_emulated() -> list[str]:
    """List the keys of the engines that `verify` emulates."""
    return [key for key, engine in ENGINES.items() if engine.make_numerics is not None]


def list_offering(name: str) -> list[str]:
    """List the engines that offer a value of --kv-cache-dtype, the newest release of each.

    The plain rule is named where no other does.
    """
    families = [(engine, *engine.releases) for key, engine in ENGINES.items() if engine.cache_types]
    found = [next((one.key for one in all_ if name in one.cache_types), "") for all_ in families]
    return [key for key in found if key not in {"", REFERENCE.key}] or list(filter(None, found))


def list_replayed() -> list[str]:
    """List the keys of the engines whose loading `check` replays."""
    return [key for key, engine in ENGINES.items() if engine.replay_folder or engine.replay_json]


def find_emulated(name: str) -> tuple[Engine, Numerics]:
    """Give the engine that `verify --engine NAME[==VERSION]` emulates, and its arithmetic.

    Raises:
        UsageError: there is no such engine, version or emulation; the message says which.
    """
    engine = _find(name, list_emulated())
    if (numerics := engine.numerics) is None:
        hint = suggest("", list_emulated(), what="engines")
        raise UsageError(f"--engine {name}: {engine.no_numerics}", hint=hint)
    return engine, numerics


def find_replayed(name: str) -> Engine:
    """Give the engine that `check --engine NAME[==VERSION]` asks.

    Raises:
        UsageError: there is no such engine, version or replay; the message says which.
    """
    known = list_replayed()
    engine = _find(name, known)
    if engine.name not in known:
        hint = suggest("", known, what="engines")
        raise UsageError(f"--engine {name}: {engine.no_folder}", hint=hint)
    return engine


def _find(name: str, known: list[str]) -> Engine:
    key, _, named = name.partition("==")
    if key in ONLY_READ:
        text = f"only read: {_READ_ONLY.format(**ONLY_READ[key])}"
        hint = "docs/reference.md lists such engines"
    elif key not in ENGINES:
        text, hint = "unknown engine", suggest(key, known, what="engines")
    else:
        releases = (ENGINES[key], *ENGINES[key].releases)
        found = releases[0] if key == name else _find_release(releases, named.removeprefix("v"))
        if found is not None:
            return found
        versions = ", ".join(each.version for each in releases if each.version) or "none"
        text, hint = "unknown version", f"known versions of {key}: {versions}"
    raise UsageError(f"--engine {name}: {text}", hint=hint)


def _find_release(releases: tuple[Engine, ...], named: str) -> Engine | None:
    """Find the release whose rules hold for a version, noting where it is another one.

    A patch version has the rules of its minor release, and one that is newer than all those of the
    newest.
    """
    for each in releases:
        if each.version.removesuffix(".0") == named.removesuffix(".0"):
            return each
    newest = releases[0]
    wanted = parse_version(named)
    if not wanted or not newest.facts.key:
        return None
    minor = len(parse_version(newest.facts.name))
    for each in releases:
        if parse_version(each.version)[:minor] == wanted[:minor]:
            # The minor release alone, such as 0.11, is the release that was read.
            is_patch = len(wanted) > minor
            note = f"version {named} is judged by the rules of {each.version}"
            return replace(each, note=note) if is_patch else each
    if wanted > parse_version(newest.version):
        note = f"version {named} is unknown: the rules are those of {newest.version}, the newest"
        return replace(newest, note=f"{note} that is known")
    return None
