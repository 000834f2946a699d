"""An inference engine as one record: how it is started, what it computes, what it loads.

The records are data and import nothing heavy, because `--help` lists them; replays are imported
when they are called (`call`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.engines.facts.release import NO_FACTS, Release
from fp8calib.engines.status import Evidence

if TYPE_CHECKING:
    from fp8calib.engines.arithmetic import Numerics
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.engines.weights.rules import WeightRule
    from fp8calib.model.geometry import ModelGeometry


def call(function: str, *arguments: object) -> Any:
    """Call the function `MODULE:NAME`, whose module is imported only now."""
    module, _, name = function.partition(":")
    return attrgetter(name)(import_module(module))(*arguments)


SCALE_FACTOR = "global scales of an NVFP4 cache are multiplied by"
"""A fact of releases, such as `6 on sm_100, sm_103`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything this tool knows about one inference engine."""

    key: str
    """Its name on the command line; NAME==VERSION for one of `releases`."""
    title: str
    """Its name in texts."""
    version: str
    """The release or commit for which the record is true."""
    evidence: Evidence = "read"
    """How its loading rules are known."""
    releases: tuple[Engine, ...] = ()
    """Its other releases whose rules are known, the newest first."""
    note: str = ""
    """What to know of the rules: that another version was asked for, or what was not read."""
    is_default: bool = False
    """`check` asks it where no --engine is given."""
    facts: Release = NO_FACTS
    """What is true of this release."""
    command: str = ""
    """Starts a server: everything before the model; empty where it has no command of its own."""
    kv_flag: str = ""
    """Turns the FP8 KV cache on."""
    skip_flag: str = ""
    """Leaves the KV cache of some layers unquantized: their indices follow; empty if none does."""
    trust_flag: str = "--trust-remote-code"
    """Lets it run the Python code of a checkpoint."""
    is_on_cpu: bool = False
    """What its facts say of GPUs is not true of it."""
    make_numerics: Callable[[], Numerics] | None = None
    """Gives what `verify` emulates."""
    cache_types: Sequence[str] = ()
    """The values of its --kv-cache-dtype that quantize; empty if they are not known."""
    scale_factor: float = 1.0
    """By what it multiplies the global scales of an NVFP4 cache on B200; elsewhere it does not."""
    no_numerics: str = ""
    """Why `verify` cannot emulate it."""
    replay_folder: Callable[[ScaleFolder, ModelGeometry, int], EngineReport] | None = None
    """Replays the loading of a folder on a number of ranks; raises `Refusal` at a failure."""
    view: Callable[[ScaleFolder], ScaleFolder] | None = None
    """Gives a folder as it opens it, or raises `Refusal`; None if it opens what the index names,
    or all files, in the order of their names."""
    no_folder: str = ""
    """Why no replay says what it does with a checkpoint folder."""
    replay_json: Callable[[Path, ModelGeometry, int, ScaleFolder], EngineReport] | None = None
    """Replays the loading of a JSON file of scales; likewise."""
    no_json: str = ""
    """Why it uses no JSON file of scales, where that needs more words than "it reads none"."""
    make_reader: Callable[[ScaleFolder, ModelGeometry], LinearReader] | None = None
    """How it reads the quantization config, which raises `Refusal` where the engine refuses that;
    None for one whose own loader is run: `replay_folder` reports on the weights too."""
    weight_rules: tuple[WeightRule, ...] = ()
    """Rules beside those of `facts`, as of a plug-in."""

    def spell_launch(
        self,
        model: str,
        *,
        has_kv: bool = True,
        revision: str | None = None,
        trusts_code: bool = False,
        plain_caches: Collection[int] = (),
    ) -> str:
        """Give the command line that serves a model, quoted for a shell; empty if there is none.

        `trusts_code`: the code of the checkpoint is run; `plain_caches` are the layers whose KV
        cache stays unquantized.
        """
        if not self.command:
            return ""
        parts = [self.command, shlex.quote(model)]
        parts += ["--revision", shlex.quote(revision)] if revision is not None else []
        parts += [self.kv_flag] if has_kv else []
        parts += [self.trust_flag] * trusts_code
        parts += [self.spell_skip(plain_caches)] if plain_caches else []
        return " ".join(parts)

    def spell_skip(self, layers: Collection[int]) -> str:
        """Spell the option that leaves the KV cache of layers unquantized; empty without layers."""
        return " ".join([self.skip_flag, *map(str, layers)]) if layers else ""

    @property
    def numerics(self) -> Numerics | None:
        """What `verify` emulates; None for nothing."""
        return self.make_numerics and self.make_numerics()

    @property
    def name(self) -> str:
        """Its name on the command line without the version."""
        return self.key.partition("==")[0]

    def spell_run_hint(self, config: Mapping[str, object]) -> str:
        """Spell the end of a sentence on what only its own loader can tell of a model."""
        trust = " --trust-remote-code" * ("auto_map" in config)
        hint = f"; `fp8calib vllm check{trust}` asks its loader" if self.name == "vllm" else ""
        return f": only the engine's own loader can tell{hint}"

    @property
    def release(self) -> str:
        """Its title and version."""
        return f"{self.title} {self.version}".strip()
