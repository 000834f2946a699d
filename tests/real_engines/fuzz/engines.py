"""Load one checkpoint in vLLM or transformers, and observe what it holds."""

import json
import os
import re
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp8calib.checkpoint.model_config import list_classes
from fp8calib.engines.facts.release import SGLANG_RELEASES
from fp8calib.model.module_paths import split_expert
from tests.kit.multimodal import WIDE
from tests.real_engines.fuzz.compare import (
    HeldPair,
    Observation,
    dequantize,
    describe_difference,
    is_scale,
)
from tests.real_engines.fuzz.draw import DAMAGES, Case
from tests.real_engines.fuzz.forms import open_geometry
from tests.real_engines.package import open_package
from tests.real_engines.sglang_models import SglangModels
from tests.real_engines.sglang_survey import MODELS, STRIPPED
from tests.real_engines.vllm_job import ForkServer

_TIMEOUT_S = 120
_POOLING = "vLLM runs it to embed text"
_TOKENS = torch.arange(5, 13)[None]
_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
Tensors = dict[str, torch.Tensor]


def find_index(module: str) -> int | None:
    """Give the first number in a module's path."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def list_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """List the tensors of all weights files; links to nothing, and folders, are none."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            yield from load_file(path).items()
    for path in folder.glob("pytorch_model*.bin"):
        yield from torch.load(path).items()


class VllmObserver:
    """Observes vLLM on a CPU, to the end of `process_weights_after_loading`."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._load = server.load
        self._folder = folder
        self._count = 0
        self._meant: dict[Path, Tensors | str] = {}
        self._last: tuple[Path, Observation] | None = None

    def __call__(self, _: Case, model: Path, original: Path) -> Observation:
        """Load a checkpoint, once; `original` is the model before it was quantized."""
        if self._last is None or self._last[0] != model:
            self._last = model, self._observe(model, original)
        return self._last[1]

    def _observe(self, model: Path, original: Path) -> Observation:
        if original not in self._meant:
            self._meant[original] = self._ask(original)
        meant, held = self._meant[original], self._ask(model)
        if isinstance(held, str):
            return Observation(error=held)
        fault = _find_fault(held, meant) or _find_input_fault(held, model)
        fault = fault or _find_cast_fault(held, model)
        fault = _POOLING if "pooling" in held else fault
        return Observation(layers=list_layers(held), weights_fault=fault)

    def _ask(self, model: Path) -> Tensors | str:
        self._count += 1
        result = self._folder / f"vllm-{self._count}.safetensors"
        answer = self._load(model, result, dtype="auto")
        result.unlink(missing_ok=True)
        return answer


def list_layers(held: Tensors) -> dict[int, HeldPair]:
    layers = {}
    for name in held:
        index = find_index(name)
        if name.startswith("held.") and name.endswith(".k") and index is not None:
            stem = name.removesuffix(".k")
            k, v = (tuple(held[f"{stem}.{role}"].tolist()) for role in "kv")
            layers[index] = HeldPair(k=k, v=v, is_fp8=bool(held[f"{stem}.is_fp8"]))
    return layers


def _find_fault(held: Tensors, meant: Tensors | str) -> str:
    if isinstance(meant, str):
        return ""
    loaded, ready, wanted = (
        {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
        for kind, tensors in (("loaded.", held), ("ready.", held), ("loaded.", meant))
    )
    prepared = dequantize(ready, is_transposed=True)  # as vLLM's kernels want it
    computed = {
        name: prepared.get(name, tensor) if tensor.element_size() == 1 else tensor
        for name, tensor in loaded.items()
    }
    return describe_difference(computed, wanted)


def _find_input_fault(held: Tensors, model: Path) -> str:
    """Find a scale of inputs that is no scale, or is not one of the file's."""
    stored = {
        value
        for name, tensor in list_tensors(model)
        if name.endswith("input_scale")
        for value in tensor.float().flatten().tolist()
    }
    for name, tensor in held.items():
        if name.startswith("loaded.") and name.endswith("input_scale"):
            used = tensor.float().max().item()  # vLLM takes the largest of what it joins
            if not is_scale(used) or used not in stored:
                return f"{name.removeprefix('loaded.')} is {used:g}"
    return ""


def _find_cast_fault(held: Tensors, model: Path) -> str:
    """Find an expert that the file stores in 16 bits, and the engine casts to FP8 with scale 1.0.

    Small weights lose little more by it than by their own scale.
    """
    quantized = {
        find_index(name)
        for name, tensor in held.items()
        if name.startswith("loaded.")
        and name.endswith(("w13_weight", "w2_weight"))
        and tensor.element_size() == 1
    }
    for name, tensor in list_tensors(model):
        module, _, leaf = name.rpartition(".")
        is_plain = leaf == "weight" and tensor.element_size() > 1
        if is_plain and split_expert(module) is not None and find_index(name) in quantized:
            return f"{name} is held in FP8"
    return ""


class TransformersObserver:
    """Observes transformers, to the end of a first forward pass, in a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        get_checkpoint_conversion_mapping("llama")  # makes all of them, which forks need not

    def __call__(self, _: Case, model: Path, original: Path) -> Observation:
        """Load a checkpoint; `original` is the model before it was quantized."""
        self._count += 1
        result = self._folder / f"transformers-{self._count}.safetensors"
        answer = _run_in_fork(lambda: _load_in_transformers(model, original), result)
        if isinstance(answer, str):
            return Observation(error=answer)
        fault = bytes(answer.pop("fault").tolist()).decode()
        layers = _fill_shared(list_layers(answer), original)
        return Observation(layers=layers, weights_fault=fault)


def _fill_shared(layers: dict[int, HeldPair], folder: Path) -> dict[int, HeldPair]:
    """Let layers that read another layer's cache have that layer's scales."""
    for layer, attention in open_geometry(folder).attentions():
        if attention.producer in layers:
            layers[layer.index] = layers[attention.producer]
    return layers


def _run_in_fork(run: Callable[[], Tensors], result: Path) -> Tensors | str:
    """Give what `run` returns in a fork, or its error."""
    refused = result.with_suffix(".refused")
    refused.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        signal.alarm(_TIMEOUT_S)
        with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            try:
                save_file(run(), result)
            except BaseException as error:  # noqa: BLE001 -- the engine's answer
                refused.write_text(_describe(error))
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return f"the process ended with status {status}"
    return refused.read_text() if refused.exists() else load_file(result)


def _describe(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(Path(frame.filename).parts[-3:])
    return f"{type(error).__name__}: {error}\n{place}:{frame.lineno}"


def _load_in_transformers(model: Path, original: Path) -> Tensors:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    meant = _find_class(original).from_pretrained(original, dtype="auto")
    runs = _can_run(meant)
    loaded = _find_class(model).from_pretrained(model, dtype="auto")
    if runs:
        loaded(_TOKENS)  # which decompresses FP8 weights
    held: Tensors = {}
    for name, module in loaded.named_modules():
        if hasattr(module, "k_scale") and hasattr(module, "v_scale"):
            held[f"held.{name}.k"] = _read_scale(module, "k")
            held[f"held.{name}.v"] = _read_scale(module, "v")
            held[f"held.{name}.is_fp8"] = torch.tensor(True)
    computed = dequantize(_list_parameters(loaded))
    fault = describe_difference(_stack_experts(computed), _list_parameters(meant))
    fault = fault or _find_bad_input(loaded)
    held["fault"] = torch.tensor(list(fault.encode()), dtype=torch.uint8)
    return {name: tensor.clone().contiguous() for name, tensor in held.items()}


def _find_class(folder: Path) -> Any:
    """Choose the class of text, or where a model has none the class that its config names."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in {*WIDE} - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        return AutoModelForCausalLM
    return getattr(transformers, next(iter(list_classes(config)), ""), AutoModelForCausalLM)


def _read_scale(module: torch.nn.Module, role: str) -> torch.Tensor:
    """Read a scale; NaN where the zero point beside it holds memory that nothing set."""
    scale = getattr(module, f"{role}_scale").detach().float().reshape(-1)
    zero = getattr(module, f"{role}_zero_point", None)
    is_set = zero is None or bool(zero.detach().float().isfinite().all())
    return scale if is_set else scale * torch.nan


def _list_parameters(model: torch.nn.Module) -> Tensors:
    """List parameters with all of their names; an output layer may share the embedding's."""
    return dict(model.named_parameters(remove_duplicate=False))


def _find_bad_input(model: torch.nn.Module) -> str:
    """Find a scale of inputs that is no scale."""
    for name, tensor in model.named_parameters():
        if name.endswith("input_scale") and not all(map(is_scale, tensor.flatten().tolist())):
            return f"{name} is {tensor.flatten()[0]:g}"
    return ""


def _stack_experts(tensors: Tensors) -> Tensors:
    """Join experts that transformers has taken out of a stack, as it does with llama4's."""
    parts = defaultdict(list)
    for name in list(tensors):
        if found := _EXPERT.fullmatch(name):
            parts[found[1], found[3]].append(tensors.pop(name))
    stacks = {key: torch.stack(held) for key, held in parts.items()}
    for path in {path for path, _ in stacks}:
        halves = [stacks[path, part] for part in ("gate_proj", "up_proj")]
        tensors[f"{path}.gate_up_proj"] = torch.cat(halves, 1)
        tensors[f"{path}.down_proj"] = stacks[path, "down_proj"]
    return tensors


def _can_run(model: torch.nn.Module) -> bool:
    """Whether a forward pass of the unquantized model works on a CPU."""
    try:
        model(_TOKENS)
    except Exception:  # noqa: BLE001 -- then nothing is learned from one of the other
        return False
    return True


_FORMS = (
    *("kv-overlay", "ct-kv_scale", "ct-modelopt-names", "ct-cache-names", "ct-inner-names"),
    *("fp8", "fp8-kv_scale", "fp8-quark-names", "modelopt", "modelopt-pair", "quark"),
)
"""Those whose config gives attention layers SGLang's KV cache method, and says nothing else."""


@cache
def open_sglang() -> SglangModels:
    """Read all that the newest release is asked for, so that forks need not."""
    models = SglangModels(open_package(f"sglang=={SGLANG_RELEASES[-1].version}"))
    for architecture in MODELS.values():
        models.gives_scales_a_place(architecture)
    models.hold_kv_scales(None, None)
    return models


def observe_sglang(case: Case, model: Path, original: Path) -> Observation | None:
    """Load the scales of a checkpoint.

    None where that takes more than the loader: for other classes and paths of attention, for FP8
    weights, and for whatever the config decides.
    """
    is_loader = all(DAMAGES[each].is_of_scales for each in case.damages) and case.form in _FORMS
    if not (is_loader and case.architecture in MODELS):
        return None
    paths = {
        layer.index: pair.checkpoint_module for layer, pair in open_geometry(model).attentions()
    }
    if any(path != f"model.layers.{index}.self_attn" for index, path in paths.items()):
        return None
    models = open_sglang()
    has_places = models.gives_scales_a_place(MODELS[case.architecture])
    weights = _read(original)
    scales = {name: tensor for name, tensor in _read(model).items() if name not in weights}
    places = _name_parameters(paths, is_stripped=case.architecture in STRIPPED)
    try:
        names = [name for pair in places.values() for name in pair if has_places]
        loaded = models.load(MODELS[case.architecture], scales, names)
        if None in loaded.values():
            return None
        layers = {
            index: models.hold_kv_scales(*(loaded.get(name) for name in pair))
            for index, pair in places.items()
        }
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        return Observation(error=f"{type(error).__name__}: {error}")
    return Observation(layers={i: HeldPair(k=(k,), v=(v,)) for i, (k, v) in layers.items()})


def _read(folder: Path) -> Tensors:
    return dict(list_tensors(folder))


def _name_parameters(paths: Mapping[int, str], *, is_stripped: bool) -> dict[int, tuple[str, str]]:
    """Name the parameters of k and v in each layer, where some models leave self_attn out."""
    inner = {i: path.rpartition(".")[0] if is_stripped else path for i, path in paths.items()}
    return {i: (f"{path}.attn.k_scale", f"{path}.attn.v_scale") for i, path in inner.items()}
