"""Select the linears of a checkpoint to quantize, from config.json and headers alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, INTEGERS, PACKED_BITS, TensorEntry
from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.errors import ModelError, UsageError
from fp8calib.formats.fp8.dialect import HEAD, UnquantizedMatrix
from fp8calib.formats.fp8.weights import is_companion
from fp8calib.model.drafters import count_layers, find_promise, is_drafted, number_layer
from fp8calib.model.expert_layouts import (
    EITHER,
    IN_OUT,
    OUT_IN,
    UNSERVED_STACKS,
    KnownStacks,
    cut_name,
    find_layout,
    list_configs,
)
from fp8calib.model.module_paths import split_expert
from fp8calib.quantization.ignored import (
    TOWER,
    Reason,
    find_default,
    match_patterns,
    span_layers,
    spell_options,
)
from fp8calib.quantization.matrices import SUFFIX, Matrix

_CONV1D_TYPES = frozenset(
    {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"}
)
"""Model types whose linears are transformers' Conv1D, [in, out] on disk."""
_STACK_AXES = 3
_SMALLEST_MATRIX = 16
"""A tensor with a shorter side in its last two axes is a convolution kernel."""
_EXPERTS = re.compile(r"(.+\.experts)\..+")
_HEADS: Mapping[str, str] = {
    "biogpt": "output_projection",
    "gpt_neox_japanese": "embed_out",
}
"""Model types whose output head has another name; where it is tied, no tensor has that name."""
_MAMBA_SIGNS = ("x_proj", "dt_proj")
_MAMBA = Reason("a projection of a first-generation Mamba mixer, which engines keep unquantized")
"""vLLM 0.32.0 builds these without a quantization config (`layers/mamba/mamba_mixer.py`)."""
_BUFFER = Reason("a buffer of the model's class, no weight")
_OTHER_STACK = Reason("several matrices in a tensor, which are not the experts of a router")
_DRAFTER = Reason("a drafter (multi-token prediction), as other tools leave it")
"""ModelOpt 0.47.0, `configs/ptq/units/default_disabled_quantizers.yaml`; llm-compressor 0.14.0.1
copies it too (compressed-tensors 0.20.0, `utils/mtp.py`)."""
_BEYOND = Reason("a layer after those of config.json: of a drafter, or the config was edited")
_TEXT_PART = "language_model."
_ENCODER = "encoder."
_ENCODER_TOWER = Reason(TOWER, tree="encoder")
"""The encoder of sound or images beside a language model (granite_speech)."""
_RENAMED: Mapping[str, tuple[str, str]] = {"phimoe": ("block_sparse_moe.gate", "mlp.router")}
"""Names in transformers 5.23 of linears that stay unquantized by default
(`conversion_mapping.py`)."""
_MOVED = frozenset({"gemma3n_text"})
"""Types whose linears outside of numbered layers vLLM 0.32 has in another module (run)."""
_PARTIAL_CONFIGS = frozenset(
    {"text_config", "llm_config", "language_config", "vision_config", "audio_config"}
)
"""A config with one of these has a text model as a part, and engines give it another prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which matrices are quantized, in the order of the source's data, and which are not."""

    quantized: tuple[Matrix, ...]
    unquantized: tuple[UnquantizedMatrix, ...]
    unquantized_experts: tuple[Matrix, ...] = ()
    """Unquantized experts that are written with a tensor each, as those of other layers are: vLLM
    0.32.0 expects all experts of a model in stacks, or none (`models/llama4.py`)."""
    unsplit: tuple[str, ...] = ()
    """Stacks of an unknown layout, by tensor; neither quantized nor unquantized."""
    refusal: ModelError | None = None
    """Why no FP8 checkpoint of the model can be written."""

    def require(self) -> Self:
        """Raise the refusal if there is one; else give the selection itself."""
        if self.refusal is not None:
            raise self.refusal
        return self


def check_unquantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is already quantized."""
    for what in _list_quantized(checkpoint):
        from fp8calib.quantization.sources.decoded import can_decode  # noqa: PLC0415 -- for a hint

        hint = "name the unquantized model it was made from"
        if can_decode(checkpoint):
            folder = shlex.quote(str(checkpoint.folder))
            hint += f", or what `fp8calib dequantize {folder} --out DIR` writes"
        hint += (
            "; of int4 weights, export reads symmetric ones of compressed-tensors with one scale "
            "per tensor"
        )
        fault = f"{checkpoint.folder}: the model is already quantized: {what}"
        raise ModelError(fault, hint=hint)


def _list_quantized(checkpoint: Checkpoint) -> Iterator[str]:
    """List what shows that a checkpoint is quantized."""
    for key, section in find_quantization_configs(checkpoint.load_config()):
        yield f"{CONFIG_NAME} has a {key} of {section.get('quant_method', 'unknown')!a:.40}"
    for name, entry in checkpoint.tensors.items():
        is_integer_weight = entry.dtype in INTEGERS and name.endswith(SUFFIX)
        if entry.dtype.startswith("F8_") or entry.dtype in PACKED_BITS or is_integer_weight:
            yield f"{name} is stored in {entry.dtype}"
        if is_companion(name):
            yield f"{name} is a scale"


def find_selection(
    checkpoint: Checkpoint, *, ignore: Collection[str] = (), drafters: bool = False
) -> Selection:
    """Choose the linears to quantize: every 2-D `*.weight`, but for defaults and `ignore`.

    Experts in stacks of a known layout are chosen one by one. Only headers and config.json are
    read, of an unquantized checkpoint.
    """
    config = checkpoint.load_config()
    stacks = ExpertStacks(config, checkpoint.tensors)
    split = {name: stacks.split(name) for name in checkpoint.tensors}
    known = KnownStacks()
    if not stacks.unserved and any(
        _is_stacked(name, entry) and not split[name] for name, entry in checkpoint.tensors.items()
    ):
        from fp8calib.model.geometry_from_class import ask_class  # noqa: PLC0415 -- transformers

        known = ask_class(checkpoint.folder, config)
        stacks = ExpertStacks(config, checkpoint.tensors, known)
        split = {name: stacks.split(name) for name in checkpoint.tensors}
    experts = [matrix.module for inside in split.values() for matrix in inside]
    matrices = (
        name.removesuffix(SUFFIX)
        for name, entry in checkpoint.tensors.items()
        if split[name] or _is_linear(name, entry) or _is_stacked(name, entry)
    )
    # the output heads that share the tensor of the embedding
    heads = dict.fromkeys((HEAD, _HEADS.get(str(config.get("model_type")), HEAD)))
    is_tied = config.get("tie_word_embeddings", True)
    tied = [head for head in heads if is_tied and f"{head}{SUFFIX}" not in checkpoint.tensors]
    ignored = match_patterns(ignore, [*matrices, *experts, *tied]) if ignore else {}
    find_reason = _make_reason_finder(checkpoint, config, ignored, drafters=drafters)
    quantized: list[Matrix] = []
    unquantized: list[UnquantizedMatrix] = []
    unquantized_experts: list[Matrix] = []
    unsplit: list[str] = []
    for name, entry in checkpoint.tensors.items():
        if len(entry.shape) < 2 or 0 in entry.shape:
            continue
        inside, module = split[name], name.removesuffix(SUFFIX)
        reason = find_reason(name, entry, inside)
        if cut_name(name) in known.buffers:
            reason = _BUFFER
        elif known.stacks and _is_stacked(name, entry) and not _EXPERTS.match(name):
            reason = reason or _OTHER_STACK
        if reason is None and inside:
            quantized += inside
        elif reason is None and _is_stacked(name, entry):
            unsplit.append(name)
        elif reason is None and _is_linear(name, entry):
            rows, columns = entry.shape
            quantized.append(Matrix(module=module, shape=(rows, columns), dtype=entry.dtype))
        else:
            reason = reason or Reason("not a 2-D *.weight")
            of_drafter = reason in (_DRAFTER, _BEYOND)
            item = UnquantizedMatrix(
                module=module,
                why=reason.why,
                is_linear=_is_linear(name, entry),
                tree=reason.tree,
                experts=tuple(matrix.module for matrix in inside),
                is_drafted=of_drafter,
                layer=number_layer(module, config) if of_drafter else None,
            )
            unquantized.append(item)
            unquantized_experts += inside
    unquantized += (
        UnquantizedMatrix(module=head, why="a tied output head", is_linear=True)
        for head in tied
        if head != HEAD
    )
    has_experts = any(matrix.stack for matrix in quantized)
    return Selection(
        quantized=tuple(quantized),
        unquantized=tuple(_find_ends(config, unquantized, quantized)),
        unquantized_experts=tuple(unquantized_experts) if has_experts else (),
        unsplit=tuple(unsplit),
        refusal=_refuse_stack(checkpoint, unsplit[0], stacks)
        if unsplit
        else _refuse_linears(checkpoint, config, quantized),
    )


def _find_ends(
    config: Mapping[str, object],
    unquantized: Collection[UnquantizedMatrix],
    quantized: Collection[Matrix],
) -> Iterator[UnquantizedMatrix]:
    """Add the ends of paths, where engines may use another prefix or other names."""
    model_type = str(config.get("model_type"))
    old, new = _RENAMED.get(model_type, ("", ""))
    is_moved = model_type in _MOVED
    if not (old or is_moved) and _PARTIAL_CONFIGS.isdisjoint(config):
        yield from unquantized
        return
    quantized_ends = {end for matrix in quantized for end in _list_ends(matrix.module)}
    for item in unquantized:
        paths = (path.replace(old, new) for path in item.linears)
        found = (_list_ends(path, only_outermost=True, takes_last=is_moved) for path in paths)
        own = (next((end for end in ends if end not in quantized_ends), None) for ends in found)
        yield replace(item, ends=tuple(dict.fromkeys(end for end in own if end is not None)))


def _list_ends(
    module: str, *, only_outermost: bool = False, takes_last: bool = False
) -> Iterator[str]:
    """List the ends of a path that begin at a numbered layer; for experts, that of all first.

    Of a path without a number it is the last name, with `takes_last`.
    """
    parts = module.split(".")
    places = [position for position, part in enumerate(parts) if position and part.isdecimal()]
    if takes_last and not places:
        yield parts[-1]
    for position in places[: 1 if only_outermost else None]:
        end = ".".join(parts[position - 1 :])
        found = split_expert(end)
        if found is not None:
            yield found[0]
        yield end


def _is_linear(name: str, entry: TensorEntry) -> bool:
    return name.endswith(SUFFIX) and len(entry.shape) == 2


def _make_reason_finder(
    checkpoint: Checkpoint,
    config: Mapping[str, object],
    ignored: Mapping[str, str],
    *,
    drafters: bool,
) -> Callable[[str, TensorEntry, Collection[Matrix]], Reason | None]:
    """Make the function that gives the reason why a tensor stays unquantized, or None."""
    sizes = [inner.get("vocab_size") for inner in list_configs(config)]
    num_layers = count_layers(config)
    has_text_part = any(name.startswith(_TEXT_PART) for name in checkpoint.tensors)
    # the modules with the projections of a first-generation Mamba mixer
    signs = (f".{sign}{SUFFIX}" for sign in _MAMBA_SIGNS)
    found = [{n.removesuffix(s) for n in checkpoint.tensors if n.endswith(s)} for s in signs]
    mixers = frozenset.intersection(*map(frozenset, found))

    def list_reasons(
        name: str, entry: TensorEntry, inside: Collection[Matrix]
    ) -> Iterator[Reason | None]:
        module = name.removesuffix(SUFFIX)
        if module in ignored:
            yield Reason(f"--ignore {ignored[module]}")
        if entry.dtype not in FLOATS:
            yield Reason(f"stored in {entry.dtype}")
        yield find_default(module, rows=entry.shape[0], vocab_sizes=sizes)
        named = [ignored[item.module] for item in inside if item.module in ignored]
        if named and len(named) < len(inside):
            raise UsageError(
                f"--ignore {named[0]}: names {len(named)} of the {len(inside)} matrices in {name}",
                hint="experts stored in one tensor are quantized together: name the tensor, or all "
                "its experts",
            )
        if named:
            yield Reason(f"--ignore {named[0]}")
        if not drafters and is_drafted(module, num_layers):
            is_named = is_drafted(module, 0) or find_promise(config)
            yield _DRAFTER if is_named else _BEYOND
        if module.rpartition(".")[0] in mixers and _is_linear(name, entry):
            yield _MAMBA
        if has_text_part and module.startswith(_ENCODER):
            yield _ENCODER_TOWER

    return lambda *tensor: next(filter(None, list_reasons(*tensor)), None)


def _is_stacked(name: str, entry: TensorEntry) -> bool:
    """Tell whether a tensor holds several matrices, such as experts."""
    if name.endswith("bias") or _is_linear(name, entry):
        return False
    is_expert = any("expert" in part for part in name.split("."))
    is_one = len(entry.shape) == 3 and entry.shape[0] == 1  # such as BLIP-2's query_tokens
    is_large = len(entry.shape) > 2 and min(entry.shape[-2:]) >= _SMALLEST_MATRIX
    return is_expert or (is_large and not is_one)


def _refuse_stack(checkpoint: Checkpoint, name: str, stacks: ExpertStacks) -> ModelError:
    shape = list(checkpoint.tensors[name].shape)
    pattern = span_layers(_EXPERTS.sub(r"\1", name))
    hint = "save the model with a tensor per expert, or leave those of all layers unquantized: "
    hint += f"add {spell_options([pattern])}"
    if stacks.unserved:
        hint = (
            f"{_hint_at_cache(checkpoint)}; with its experts unquantized, vLLM and SGLang cannot "
            "use the other linears in FP8"
        )
    return ModelError(
        f"{checkpoint.folder}: {name} {shape} holds several matrices, {stacks.explain_unknown()}",
        hint=hint,
    )


def _refuse_linears(
    checkpoint: Checkpoint, config: Mapping[str, object], quantized: Sequence[Matrix]
) -> ModelError | None:
    why = ""
    if not quantized:
        why = (
            "there is no linear to quantize: all 2-D *.weight tensors are left out by name, by "
            "dtype, or by --ignore"
        )
    types = [str(inner.get("model_type")) for inner in list_configs(config)]
    model_type = next((each for each in types if each in _CONV1D_TYPES), None)
    if quantized and model_type:
        why = (
            f"{model_type} keeps its weights [in, out] (Conv1D), as in {quantized[0].tensor} "
            f"{list(quantized[0].shape)}; engines cannot load these in FP8"
        )
    if not why:
        return None
    return ModelError(f"{checkpoint.folder}: {why}", hint=_hint_at_cache(checkpoint))


def _hint_at_cache(checkpoint: Checkpoint) -> str:
    folder = shlex.quote(str(checkpoint.folder))
    return f"`fp8calib calibrate {folder} --out DIR` quantizes its KV cache alone"


# --- experts in stacks ---------------------------------------------------------------------------


class ExpertStacks:
    """The expert stacks of a checkpoint, described by config.json and the shapes of tensors.

    `known` is what the model's class says of stacks, where the type has no layout here.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorEntry],
        known: KnownStacks | None = None,
    ) -> None:
        self._tensors = tensors
        found = find_layout(config)
        self._known = found if known is None or found.stacks else known
        types = [inner.get("model_type") for inner in list_configs(config)]
        # why engines load the experts of this model in no form of FP8 that is written
        self.unserved = next((why for kind, why in UNSERVED_STACKS.items() if kind in types), "")

    def explain_unknown(self) -> str:
        """Explain why a stack cannot be split."""
        known = self._known
        if self.unserved:
            return f"which engines cannot load in FP8: {self.unserved}"
        if not known.stacks:
            return "in an unknown layout"
        return (
            f"in an unknown layout: {known.model_type} has {known.order} with the hidden "
            f"size {known.hidden_size}"
        )

    def split(self, name: str) -> tuple[Matrix, ...]:
        """List the matrices of a stack, expert by expert; none when its layout is unknown."""
        stacks = self._known.stacks
        ending = next(filter(name.endswith, stacks), None)
        if ending is None:
            return ()
        projections, base = stacks[ending], name.removesuffix(ending)
        fitting = self._list_orientations(projections, name)
        if len(fitting) > 1:
            # A square matrix fits both ways: it is read as the other stack of the same experts.
            # Where that one is transposed, transformers (whose Transpose looks at each shape alone)
            # and vLLM read the square one differently, so its orientation is unknown.
            beside = [
                self._list_orientations(others, base + end)
                for end, others in stacks.items()
                if others != projections
            ]
            fitting = [False] if [False] in beside else []
        if len(fitting) != 1:
            return ()
        entry, is_transposed = self._tensors[name], fitting[0]
        outputs, inputs = _orient(entry.shape, is_transposed=is_transposed)
        rows = outputs // len(projections)
        return tuple(
            Matrix(
                module=f"{base}.experts.{expert}.{projection}",
                shape=(rows, inputs),
                dtype=entry.dtype,
                stack=name,
                expert=expert,
                first=number * rows,
                is_transposed=is_transposed,
            )
            for expert in range(entry.shape[0])
            for number, projection in enumerate(projections)
        )

    def _list_orientations(self, projections: tuple[str, ...], name: str) -> list[bool]:
        """List the orientations that fit a stack's shape: whether it is transposed."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        found = []
        for is_transposed in _ORIENTATIONS[self._known.order] if len(shape) == _STACK_AXES else ():
            outputs, inputs = _orient(shape, is_transposed=is_transposed)
            hidden = outputs if projections == ("down_proj",) else inputs
            if hidden == self._known.hidden_size and outputs % len(projections) == 0:
                found.append(is_transposed)
        return found


_ORIENTATIONS: Mapping[str, tuple[bool, ...]] = {
    OUT_IN: (False,),
    IN_OUT: (True,),
    EITHER: (False, True),
}


def _orient(shape: tuple[int, ...], *, is_transposed: bool) -> tuple[int, int]:
    _, first, second = shape
    return (second, first) if is_transposed else (first, second)
