"""Run calibration text through vLLM, whose workers observe the tensors.

vLLM loads and runs the model as it would serve it, by its own kernels, over as many ranks as it is
told; no patch is needed. One sequence is one step of the engine, so that the workers know which
tokens they see: the prompt is run once, and nothing is decoded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load

from fp8calib.calibration.calibration_stats import SiteStats, join_ranges
from fp8calib.calibration.job import CalibrationJob
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.processes import RankLostError
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.stats_header import Observe
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch, cut_into
from fp8calib.errors import CalibrationError, UsageError, suggest
from fp8calib.model.geometry import Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.plugins.vllm.modules import Matched, Rank, join_observed, match_sites
from fp8calib.plugins.vllm.observer import SequenceKey, checksum

WORKER = "fp8calib.plugins.vllm.worker.FP8CalibWorker"
_GROUP_S = 3.0
"""How long vLLM runs between two looks at the statistics, about."""
_OWN = {
    "model": "it is MODEL",
    "tokenizer": "the text is tokenized before",
    "skip_tokenizer_init": "the text is tokenized before",
    "dtype": "use --dtype",
    "tensor_parallel_size": "use --tensor-parallel-size",
    "pipeline_parallel_size": "use --pipeline-parallel-size",
    "data_parallel_size": "run one engine a shard: --shard I/N; `fp8calib export` joins them",
    "trust_remote_code": "use --trust-remote-code",
    "revision": "use --revision",
    "max_model_len": "it follows from --seq-len",
    "max_num_seqs": "one sequence is one step",
    "max_num_batched_tokens": "one sequence is one step",
    "enable_chunked_prefill": "one sequence is one step",
    "enforce_eager": "compiled graphs run no hooks",
    "compilation_config": "compiled graphs run no hooks",
    "enable_prefix_caching": "cached tokens would not be seen",
    "kv_cache_dtype": "a quantized cache changes what later layers see",
    "calculate_kv_scales": "a quantized cache changes what later layers see",
    "quantization": "quantized weights change what is measured",
    "worker_extension_cls": "it is what observes",
    "language_model_only": "text alone is run",
    "limit_mm_per_prompt": "text alone is run",
}
"""Arguments of vLLM that are set here, because others would falsify the statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How vLLM runs a calibration."""

    dtype: str
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`."""
    needs_inputs: str = ""
    """What needs the inputs of all linears, such as a format; empty if nothing does."""

    def describe(self) -> str:
        """Describe vLLM's version and parallelism, as the header of the statistics has it."""
        from vllm.version import __version__  # noqa: PLC0415

        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        drafter = f", drafter {self.drafter.get('method')}" if self.drafter else ""
        return f"vllm {__version__}, tensor parallel {tp}, pipeline parallel {pp}{drafter}"

    def observe(
        self, job: CalibrationJob, todo: Sequence[Batch], journal: Journal
    ) -> tuple[dict[Site, SiteStats], Mapping[Site, str]]:
        """Run batches through vLLM and observe them; each sequence is run alone.

        Returns:
            The statistics, and the sites that vLLM does not show, with the reason.

        Raises:
            UsageError: rows have images or audio.
            CalibrationError: vLLM cannot load or run the model, ran other tokens than it was given,
                or gave NaN or infinity.
            RankLostError: vLLM died in the middle of the run.
        """
        if any(batch.media is not None for batch in todo):
            raise UsageError(
                "the data has images or audio, and vLLM runs text alone here",
                hint="use `fp8calib calibrate`, which runs transformers",
            )
        checkpoint = job.model.checkpoint
        longest = max(max(batch.lengths) for batch in todo)
        job.progress.stage("vLLM loads the model", None)
        with _engine(checkpoint.folder, self, longest) as llm:
            engine = _Run(llm, job.model.prepared, job.observe, job.header.num_sequences)
            with _open_drafter(self, checkpoint) as drafter:
                engine.start(checkpoint.stored, drafter)
            unseen = engine.matched.unseen
            if self.needs_inputs and unseen:
                site, why = next(iter(unseen.items()))
                raise CalibrationError(
                    f"{self.needs_inputs} needs the inputs of all linears, and vLLM does not show "
                    f"{site}: {why}",
                    hint="use `fp8calib calibrate`, or choose a recipe without scales of inputs",
                )
            num_tokens = sum(batch.num_tokens for batch in todo)
            job.progress.stage("calibrating in vLLM", num_tokens, unit="tokens")
            engine.run(todo, job.progress, journal)
            return engine.stats(), unseen

    @property
    def drafter(self) -> Mapping[str, Any]:
        """The drafter, which drafts one token: its layers then see every token once."""
        config = self.options.get("speculative_config")
        return {**config, "num_speculative_tokens": 1} if config else {}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse a vLLM that is not installed, and arguments that it lacks or that are set here."""
    try:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f"vLLM cannot be imported here: {error}",
            hint="install fp8calib where vLLM is: `pip install .` of the clone in its environment",
        ) from error
    known = [each.name for each in fields(EngineArgs)]
    for name, value in options.items():
        if name not in known:
            raise UsageError(
                f"--engine-option {name}: vLLM has no such argument", hint=suggest(name, known)
            )
        if name in _OWN:
            raise UsageError(f"--engine-option {name}: cannot be chosen: {_OWN[name]}")
        if name == "speculative_config" and not isinstance(value, Mapping):
            raise UsageError("--engine-option speculative_config: write {method: ..., model: ...}")
        if name == "load_format" and value == "dummy":
            raise UsageError("--engine-option load_format=dummy: random weights")


class _Run:
    """One run of sequences through an engine."""

    def __init__(
        self, llm: Any, prepared: PreparedModel, observe: Observe, num_sequences: int
    ) -> None:
        self._llm = llm
        self._num_sequences = num_sequences
        self._prepared = prepared
        self._observe = observe
        self._ranks: list[Rank] = []
        self._sequences: list[Batch] = []
        self._found: dict[Site, SiteStats] | None = {}
        """The statistics of all sequences so far; None if they have to be fetched."""
        self.matched = Matched(linears={}, attentions={}, unseen={})

    def start(self, stored: Checkpoint, drafter: Checkpoint | None) -> None:
        """Ask the ranks what they have, and let them observe the sites."""
        of_drafter = [] if drafter is None else _list_tensors(drafter)
        answers = self._call("fp8calib_describe", _list_tensors(stored), of_drafter)
        self._ranks = [Rank.model_validate_json(answer) for answer in answers]
        self.matched = match_sites(self._ranks, self._prepared, self._observe)
        if len({rank.pp for rank in self._ranks}) > 1:
            # The later stages make their buffers in an idle step, which a CPU's start leaves out.
            self._call("execute_dummy_batch")
        self._call("fp8calib_observe", self.matched.list_modules(), self._num_sequences)

    def run(self, todo: Sequence[Batch], progress: Progress, journal: Journal) -> None:
        """Run batches, each sequence alone, in groups that take about `_GROUP_S`."""
        waiting = [each for batch in todo for each in cut_into(batch, 1)]
        size = 1
        while waiting:
            group, waiting = waiting[:size], waiting[size:]
            started = time.monotonic()
            self._feed(group)
            took_s = time.monotonic() - started
            progress.advance(sum(each.num_tokens for each in group))
            size = max(1, min(4 * size, round(len(group) * _GROUP_S / max(took_s, 1e-3))))
            journal.save_if_due(self._ran, self.stats)

    def _feed(self, group: Sequence[Batch]) -> None:
        """Run sequences through vLLM, which may die or refuse one."""
        from vllm import SamplingParams  # noqa: PLC0415

        expected: list[SequenceKey] = [
            (each.first, each.lengths[0], checksum(each.input_ids[0])) for each in group
        ]
        self._found = None
        self._call("fp8calib_expect", expected)
        prompts = [{"prompt_token_ids": each.input_ids[0].tolist()} for each in group]
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        try:
            self._llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            if _is_refusal(error):
                samples = f"{group[0].first} to {group[-1].first}"
                raise CalibrationError(
                    f"vLLM refuses a row of samples {samples}: {_shorten(error)}",
                    hint="`fp8calib calibrate` runs transformers",
                ) from error
            raise _lost(error) from error
        self._sequences.extend(group)

    @property
    def _ran(self) -> tuple[tuple[int, int], ...]:
        """The sequences that were run, as half-open ranges."""
        return join_ranges([(each.first, each.first + 1) for each in self._sequences])

    def stats(self) -> dict[Site, SiteStats]:
        """Give the statistics of all sequences so far; check that every token was seen once.

        Raises:
            CalibrationError: the ranks did not see the tokens of the plan, or saw NaN or infinity.
        """
        if self._found is not None:
            return self._found
        found = [
            _read_answer(rank, answer, self._ran)
            for rank, answer in zip(self._ranks, self._call("fp8calib_collect"), strict=True)
        ]
        sites = join_observed(self.matched, self._observe, self._ranks, found)
        expected = sum(each.num_tokens for each in self._sequences)
        for site, stats in sites.items():
            # A model may call a linear several times in a pass.
            is_input = site.role is Role.INPUT and stats.count > 0
            if stats.count % expected if is_input else stats.count != expected:
                raise CalibrationError(
                    f"vLLM showed {stats.count:,} tokens at {site}, and {expected:,} were run",
                    hint="`fp8calib calibrate` runs transformers",
                )
        self._found = sites
        return sites

    def _call(self, method: str, *args: Any) -> list[Any]:
        try:
            answers: list[Any] = self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise _lost(error) from error
        return answers


def _lost(error: Exception) -> RankLostError:
    """Make the error of an engine that stopped."""
    return RankLostError(
        f"vLLM stopped: {_shorten(error)}",
        hint="vLLM's log is above; the statistics gathered so far are kept: run the same command "
        "with --resume",
    )


def _is_refusal(error: Exception) -> bool:
    """Whether vLLM did not take a prompt; 0.32 raises subclasses of its own `VLLMClientError`."""
    names = {each.__name__ for each in type(error).__mro__}
    return not names.isdisjoint({"ValueError", "VLLMClientError"})


def _list_tensors(checkpoint: Checkpoint) -> list[tuple[str, str, list[int]]]:
    entries = checkpoint.tensors.items()
    return [(name, entry.dtype, list(entry.shape)) for name, entry in entries]


@contextmanager
def _open_drafter(settings: EngineSettings, checkpoint: Checkpoint) -> Iterator[Checkpoint | None]:
    """Open the checkpoint of a drafter: a folder of its own, or that of the model (MTP)."""
    folder = settings.drafter.get("model")
    if folder is None:
        yield checkpoint.stored if settings.drafter else None
        return
    with Checkpoint.open(Path(folder)) as opened:
        yield opened


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read_answer(
    rank: Rank, answer: bytes, expected: tuple[tuple[int, int], ...]
) -> dict[Site, SiteStats]:
    """Read what a rank has observed of the expected sequences."""
    size = int.from_bytes(answer[:8], "little")
    metadata = json.loads(answer[8 : 8 + size])["__metadata__"]
    if faults := json.loads(metadata["faults"]):
        raise CalibrationError(
            f"vLLM did not run the text as it is ({rank.describe()}): {faults[0]}"
        )
    if metadata["nonfinite"]:
        raise CalibrationError(
            f"NaN or inf in {metadata['nonfinite']} of vLLM ({rank.describe()})",
            hint="look at the weights before it, or try another --dtype",
        )
    seen = [(first, stop) for first, stop in json.loads(metadata["sequences"])]
    if (ran := join_ranges(seen)) != expected:
        raise CalibrationError(
            f"vLLM ran sequences {_show(ran)} of {_show(expected)} ({rank.describe()})"
        )
    by_site = defaultdict[str, dict[str, Any]](dict)
    for key, tensor in load(answer).items():
        site, _, name = key.rpartition("/")
        by_site[site][name] = tensor
    counts = json.loads(metadata["counts"])
    return {
        Site.parse(site): SiteStats(count=counts[site], **found) for site, found in by_site.items()
    }


def _show(ranges: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{first} to {stop - 1}" for first, stop in ranges) or "none"


class _Stopped(BaseException):
    """A signal came."""


@contextmanager
def _unswallowed_signals() -> Iterator[None]:
    """Let a signal end vLLM's start.

    vLLM 0.32.0 swallows KeyboardInterrupt there (utils/network_utils.py zmq_socket_ctx), and waits
    ten minutes for its processes.
    """

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        raise _Stopped

    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, stop)
    try:
        yield
    except _Stopped:
        pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def _engine(folder: Path, settings: EngineSettings, longest: int) -> Iterator[Any]:
    """Start vLLM and stop it at the end."""
    # Its log is not for the standard output, where --json prints.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # It wants room for a token after the longest text, whose K and V the model never computes.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    from vllm import LLM  # noqa: PLC0415

    try:
        with _unswallowed_signals():
            llm = LLM(
                model=str(folder),
                dtype=settings.dtype,
                trust_remote_code=settings.trust_remote_code,
                tensor_parallel_size=settings.tensor_parallel_size,
                pipeline_parallel_size=settings.pipeline_parallel_size,
                enforce_eager=True,
                enable_prefix_caching=False,
                kv_cache_dtype="auto",
                max_num_seqs=1,
                max_model_len=longest + 1,
                max_num_batched_tokens=longest + 1,
                worker_extension_cls=WORKER,
                **{
                    "skip_tokenizer_init": True,
                    "language_model_only": True,
                    **settings.options,
                    "speculative_config": dict(settings.drafter) or None,
                },
            )
    except Exception as error:
        raise CalibrationError(
            f"vLLM cannot start with this model: {_shorten(error)}",
            hint="its own log is above; VLLM_LOGGING_LEVEL=INFO shows more",
        ) from error
    try:
        yield llm
    finally:
        sys.stdout.flush()
        llm.llm_engine.engine_core.shutdown()
