"""How TGI loads the linears of a checkpoint, as read in its source.

With compressed-tensors the config decides (`layers/compressed_tensors/loader.py`), with every other
method the dtype of the stored weight (`layers/fp8.py`). Tensors are asked for by name, so that
those that nothing asks for do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.weights.group_schemes import LinearSchemes, Section
from fp8calib.engines.weights.linear_loader import (
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
from fp8calib.fp8.schemes import Granularity, InputScaling, count_blocks

_FP8 = "TGI db931fc layers/fp8.py (HybridFP8UnquantLoader), read"
_COMPRESSED = "TGI db931fc layers/compressed_tensors/w8an_fp.py (W8ANFpLoader), read"
_LINEAR = "TGI db931fc layers/linear.py (FastLinear), utils/weights.py (get_tensor), read"
_PART_FIX = "quantize all of these projections, or none"


class TgiLinearLoader(LinearLoader):
    """The linears that TGI makes of what a folder stores."""

    engine = "tgi"
    title = "TGI"

    def __init__(self, folder: ScaleFolder) -> None:
        section = find_quantization(folder, keys=("quantization_config", "compression_config"))
        self._schemes = _TgiSchemes(section or {}, folder.config)
        self._is_compressed = self._schemes.method == "compressed-tensors"
        self._has_fp8 = any(
            is_fp8(each) for held in folder.tensors.values() for each in held.values()
        )
        self.shape_source = self.unfilled_source = _COMPRESSED if self._is_compressed else _FP8

    def joins(self, group: LinearGroup) -> bool:
        """Tell whether the linears of a group are joined; experts are loaded one by one."""
        return group.kind is not GroupKind.EXPERTS

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme of a group: that of its first linear, or what its dtype shows."""
        if group.kind is GroupKind.HEAD:
            return Unquantized(why="TGI does not quantize the output layer")
        if any(len(entry.shape) > 2 for each in group.members for entry in each.tensors.values()):
            return None
        kinds = {is_fp8(each.tensors[WEIGHT]) for each in group.members if WEIGHT in each.tensors}
        if len(kinds) > 1:
            raise Refusal(
                f"{group.path} becomes one weight in TGI, and only a part of it is FP8 "
                "(RuntimeError: no promotion)",
                fix=_PART_FIX,
            )
        first = group.members[0]
        alone = replace(group, path=first.module, kind=GroupKind.LINEAR, members=(first,))
        if self._is_compressed:
            return self._schemes.find(alone)
        if not self._has_fp8:
            return Unquantized(why="no weight is FP8")
        inputs = InputScaling.TOKEN
        if self._schemes.block is None:
            return StoredScheme(weights=Granularity.CHANNEL, inputs=inputs)
        return StoredScheme(
            weights=Granularity.BLOCK, block=self._schemes.block, inputs=InputScaling.GROUP
        )

    def list_parameters(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme
    ) -> Mapping[str, Parameter]:
        """List what TGI asks for; an input scale that is there is taken in any shape."""
        is_block = scheme.weights is Granularity.BLOCK
        blocks = count_blocks(linear.shape, scheme.block) if is_block else ()
        created = {
            WEIGHT: _make_parameter(linear.shape, fit_exactly(linear.shape)),
            "weight_scale_inv" if is_block else "weight_scale": _make_parameter(
                blocks or (linear.shape[0], 1),
                fit_exactly(blocks) if is_block else _fit_rows(linear.shape[0]),
            ),
        }
        if INPUT_SCALE not in linear.tensors and self._wants_input(group, linear, scheme):
            created[INPUT_SCALE] = _make_parameter((1,), lambda _: Fit.WHOLE)
        return created

    def _wants_input(self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme) -> bool:
        """Tell whether a missing input scale is an error: of joined linears all have one, or none.

        Linears that are split by rows always need it, where the config says that it is static.
        """
        if any(INPUT_SCALE in each.tensors for each in group.members):
            return True
        is_static = self._is_compressed and scheme.inputs is InputScaling.STATIC
        return is_static and linear.shard != "column"

    def judge_stray(self, group: LinearGroup, suffix: str) -> Outcome | None:
        """Judge a tensor that nothing asks for."""
        del group, suffix
        return None

    def judge_codes(self, why: str) -> Outcome | None:
        """Judge an FP8 weight of an unquantized linear, whose dtype stays what it is."""
        what = f"is FP8, but {why}: the first forward pass fails (RuntimeError: not the same dtype)"
        return Outcome(effect=Effect.REFUSED, what=what, source=_LINEAR)

    def judge_plain(self, group: LinearGroup) -> Outcome | None:
        """Judge a weight that is not FP8: only the config of compressed-tensors forbids it."""
        if not self._is_compressed:
            return None
        del group
        what = "is not FP8, but the config quantizes it: TGI stops without its scale (RuntimeError)"
        return Outcome(effect=Effect.REFUSED, what=what, source=_COMPRESSED)

    def judge_dtype(self, group: LinearGroup, suffix: str, dtype: str) -> Outcome | None:
        """Judge the dtype of a weight: another format is taken for a weight without scales."""
        del group
        if suffix != WEIGHT or dtype == "F8_E4M3":
            return None
        what = f"is {dtype}: TGI does not apply the scale to it"
        return Outcome(effect=Effect.MISREAD, what=what, source=self.shape_source)


class _TgiSchemes(LinearSchemes):
    """The schemes of compressed-tensors' own matching, for linears alone."""

    def __init__(self, section: Section, config: Section) -> None:
        super().__init__(section, config)
        sizes = section.get("weight_block_size")
        self.block = (sizes[0], sizes[1]) if isinstance(sizes, list) and len(sizes) == 2 else None

    def judge_untargeted(self, group: LinearGroup) -> Unquantized:
        """Judge a linear that no target matches: TGI stops."""
        raise Refusal(
            f"no config group has {group.members[0].module} (ValueError: Cannot find "
            "compressed-tensors target)",
            fix="list it in `ignore`, or in a config group",
        )


def _fit_rows(rows: int) -> Callable[[Shape], Fit]:
    """Make the fit of a scale that is flattened and expanded to the rows of a weight."""

    def fit(shape: Shape) -> Fit:
        number = 1
        for size in shape:
            number *= size
        return Fit.WHOLE if number in (1, rows) else Fit.REFUSED

    return fit


def _make_parameter(shape: Shape, fit: Callable[[Shape], Fit]) -> Parameter:
    return Parameter(shape=shape, fit=fit, unfilled=Unfilled.ABSENT)
