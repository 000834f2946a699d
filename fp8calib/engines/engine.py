"""An inference engine as one record: how it is started, what it computes, what it loads.

The records are data and import nothing heavy, because `--help` lists them; replays are imported
when they are called (`call`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.engines.facts.gpus import GENERATIONS, HEAD_SIZES, Gpu, join_generations
from fp8calib.engines.status import Evidence
from fp8calib.numerics.schemes import SCHEMES, InputScaling, Scheme

if TYPE_CHECKING:
    from fp8calib.engines.arithmetic import Numerics
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.engines.weights.reader import LinearReader
    from fp8calib.engines.weights.rules import NameRules, WeightRule
    from fp8calib.model.geometry import ModelGeometry


def call(function: str, *arguments: object) -> Any:
    """Call the function `MODULE:NAME`, whose module is imported only now."""
    module, _, name = function.partition(":")
    return attrgetter(name)(import_module(module))(*arguments)


SCALE_FACTOR = "global scales of an NVFP4 cache are multiplied by"
"""A fact of releases, such as `6 on sm_100, sm_103`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command line that starts a server."""

    command: str
    """Everything before the model."""
    kv_flag: str
    """Turns the FP8 KV cache on."""
    ranks_flag: str
    """Sets the tensor-parallel degree; a number follows."""
    trust_flag: str = "--trust-remote-code"
    """Lets it run the Python code of a checkpoint."""

    def spell(
        self,
        model: str,
        *,
        has_kv: bool = True,
        tp: int = 1,
        revision: str | None = None,
        trusts_code: bool = False,
    ) -> str:
        """Give the whole command line that serves a model on `tp` ranks, quoted for a shell.

        `trusts_code`: the code of the checkpoint is run.
        """
        parts = [self.command, shlex.quote(model)]
        parts += ["--revision", shlex.quote(revision)] if revision is not None else []
        parts += [self.kv_flag] if has_kv else []
        parts += [self.ranks_flag, str(tp)] if tp > 1 else []
        parts += [self.trust_flag] * trusts_code
        return " ".join(parts)


Storage = Mapping[tuple[str, str], Sequence[tuple[int, str, Collection[int]]]]
"""What stores a type of the KV cache on a generation of GPUs: the backend's place among those that
the engine tries, its name, and the sizes of heads that it refuses."""


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
    minor_parts: int = 0
    """How many parts of a version make a minor release, whose rules hold for all its patches; 0
    where only the versions in `releases` are known."""
    note: str = ""
    """What to know of the rules: that another version was asked for, or what was not read."""
    is_default: bool = False
    """`check` asks it where no --engine is given."""
    loader: str = ""
    """The name by which facts and rules call its loading of weights; empty if they have none."""
    launch: Launch | None = None
    """None where no command of its own starts a server."""
    numerics: Numerics | None = None
    """What `verify` emulates."""
    cache_types: Sequence[str] = ()
    """The values of its --kv-cache-dtype that quantize; empty if they are not known."""
    storage: Storage = field(default_factory=dict)
    """What stores them on which GPU; empty if that is not known."""
    scale_factor: float = 1.0
    """By what it multiplies the global scales of an NVFP4 cache on B200; elsewhere it does not."""
    multiplied: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The generations of GPUs whose linears multiply quantized inputs, by `fp8` and `mxfp8`."""
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
    explain_type: Callable[[object], str] = field(default=lambda _: "")
    """Says why it does not know a model_type; empty if it does, or if that is not known."""
    splits_heads: bool = False
    """It distributes heads over ranks, and does not start where they do not divide."""
    weight_rules: tuple[WeightRule, ...] = ()
    repeats_expert_scales: bool = False
    """It repeats the scales of experts in blocks of quant_method fp8 for smaller blocks."""
    name_rules: NameRules | None = None
    """Which names of tensors it takes beside those of the model's class."""

    def list_backends(
        self, cache_type: str, gpu: Gpu | None, head_sizes: Collection[int] = ()
    ) -> tuple[str, ...]:
        """List backends that store a type of the KV cache, in the engine's order of preference.

        Without a GPU those of any; `head_sizes` are the model's.
        """
        places = GENERATIONS if gpu is None else (gpu.generation,)
        known = [each for place in places for each in self.storage.get((cache_type, place), ())]
        if not set(head_sizes).issubset(HEAD_SIZES):
            known = []
        fitting = [each for each in known if not set(each[2]).intersection(head_sizes)]
        return tuple(dict.fromkeys(name for _, name, _ in sorted(fitting, key=itemgetter(0))))

    def list_generations(
        self, cache_type: str, head_sizes: Collection[int] = ()
    ) -> tuple[str, ...]:
        """List the generations of GPUs with such a backend, oldest first."""
        gpus = (Gpu(name="", generation=each) for each in GENERATIONS)
        return tuple(
            gpu.generation for gpu in gpus if self.list_backends(cache_type, gpu, head_sizes)
        )

    def explain_unserved(self, cache_type: str, gpu: Gpu, head_sizes: Collection[int] = ()) -> str:
        """Say why a GPU does not serve a type of the KV cache; empty if it does."""
        if self.list_backends(cache_type, gpu, head_sizes):
            return ""
        sizes = " or ".join(map(str, sorted(head_sizes)))
        heads = f" for heads of {sizes}" if self.list_backends(cache_type, gpu) else ""
        others = join_generations(self.list_generations(cache_type, head_sizes))
        where = f", but on {others}" if others else ""
        return f"{self.release} is not known to store it{heads} on {gpu.title}{where}"

    def list_unmultiplied(self, gpu: Gpu) -> frozenset[str]:
        """List which of `fp8` and `mxfp8` a GPU cannot multiply: inputs then stay in 16 bits."""
        return frozenset(
            kind for kind, places in self.multiplied.items() if gpu.generation not in places
        )

    def explain_unmultiplied(self, scheme: Scheme, gpu: Gpu) -> str:
        """Explain why this GPU keeps the scheme's inputs in 16 bits; empty if it does not."""
        kind = "mxfp8" if scheme.is_mx else "fp8"
        if scheme.inputs is InputScaling.NONE or kind not in self.list_unmultiplied(gpu):
            return ""
        return f"{self.release} leaves inputs in 16 bits on {gpu.title}, which has no {kind}"

    def list_multiplied(self, gpu: Gpu) -> list[str]:
        """Name the schemes whose inputs a GPU multiplies in FP8."""
        return [
            name
            for name, scheme in SCHEMES.items()
            if scheme.inputs is not InputScaling.NONE and not self.explain_unmultiplied(scheme, gpu)
        ]

    @property
    def runs_loader(self) -> bool:
        """Whether `replay_folder` runs its own loader, and reports on the weights too."""
        return self.make_reader is None and not self.weight_rules

    @property
    def can_skip_caches(self) -> bool:
        """Whether an option leaves the KV cache of some layers unquantized."""
        return self.numerics is not None and bool(self.numerics.kv_skip_flag)

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
