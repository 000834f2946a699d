"""How transformers 5.23 loads the linears of a checkpoint. Run on tiny models, on a CPU.

compressed-tensors 0.20 gives every linear its parameters (`quantization/lifecycle/initialize.py`).
The `fp8` method (`integrations/finegrained_fp8.py`) dequantizes while loading wherever there is no
GPU, by blocks whose size it derives from the shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.compressed_tensors import FORMATS
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.transformers.quantization_config import choose_experts_group
from fp8calib.engines.weights.compressed_groups import (
    FIX,
    find_foreign,
    read_compressed_group,
)
from fp8calib.engines.weights.group_schemes import GroupSchemes, LinearSchemes, Section
from fp8calib.engines.weights.linear_loader import (
    Foreign,
    Found,
    GroupKind,
    LinearGroup,
    LinearLoader,
    StoredLinear,
    Unquantized,
)
from fp8calib.engines.weights.parameters import (
    INPUT_SCALE,
    WEIGHT,
    Fit,
    Parameter,
    Shape,
    Unfilled,
    fit_exactly,
)
from fp8calib.engines.weights.stored import is_fp8
from fp8calib.engines.weights.weight_rule import Effect, Outcome
from fp8calib.fp8.schemes import GROUP_SIZE, Granularity, InputScaling, count_blocks
from fp8calib.geometry.expert_layouts import find_layout

_INITIALIZE = "compressed-tensors 0.20 quantization/lifecycle/initialize.py, run"
_DEQUANTIZE = "transformers 5.23 integrations/finegrained_fp8.py (Fp8Dequantize), run on a CPU"
_FORWARD = "compressed-tensors 0.20 quantization/lifecycle/forward_helpers.py, run"
_LOAD = "transformers 5.23 modeling_utils.py (from_pretrained), run"
_KEEP_DTYPE = "transformers 5.23 quantizers/base.py (get_new_dtype), run on a CPU"
_PACKED_NAMES = ("weight_zero_point", "weight_global_scale", "weight_packed", "weight_shape")
"""What is collected for an expert beside `weight` and `weight_scale`: the `serialized_names` of
`quantizers/quantizer_compressed_tensors.py`."""
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_SCALE_NAMES = ("weight_scale_inv", "scale", "qscale_weight")
"""A block scale's names; transformers renames the last two to the first."""
_CAST = ("F8_E5M2", "F8_E8M0")
_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E8M0", "F16", "BF16", "F32", "F64")


def make_linear_loader(folder: ScaleFolder, dtype: str) -> LinearLoader:
    """Make the loader for a folder's quantization method and the model's dtype."""
    section = find_quantization(folder, keys=("quantization_config",)) or {}
    if section.get("quant_method") == "fp8":
        return _FineGrained(section, folder.config, dtype)
    return _Compressed(section, folder.config)


class _TransformersLoader(LinearLoader):
    """What loading has in common for all methods."""

    engine = "transformers"
    title = "transformers"
    joins_experts = True
    """Whether it joins the experts of a layer while loading."""

    def joins(self, group: LinearGroup) -> bool:
        """Tell whether linears are joined: none is."""
        del group
        return False

    def creates(self, group: LinearGroup) -> bool:
        """Tell whether a linear is created by the config: in decoder layers or not."""
        return super().creates(group) or group.is_linear

    def judge_absent(self, group: LinearGroup) -> Outcome:
        """Judge a linear that is not quantized and has no weight."""
        unfilled = self.find_unfilled(group)
        effect = Effect.REFUSED if unfilled is Unfilled.JOINED else Effect.MISREAD
        return Outcome(effect=effect, what=f"is missing: {unfilled}", source=_LOAD)

    def find_unfilled(self, group: LinearGroup) -> Unfilled:
        """Find what becomes of a missing weight; of joined experts all may be missing, or none."""
        is_joined = group.kind is GroupKind.EXPERTS and self.joins_experts
        return Unfilled.JOINED if is_joined and group.is_stored else Unfilled.RANDOM

    @abstractmethod
    def leaves_out(self, group: LinearGroup, suffix: str) -> bool:
        """Tell whether a tensor without a parameter is left out without a report."""

    def judge_stray(self, group: LinearGroup, suffix: str) -> Outcome | None:
        """Judge a tensor without a parameter: it is left out."""
        if self.leaves_out(group, suffix):
            return None
        what = "has no parameter: transformers reports it UNEXPECTED and leaves it out"
        return Outcome(effect=Effect.CONDITION, what=what, source=_LOAD)


class _Compressed(_TransformersLoader):
    """The linears that compressed-tensors initializes in a model."""

    shape_source = _LOAD
    unfilled_source = _INITIALIZE
    quantizes_tied = True

    def __init__(self, section: Section, config: Section) -> None:
        self._schemes = _CompressedSchemes(section, config)
        _, layout, _ = find_layout(config)
        is_split = layout is None or layout.is_split_in_transformers
        self.joins_experts = is_split and not (layout is not None and layout.is_rebuilt)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme of a linear.

        Experts are dequantized and joined while loading, whatever the config excludes.

        Raises:
            Refusal: experts cannot be joined.
        """
        if self._schemes.method.startswith("modelopt"):
            return Unquantized(why="transformers ignores the quant_method modelopt")
        if self._schemes.method not in ("", "compressed-tensors"):
            return None
        if group.kind is not GroupKind.EXPERTS:
            return self._schemes.find(group)
        is_joined = self.joins_experts and bool(self._schemes.method)
        if is_joined:
            for linear in group.members:
                _require_joinable(linear)
        if not _is_coded(group.members[0]):
            return None
        if is_joined:
            fields = choose_experts_group(self._schemes.section.get("config_groups"))
            return self._schemes.read_group(fields) if fields else None
        return self._schemes.find(replace(group, kind=GroupKind.LINEAR))

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List what `initialize_qparams` registers, and the weight.

        Experts that are joined are dequantized before, and their input scales are not used.
        """
        is_joined = group.kind is GroupKind.EXPERTS and self.joins_experts
        unfilled = self.find_unfilled(group)
        alone = Unfilled.NONE if WEIGHT in linear.tensors else unfilled
        shapes: dict[Granularity, Shape] = {
            Granularity.TENSOR: (1,),
            Granularity.CHANNEL: (linear.shape[0], 1),
            Granularity.BLOCK: count_blocks(linear.shape, scheme.block),
        }
        created = {
            WEIGHT: _make_parameter(linear.shape, unfilled if is_joined else Unfilled.REFUSED),
            "weight_scale": _make_parameter(
                shapes[scheme.weights], alone if is_joined else Unfilled.MEMORY
            ),
        }
        if scheme.inputs is InputScaling.STATIC and not is_joined:
            created[INPUT_SCALE] = _make_parameter((1,), Unfilled.MEMORY)
        return created

    def leaves_out(self, group: LinearGroup, suffix: str) -> bool:
        """Tell whether a tensor is left out without a report."""
        return group.kind is GroupKind.EXPERTS and suffix == INPUT_SCALE

    def judge_plain(self, group: LinearGroup) -> Outcome:
        """Judge a weight that is not FP8: it is multiplied by a scale that was never loaded."""
        del group
        what = "is not FP8, but the config quantizes it: its scale is uninitialised memory"
        return Outcome(effect=Effect.MISREAD, what=what, source=_INITIALIZE)

    def judge_sizes(self, linear: StoredLinear, scheme: StoredScheme) -> Outcome | None:
        """Judge whether the inputs can be split into groups, which the first forward pass does."""
        if scheme.inputs is not InputScaling.GROUP or linear.shape[1] % GROUP_SIZE == 0:
            return None
        what = (
            f"has {linear.shape[1]} inputs, no multiple of {GROUP_SIZE}: the first forward pass "
            "fails (RuntimeError: unflatten)"
        )
        return Outcome(effect=Effect.REFUSED, what=what, source=_FORWARD)

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge a tensor that holds no floating-point numbers, and a weight that is cast.

        Its parameter is float8_e4m3fn; only experts that are joined are multiplied before.
        """
        is_joined = group.kind is GroupKind.EXPERTS and self.joins_experts
        if suffix == WEIGHT and dtype in _CAST and not is_joined:
            what = f"is {dtype}: transformers casts its values to float8_e4m3fn, where those above "
            what += "448 are NaN"
            return Outcome(effect=Effect.MISREAD, what=what, source=_LOAD)
        if dtype in _FLOATS:
            return None
        if suffix == WEIGHT:
            what = f"is {dtype}: transformers multiplies its values by the scale"
            return Outcome(effect=Effect.MISREAD, what=what, source=_LOAD)
        what = f"is {dtype}: the first forward pass fails (RuntimeError: not the same dtype)"
        return Outcome(effect=Effect.REFUSED, what=what, source=_FORWARD)


def _require_joinable(linear: StoredLinear) -> None:
    """Check that an expert's weight is dequantized by one multiplication, and nothing is beside it.

    transformers 5.23 integrations/compressed_tensors.py (CompressedTensorsDequantize), run.

    Raises:
        Refusal: it is not.
    """
    weight, scale = (linear.tensors.get(name) for name in (WEIGHT, "weight_scale"))
    surplus = next((name for name in _PACKED_NAMES if name in linear.tensors), None)
    if weight is None:
        return
    if surplus is not None:
        why = f"{linear.name(surplus)} cannot be joined with the experts' weights (AttributeError"
        raise Refusal(f"{why} or RuntimeError: CONVERSION)", fix="remove these tensors")
    if scale is None:
        return
    pairs = zip(reversed(scale.shape), reversed(weight.shape), strict=False)
    if any(size not in (1, whole) for size, whole in pairs):
        what = f"an expert of shape {list(weight.shape)} by scales of shape {list(scale.shape)}"
        why = f"{linear.module}: transformers multiplies {what} without regard to blocks"
        fix = "quantize experts with one scale per tensor or per channel, or serve it with vLLM"
        raise Refusal(f"{why} (RuntimeError: CONVERSION)", fix=fix)


class _CompressedSchemes(LinearSchemes):
    """The schemes of compressed-tensors' own matching: the output layer is a Linear like others."""

    def read_group(self, group: Section) -> Found:
        """Read a config group; the format of the whole config is not used, that of a group is."""
        form = group.get("format")
        if form == "dense":
            return Unquantized(why="its config group is dense")
        if ("format" in self.section and self.section["format"] is None) or (
            form is not None and form not in FORMATS
        ):
            raise Refusal(f"the config's format is {form!a:.40} (ValidationError)", fix=FIX)
        weights = group.get("weights")
        if isinstance(weights, dict) and weights.get("type") == "float":
            num_bits = weights.get("num_bits", 8)
            if num_bits != 8:
                why = f"the config says {num_bits!a:.20} bits of floats (NotImplementedError)"
                return Foreign(why=why)
        foreign = find_foreign(group)
        if foreign is not None:
            return replace(foreign, effect=Effect.MISREAD)
        return read_compressed_group(group)


class _FineGrained(_TransformersLoader):
    """Weights of the `fp8` method, which are dequantized while loading where there is no GPU."""

    shape_source = _DEQUANTIZE
    unfilled_source = _DEQUANTIZE

    def __init__(self, section: Section, config: Section, dtype: str) -> None:
        self._dtype = dtype
        excluded: dict[str, list[str]] = {"ignored_layers": [], "modules_to_not_convert": []}
        self._schemes = GroupSchemes({**section, **excluded}, config)

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme: whatever the config excludes, a weight with a scale is dequantized."""
        if group.kind is GroupKind.EXPERTS and not _is_coded(group.members[0]):
            return None
        return self._schemes.find(replace(group, kind=GroupKind.LINEAR))

    def creates(self, group: LinearGroup) -> bool:
        """Tell whether a linear is created by the config, which no weight of 16 bits needs."""
        return super().creates(group) and group.kind is not GroupKind.HEAD

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List the weight and its scale; experts are joined, which needs all of them."""
        unfilled = self.find_unfilled(group)
        is_block = scheme.weights is Granularity.BLOCK
        shape: Shape = count_blocks(linear.shape, scheme.block) if is_block else (1,)
        return {
            WEIGHT: _make_parameter(linear.shape, unfilled),
            _find_scale(linear): Parameter(
                shape=shape,
                fit=lambda _: Fit.WHOLE,
                unfilled=Unfilled.NONE if WEIGHT in linear.tensors else unfilled,
            ),
        }

    def leaves_out(self, group: LinearGroup, suffix: str) -> bool:
        """Tell whether a tensor is left out without a report."""
        del group
        return suffix == "activation_scale"

    def judge_codes(self, why: str) -> Outcome | None:
        """Judge an FP8 weight without quantization, which this method has none of."""
        del why
        return None

    def judge_plain(self, group: LinearGroup) -> Outcome | None:
        """Judge a weight that is not FP8: it is used as it is, unless it has a scale."""
        if not any(name in group.members[0].tensors for name in _SCALE_NAMES):
            return None
        what = "is not FP8, but has a scale: transformers multiplies it"
        return Outcome(effect=Effect.MISREAD, what=what, source=_DEQUANTIZE)

    def judge_plain_dtype(self, dtype: str) -> Outcome | None:
        """Judge the dtype of a weight that is not FP8: it is kept, unlike by other methods."""
        wanted = _DTYPES.get(self._dtype, dtype)
        if dtype == wanted:
            return None
        what = f"is {dtype}, and the model {wanted}: without a GPU, transformers keeps that, and "
        what += "the first forward pass fails (RuntimeError: not the same dtype)"
        return Outcome(effect=Effect.REFUSED, what=what, source=_KEEP_DTYPE)

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge a weight that holds no floating-point numbers; INT8 is taken for packed FP4."""
        del group
        if suffix != WEIGHT or dtype in _FLOATS:
            return None
        if dtype == "I8":
            what = "is I8, which transformers takes for packed FP4 (RuntimeError)"
            return Outcome(effect=Effect.REFUSED, what=what, source=_DEQUANTIZE)
        what = f"is {dtype}: transformers multiplies its values by the scale"
        return Outcome(effect=Effect.MISREAD, what=what, source=_DEQUANTIZE)

    def judge_sizes(self, linear: StoredLinear, scheme: StoredScheme) -> Outcome | None:
        """Judge the size of the blocks, which follows from how often the scales divide the weight.

        Only equal blocks are dequantized, so blocks that end inside of a weight move.
        """
        name = _find_scale(linear)
        if name not in linear.tensors:
            return None
        shape = linear.tensors[name].shape
        grid = (1, 1) if shape in ((), (1,)) else shape[-2:]
        is_grid = len(grid) == 2 and all(grid)
        if not is_grid or linear.shape[0] % grid[0] or linear.shape[1] % grid[1]:
            what = f"has the shape {list(linear.shape)}, which {list(shape)} scales do not divide"
            what = f"{what}: without a GPU, transformers fails (RuntimeError: CONVERSION)"
            return Outcome(effect=Effect.REFUSED, what=what, source=_DEQUANTIZE)
        if scheme.weights is not Granularity.BLOCK:
            return None
        sizes = [linear.shape[axis] // grid[axis] for axis in (0, 1)]
        wanted = [min(scheme.block[axis], linear.shape[axis]) for axis in (0, 1)]
        is_meant = tuple(grid) == count_blocks(linear.shape, scheme.block)
        if sizes == wanted or not is_meant:  # else the config is wrong, which is not used
            return None
        what = (
            f"has the shape {list(linear.shape)}: without a GPU, transformers dequantizes it by "
            f"blocks of {sizes}, not {list(scheme.block)}, and its answers are wrong"
        )
        return Outcome(effect=Effect.MISREAD, what=what, source=_DEQUANTIZE)


def _is_coded(linear: StoredLinear) -> bool:
    """Check whether a weight is FP8, or missing where others may be."""
    return WEIGHT not in linear.tensors or is_fp8(linear.tensors[WEIGHT])


def _find_scale(linear: StoredLinear) -> str:
    """Find the name of a weight's scale, which has two other spellings."""
    return next((name for name in _SCALE_NAMES if name in linear.tensors), _SCALE_NAMES[0])


def _make_parameter(shape: Shape, unfilled: Unfilled) -> Parameter:
    return Parameter(shape=shape, fit=fit_exactly(shape), unfilled=unfilled)
