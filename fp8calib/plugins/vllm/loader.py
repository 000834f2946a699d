"""Ask vLLM's own loader about a folder, in an environment that has vLLM.

Where the loader and the replay differ, the loader counts, and the report says so.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from fp8calib.checkpoint.hub import find_folder
from fp8calib.checkpoint.locations import may_be_on_hub
from fp8calib.engines.registry import find_replayed
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    is_scale,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.errors import UsageError, cut_list
from fp8calib.model.geometry import Frozen

_SCRIPT = Path(__file__).with_name("loader_script.py")
_OWN_FRAME = ":__torch_function__"
"""The mode of the script, through which every call of torch goes."""
_TIMEOUT_S = 300
_VERSION_TIMEOUT_S = 60
"""It reads metadata of packages alone, which may lie on a slow disk."""
_LOST = "lost"
_MOST_FILES = 3
_PLACES_OF_THE_BUILD = re.compile(
    r"vllm/(model_executor/(kernels|layers/fused_moe/oracle)|platforms|v1/attention|_custom_ops)\b"
    r"|torch/(_ops\.py|cuda/)|\w*(triton|cutlass|flashinfer|deep_gemm|marlin|aiter|rocm)\w*\.py"
)
"""Where vLLM chooses or calls what depends on the device: another build may not stop there."""
_TEXTS_OF_THE_BUILD = re.compile(
    r"ModuleNotFoundError|ImportError|failed to be inspected|eta tensor"
    r"|(?<!modeling )\bbackends?\b|\bkernels?\b(?! size)|DeepGEMM|Flash(Infer|MLA|KDA|.?Attention)"
    r"|\b(CPU|CUDA|ROCm|XPU|TPU|GPUs?|Triton|CUTLASS|Marlin|AITER)\b|\b(SM ?|gfx)\d{2}"
    r"|capability|platform|supported on\b|\bdevices?\b",
    re.IGNORECASE,
)
"""Errors for lack of a package (`inspected`: vLLM imports a model's class), of the values of
weights, which are on the meta device, or of what chooses and runs kernels on a device."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\S*/\S*|\[type=.*", re.DOTALL)
"""What an error cites: names of tensors, paths, and (pydantic) the arguments of vLLM's config."""
_CODE_OF_ITS_OWN = "contains custom code"
EXPERTS = (".w13_weight", ".w2_weight")
"""How the names of the weights of all experts of a layer end."""
_FIX = "the reason is vLLM's own error: write the checkpoint or its config again"
_PRINT_VERSION = (
    "from importlib import metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
)
_ENVIRONMENT_HINT = "name a Python with vLLM: --python PATH"
_UNSCALED = LoadVerdict(
    status=Status.DEFAULTED, value=1.0, why="vLLM's own loader has no scale for this layer"
)
_IMPORT_HINT = "it cannot import vLLM: repair its packages, or name another with --python PATH"


class LoaderAnswer(Frozen):
    """What vLLM's loader did with a folder."""

    version: str = ""
    stage: str
    """Where it stopped: import, config, model, weights or scales. `done` if it loaded; `lost` if
    the process died or did not end, which says nothing about the checkpoint."""
    error: str
    trace: tuple[str, ...] = ()
    """The files and functions through which the error came, as `FILE:FUNCTION`; the last is the
    innermost of the packages."""
    runner: str = ""
    """What vLLM runs the model for: `generate`, or `pooling`, which has no output layer."""
    missing: tuple[str, ...] = ()
    """Weights, biases and scales that no tensor filled."""
    files: tuple[str, ...] = ()
    """The files that vLLM opened."""
    casts: tuple[str, ...] = ()
    """Dtypes of stored integers, and of the floats that they became."""
    scales: tuple[Mapping[str, Mapping[str, tuple[float, ...]]], ...] = ()
    """By rank and attention module: the numbers that K and V are multiplied by."""
    tp: int = 1
    """The number of ranks."""
    rank: int = 0
    """The last rank that was loaded: the one with the error, where there is one."""

    @property
    def is_of_the_build(self) -> bool:
        """Whether the error may come from vLLM's build for CPU, and not from the file."""
        place = self.trace[-1] if self.trace else ""
        is_there = bool(_PLACES_OF_THE_BUILD.search(place))
        return is_there or bool(_TEXTS_OF_THE_BUILD.search(_QUOTED.sub("", self.error)))

    def describe_stop(self, build: str = "") -> str:
        """Say where it stopped, and with which error."""
        rank = "" if self.tp == 1 else f" on rank {self.rank} of {self.tp}"
        return (
            f"vLLM {self.version}{build} stops at the {self.stage}{rank}: {self.error.rstrip('.')}"
        )


def fetch_checkpoint(path: str | Path) -> Path:
    """Give the folder of a checkpoint, after downloading that of a Hub id."""
    folder = find_folder(str(path)) if may_be_on_hub(Path(path)) else Path(path)
    if folder.is_file():
        raise UsageError(f"{path} is no checkpoint folder", hint="name the folder")
    return folder


def find_release(python: Path) -> str:
    """Name the vLLM of an environment as `--engine` takes it, the newest if it is unknown."""
    command = [str(python), "-I", "-c", _PRINT_VERSION]
    try:
        done = subprocess.run(  # noqa: S603 -- the interpreter that the user names
            command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise UsageError(f"{python}: {error}", hint=_ENVIRONMENT_HINT) from error
    except subprocess.TimeoutExpired as error:
        why = f"{python} did not name its vLLM within {_VERSION_TIMEOUT_S} s"
        raise UsageError(why, hint=_ENVIRONMENT_HINT) from error
    found = re.match(r"\d+\.\d+[\w.]*", done.stdout)
    name = f"vllm=={found[0]}" if found else "vllm"
    with suppress(UsageError):  # a version whose rules are not known
        find_replayed(name)
        return name
    return "vllm"


def ask_loader(
    path: Path, python: Path, *, has_kv: bool, tp: int, trusts_code: bool
) -> LoaderAnswer:
    """Load a folder with the vLLM of an environment, for each of `tp` ranks.

    `has_kv` says whether the KV cache is FP8, `trusts_code` whether the checkpoint's code may run.
    """
    arguments = [str(path.resolve()), "fp8" if has_kv else "auto", str(tp)]
    arguments += ["--trust-remote-code"] * trusts_code
    command = [str(python), "-I", str(_SCRIPT), *arguments]
    try:
        done = subprocess.run(  # noqa: S603 -- the interpreter that the user names
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise UsageError(f"{python}: {error}", hint=_ENVIRONMENT_HINT) from error
    except subprocess.TimeoutExpired:
        return LoaderAnswer(stage=_LOST, error=f"did not end within {_TIMEOUT_S} s")
    answer = parse_answer(done.stdout, tp)
    if answer is None:
        tail = " ".join(done.stderr.split())[-400:]
        why = f"ended with {done.returncode}, without an answer: {tail}"
        return LoaderAnswer(stage=_LOST, error=why)
    if answer.stage == "import":
        raise UsageError(f"{python}: {answer.error}", hint=_IMPORT_HINT)
    return answer


def parse_answer(printed: str, tp: int) -> LoaderAnswer | None:
    """Read what the script printed for a number of ranks; None if it printed no answer."""
    lines = [line for line in printed.splitlines() if line.startswith('{"stage"')]
    if not lines:
        return None
    answer = json.loads(lines[-1])
    answer["trace"] = [each for each in answer["trace"] if _OWN_FRAME not in each]
    return LoaderAnswer(**answer, tp=tp)


def amend_by_loader(report: EngineReport, answer: LoaderAnswer) -> EngineReport:
    """Replace what the replay says by what the loader did."""
    if answer.stage == _LOST:
        return report.add(
            unknown=[f"vLLM's loader {answer.error}. The report is that of the replay"]
        )
    if _CODE_OF_ITS_OWN in answer.error:
        why = "vLLM runs the Python code of the checkpoint only with --trust-remote-code"
        return report.add(unknown=[f"{why}. The report is that of the replay"])
    if answer.error and answer.is_of_the_build:
        why = answer.describe_stop(" for CPU")
        return report.add(
            unknown=[f"{why}. Another build may load it: the report is that of the replay"]
        )
    if answer.error:
        return _report_error(report, answer)
    amended = report.model_copy(update={"unknown": (), "if_loaded": None})
    silent = _find_silent_fault(answer, doubts=report.unknown) or report.if_loaded
    if report.weights is not None and report.weights.status is Status.REFUSED:
        defect = (
            f"the replay expected a refusal ({report.weights.why}), but vLLM {answer.version} "
            "loads it: a defect of the replay"
        )
        amended = amended.model_copy(update={"weights": silent}).add(problems=[defect])
        if silent is None:
            amended = amended.add(unknown=["what its weights and their scales hold is not judged"])
    elif report.weights is None and silent is not None:
        amended = amended.model_copy(update={"weights": silent})
    held: dict[tuple[int, str], list[tuple[float, ...]]] = defaultdict(list)
    for scales in answer.scales:
        by_layer: dict[int, Mapping[str, tuple[float, ...]]] = {}
        for module, own in scales.items():
            for layer in list_indices(module):
                by_layer.setdefault(layer, own)
        for layer, own in by_layer.items():
            for role, numbers in own.items():
                held[layer, role].append(numbers)
    amended = amended.put(
        {slot: _amend(verdict, held.get(slot, ())) for slot, verdict in report.slots.items()}
    )
    files = cut_list(answer.files, _MOST_FILES) or "no safetensors file"
    loaded = f"vLLM {answer.version} loaded it, from {files}"
    return amended.add(problems=[loaded, *_list_differences(report.layers, amended.layers)])


def _find_silent_fault(answer: LoaderAnswer, doubts: Sequence[str]) -> LoadVerdict | None:
    """Find what is wrong with a model that vLLM loaded without an error.

    The loader of granitemoehybrid fills FP8 experts, but does not report it (0.32.0, run): of
    experts it is believed only where the replay has doubts.
    """
    missing = [each for each in answer.missing if doubts or not each.endswith(EXPERTS)]
    if answer.runner != "generate":
        why = f"vLLM takes it for a model of kind {answer.runner}, which generates no text"
        fix = "name the model's class under architectures in config.json"
    elif missing:
        why = f"vLLM fills {len(missing)} weights with nothing, such as {missing[0]}"
        fix = "complete the checkpoint"
    elif answer.casts:
        why = f"vLLM takes stored integers for floats ({answer.casts[0]})"
        fix = "name the method that stores such scales as quant_method in config.json"
    else:
        return None
    return LoadVerdict(status=Status.MISREAD, why=why, fix=fix)


def _report_error(report: EngineReport, answer: LoaderAnswer) -> EngineReport:
    verdict = LoadVerdict(status=Status.REFUSED, why=answer.describe_stop(), fix=_FIX)
    was_expected = report.load_fault or report.unknown
    defect = "the replay expected vLLM to load it: a defect of the replay"
    notes = () if was_expected else (defect,)
    refused = report.give_names(EngineReport(layers=report.layers, weights=verdict))
    return refused.put(dict.fromkeys(report.slots, verdict)).add(problems=notes)


def list_indices(module: str) -> list[int]:
    """List the numbers in a module's path; the first is that of its layer."""
    return [int(part) for part in module.split(".") if part.isdigit()][:1]


def _amend(verdict: LoadVerdict, held: Sequence[tuple[float, ...]]) -> LoadVerdict:
    """Judge the numbers that the ranks hold: one each, or one for each of their heads."""
    if not held:
        return _UNSCALED if verdict.status is Status.UNKNOWN else verdict
    # one that is not a scale, else the largest (as the replay)
    numbers = [(rank, number) for rank, own in enumerate(held) for number in own]
    odd = (each for each in numbers if not is_scale(each[1]))
    rank, number = next(odd, max(numbers, key=itemgetter(1)))
    is_agreed = verdict.status not in (Status.REFUSED, Status.UNKNOWN) and (
        verdict.value is None or math.isclose(verdict.value, number, rel_tol=1e-3)
    )
    if is_agreed:
        return verdict
    loader = "vLLM's own loader" + ("" if len(held) == 1 else f" on rank {rank} of {len(held)}")
    if number == 1.0:
        why = f"{loader} leaves the scale at 1.0"
        return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=verdict.fix)
    return judge_number(number, f"{loader} holds it")


def _list_differences(
    replayed: tuple[LayerVerdict, ...], loaded: tuple[LayerVerdict, ...]
) -> Iterator[str]:
    for before, after in zip(replayed, loaded, strict=True):
        if before != after and before.k.status is not Status.UNKNOWN:
            yield (
                f"the replay expected {before.k.status} and {before.v.status} for k and v of layer "
                f"{before.layer}, the loader has {after.k.status} and {after.v.status}: a defect "
                "of the replay"
            )
            return
