"""Replace a model's weights by what an engine would hold in FP8, and quantize inputs of linears."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.arithmetic import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.quantization_config import StoredScheme
from fp8calib.model.geometry import Linear, ModelGeometry, Role, Site
from fp8calib.model.load import LoadedModel
from fp8calib.model.module_paths import name_fused_group
from fp8calib.model.topology import find_text_decoder, is_linear, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.amax import tensor_amax
from fp8calib.numerics.encode import scale_of
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling, Scheme
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.select import Selection
from fp8calib.quantization.settings import PlanSettings
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import (
    FakeQuantized,
    Quantizer,
    measure_damage,
    sum_damage,
)

_SLACK = 2.0**-10
_BYTES_AT_ONCE = 2**23
_NO_LINEAR = "only the weights are quantized here, not the inputs: not a linear of a decoder layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParameter:
    """A parameter that holds the weight of one linear, or of one projection of all experts."""

    name: str
    sites: tuple[Site, ...] = ()
    """One, or gate's and up's of experts, which share a parameter; none if no hook sees inputs."""
    is_transposed: bool = False
    """[in, out] (Conv1D, some experts) where Linear has [out, in]."""
    num_experts: int = 0
    num_parts: int = 1
    """How many matrices of the checkpoint its rows hold (gate and up of an expert), each with
    blocks of its own."""

    def pieces(self, parameter: torch.Tensor) -> torch.Tensor:
        """Give a view of the parameter as a stack: of experts, or of one."""
        return parameter if self.num_experts else parameter.unsqueeze(0)

    def read_pieces(self, source: WeightSource) -> Iterator[torch.Tensor]:
        """Read the `pieces`, one at a time."""
        if self.num_experts:
            yield from source.read_experts(self.name)
        else:
            yield source.read(self.name)


ScaleRange = tuple[Granularity, float, float]
"""The granularity of a weight's scales, the smallest and the largest."""
Changed = tuple[WeightParameter, torch.Tensor, ScaleRange]
"""A parameter, the sums of `measure_damage`, and the scales that the unquantized weight has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantized:
    """A fused group that is quantized here, as an engine's loader would do it.

    Per-tensor scales are shared by the whole group.
    """

    parameters: tuple[WeightParameter, ...]
    quantizer: Quantizer
    again: Quantizer | None = None
    """How the engine quantizes the quantized weights again at load; None: it does not."""
    through_float16: bool = False
    """At load the engine dequantizes to fp16, and quantizes again with the same scale."""
    stored: WeightSource | None = None
    """Reads the weights in the checkpoint's dtype, if the model's rounds them; else None."""

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        """Quantize `values` (by parameter name) in place, expert by expert; tell of each."""
        per = self.quantizer.scale
        parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
        parts = [([], []) for _ in self.parameters]
        assert isinstance(per, Granularity)  # noqa: S101 -- a scheme's always is
        pieces = zip(*(self._list_pieces(p, values[p.name]) for p in self.parameters), strict=True)
        for group in pieces:
            quantizer = self.quantizer
            if per is Granularity.TENSOR:
                amax = torch.stack([tensor_amax(exact) for _, exact in group]).amax()
                quantizer = replace(quantizer, scale=scale_of(amax, quantizer.fmt))
            for parameter, both, told in zip(self.parameters, group, parts, strict=True):
                chunks = (each.chunk(parameter.num_parts) for each in both)
                for weight, exact in zip(*chunks, strict=True):
                    fake = quantizer.fake(exact)
                    became, scale = fake.values, fake.scale
                    if self.through_float16:
                        became = quantizer.fake(became.half()).values
                    if self.again is not None:
                        became, scale = self.again.fake(became).values, self.again.scale_for(exact)
                    assert scale is not None  # noqa: S101 -- no cache type stores weights
                    told[0].append(measure_damage(weight, fake._replace(values=became)))
                    told[1].append(torch.stack(torch.aminmax(scale)))
                    weight.copy_(became)
        for parameter, (damage, scales) in zip(self.parameters, parts, strict=True):
            ends = torch.stack(torch.aminmax(torch.stack(scales)))  # a GPU is waited for once
            smallest, largest = ends.tolist()
            yield parameter, sum_damage(damage), (per, smallest, largest)

    def _list_pieces(
        self, parameter: WeightParameter, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """List views [out, in] of a parameter and what `quantize` reads: one, or one per expert."""
        pieces = parameter.pieces(value)
        exact: Iterable[torch.Tensor] = pieces
        if self.stored is not None:
            read = parameter.read_pieces(self.stored)
            exact = (piece.to(value.device, torch.float32) for piece in read)
        for one, other in zip(pieces, exact, strict=True):
            yield (one.T, other.T) if parameter.is_transposed else (one, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A weight of an FP8 checkpoint, dequantized, with what `Fp8Checkpoint` does for an engine.

    Or an unquantized tensor that differs from the original model's: some tools fold factors into
    norms and embeddings before they quantize (SmoothQuant).
    """

    parameters: tuple[WeightParameter]
    source: WeightSource
    fmt: Fp8Format
    again: Quantizer | None = None
    """As of `Requantized`."""
    clip_limits: WeightSource | None = None
    """The largest magnitude that the checkpoint can store for each element; None: it is in 16 bits,
    as in the next."""
    scales: ScaleRange | None = None

    def apply(self, values: Mapping[str, torch.Tensor]) -> Iterator[Changed]:
        """Copy the stored weight over the values, expert by expert; tell of it if it is FP8."""
        (parameter,), damage = self.parameters, []
        limits: Iterator[torch.Tensor | None] = repeat(None)
        if self.clip_limits is not None:
            limits = iter(parameter.read_pieces(self.clip_limits))
        pieces = parameter.pieces(values[parameter.name])
        for piece, stored in zip(pieces, parameter.read_pieces(self.source), strict=True):
            if piece.shape != stored.shape:
                raise ModelError(
                    f"{parameter.name} is {list(stored.shape)} in the FP8 checkpoint and "
                    f"{list(piece.shape)} in the model",
                    hint="name the model that the checkpoint was made from",
                )
            found = became = stored.to(piece.device)
            if (limit := next(limits)) is not None:
                became = found.float() if self.again is None else self.again.fake(found).values
                clipped = find_clipped(piece, found, limit.to(piece.device), self.fmt)
                damage.append(measure_damage(piece, FakeQuantized(became, clipped)))
            piece.copy_(became)
        if self.scales is not None:
            yield parameter, sum_damage(damage), self.scales


WeightChange = Requantized | HeldWeight
"""A change to weights that are replaced together."""


def find_clipped(
    exact: torch.Tensor, found: torch.Tensor, limits: torch.Tensor, fmt: Fp8Format
) -> torch.Tensor | None:
    """Find the elements that an FP8 checkpoint clipped: too large, and stored as its largest code.

    `exact` is the unquantized weight, `found` that of the checkpoint, which stores up to `limits`.
    As `FakeQuantized.clips`, None if nothing is clipped.
    """
    # the unquantized weight may have been rounded to its dtype from a finer one
    beyond = exact.abs().float() > limits * (1 + torch.finfo(exact.dtype).eps / 2)
    if not bool(beyond.any()):
        return None
    # a shared scale may have moved the stored weight by half a step
    at_the_end = 1 - 2.0 ** -(fmt.mantissa_bits + 1) - _SLACK
    return beyond & (found.abs() >= limits * at_the_end)


def find_parameters(geometry: ModelGeometry, model: nn.Module) -> list[WeightParameter]:
    """List the weights of linears and experts."""
    found: dict[str, WeightParameter] = {}
    for _, linear in geometry.linears():
        name, site = linear.weight_name, Site(linear.module, Role.WEIGHT)
        runner = model.get_submodule(linear.runner)
        found[name] = WeightParameter(
            name=name,
            sites=(*found[name].sites, site) if name in found else (site,),
            is_transposed=bool(getattr(runner, "is_transposed", False))
            if linear.num_experts
            else is_transposed(runner),
            num_experts=linear.num_experts,
        )
    return list(found.values())


def is_of_decoder(parameter: str, model: LoadedModel) -> bool:
    """Tell whether a parameter belongs to the text decoder (tokens to last hidden state)."""
    path = find_text_decoder(model)[0]
    return not path or parameter.startswith(f"{path}.")


@contextmanager
def changed_weights(
    model: nn.Module,
    changes: Sequence[WeightChange],
    originals: WeightSource,
    damage: dict[Site, torch.Tensor],
    scales: dict[Site, ScaleRange],
    *,
    keeps: bool = False,
) -> Iterator[None]:
    """Apply `changes` to the model while the context is open.

    At the end, the unquantized weights are read again from `originals`; with `keeps` they are
    copied on their device before. `damage` and `scales` receive those of each weight (`Changed`).
    """
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    touched: list[WeightParameter] = []
    kept: dict[str, torch.Tensor] = {}
    try:
        for change in changes:
            for parameter in change.parameters:
                if values[parameter.name].is_meta:
                    raise VerificationError(
                        f"{parameter.name} is offloaded, so it cannot be replaced by FP8 values",
                        hint="leave out --device-map: the model is then streamed layer by layer",
                    )
            touched += change.parameters
            if keeps:
                kept |= {each.name: values[each.name].clone() for each in change.parameters}
            for parameter, sums, extremes in change.apply(values):
                damage.update(dict.fromkeys(parameter.sites, sums))
                scales.update(dict.fromkeys(parameter.sites, extremes))
        yield
    finally:
        for parameter in touched:
            if parameter.name in kept:
                values[parameter.name].copy_(kept.pop(parameter.name))
                continue
            pieces = parameter.pieces(values[parameter.name])
            for piece, original in zip(pieces, parameter.read_pieces(originals), strict=True):
                piece.copy_(original)


# --- what an engine does with linears in FP8 ------------------------------------------------------


def emulate_linears(
    linears: Iterable[tuple[WeightChange, Mapping[str, StoredScheme]]],
    fmt: Fp8Format,
    geometry: ModelGeometry,
    numerics: Numerics,
    *,
    copied: Iterable[WeightChange] = (),
    notes: Iterable[str] = (),
) -> Candidate:
    """Emulate an engine that loads FP8 weights of one format, and tensors `copied` beside them.

    Beside weights, by parameter, is how the engine scales their inputs. Those of a weight without a
    site stay in 16 bits, as no hook sees them.
    """
    is_rounded = _find_rounded(geometry, numerics)
    changes: list[WeightChange] = []
    quantizers: dict[Site, Quantizer] = {}
    for change, inputs in linears:
        kinds = {each.inputs for each in inputs.values() if not each.is_mx}
        if InputScaling.GROUP in kinds and is_rounded(change.parameters[0].name):
            rounded = Quantizer(fmt=fmt, scale=Granularity.BLOCK, power_of_two=True)
            change = replace(change, again=rounded)  # noqa: PLW2901
        changes.append(change)
        for parameter in (each for each in change.parameters if each.sites):
            quantizer = _quantize_inputs(
                *(inputs[parameter.name], fmt, numerics), is_rounded=is_rounded(parameter.name)
            )
            if quantizer is not None:
                sites = (Site(site.module, Role.INPUT) for site in parameter.sites)
                quantizers |= dict.fromkeys(sites, quantizer)
    is_mx = any(each.power_of_two and each.block == MX_BLOCK for each in quantizers.values())
    if is_mx and numerics.mx_inputs_always_quantized:
        about_mx = "inputs of MXFP8 are quantized as on Blackwell and gfx95x; on other GPUs "
        notes = (f"{about_mx}{numerics.name} leaves them in 16 bits", *notes)
    return Candidate(quantizers=quantizers, weights=(*changes, *copied), notes=tuple(notes))


def _find_rounded(geometry: ModelGeometry, numerics: Numerics) -> Callable[[str], bool]:
    """Find for which parameters the engine rounds scales of blocks and groups to powers of two.

    A parameter that is not of a linear of the geometry is assumed to have sizes that fit.
    """
    if not numerics.group_scales_power_of_two or geometry.checkpoint_dtype == "float16":
        return lambda _name: False
    fused: dict[str, list[Linear]] = defaultdict(list)
    for _, linear in geometry.linears():
        if not linear.num_experts:
            fused[name_fused_group(linear.module)].append(linear)
    rows_of, columns_of = numerics.power_of_two_sizes
    kept = {
        linear.weight_name
        for members in fused.values()
        for linear in members
        if sum(each.out_features for each in members) % rows_of or linear.in_features % columns_of
    }
    return lambda name: name not in kept


def _quantize_inputs(
    scheme: StoredScheme, fmt: Fp8Format, numerics: Numerics, *, is_rounded: bool
) -> Quantizer | None:
    """Quantize inputs as the engine does."""
    kind = scheme.inputs
    if ("mxfp8" if scheme.is_mx else "fp8") in numerics.unmultiplied:
        return None
    if scheme.is_mx:
        is_quantized = kind is InputScaling.GROUP or numerics.mx_inputs_always_quantized
        mx = Quantizer(fmt=fmt, scale=Granularity.GROUP, block=MX_BLOCK, power_of_two=True)
        return mx if is_quantized else None
    if kind is InputScaling.NONE:
        return None
    if kind is InputScaling.STATIC:
        assert scheme.input_scale is not None  # noqa: S101 -- refused where it is missing
        return Quantizer(
            fmt=fmt,
            scale=torch.tensor(scheme.input_scale),
            by_reciprocal=numerics.input_by_reciprocal,
        )
    is_group = kind is InputScaling.GROUP
    smallest = numerics.smallest_group_scale if is_group else numerics.smallest_dynamic_scale
    return Quantizer(
        fmt=fmt,
        scale=Granularity.GROUP if is_group else Granularity.TOKEN,
        smallest_scale=max(smallest, SMALLEST_SCALE),
        largest_amax=scheme.upper_bound,
        by_reciprocal=numerics.token_by_reciprocal and not is_group,
        scale_by_reciprocal=numerics.token_scale_by_reciprocal and not is_group,
        power_of_two=is_rounded and is_group,
    )


# --- planned: matched with the parameters of a model ------------------------------------------


def emulate_planned(
    settings: PlanSettings,
    selection: Selection,
    geometry: ModelGeometry,
    source: WeightSource,
    numerics: Numerics,
    *,
    fmt: Fp8Format = E4M3FN,
    scale_input: Callable[[Linear], torch.Tensor] | None = None,
) -> Candidate:
    """Emulate the parameters of a model that are made from the tensors that a plan quantizes.

    Fused groups of the decoder layers come first, then what no hook sees the inputs of: linears
    outside the layers, experts that multiply by their weights themselves. Weights that engines fuse
    share their scales. `selection`, made for the checkpoint of `source`, may also be one that
    `quantize` refuses; `scale_input` gives the static scale of a linear's input.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    model = source.model
    matrices: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in selection.quantized:
        matrices[matrix.source].append(matrix)
    selected = {*matrices, *selection.unsplit}
    linears = {linear.module: linear for _, linear in geometry.linears()}
    groups = defaultdict[str, list[WeightParameter]](list)
    schemes: dict[str, Scheme] = {}
    unseen: list[str] = []
    missed: dict[str, None] = {}
    known = {parameter.name: parameter for parameter in find_parameters(geometry, model)}
    others = (n for n, _ in model.named_parameters() if n not in known and is_of_decoder(n, model))
    for name in (*known, *others):
        tensors = source.tensor_names([name])
        if not (chosen := tensors & selected):
            continue
        if chosen != tensors:
            raise VerificationError(
                f"{name} would be FP8 in part: `quantize` writes {min(chosen)} in FP8, and not "
                f"{min(tensors - chosen)}"
            )
        parameter = known.get(name) or _describe_other(name, source, matrices)
        if parameter is None:
            missed[name.rpartition(".")[0]] = None
            continue
        # all matrices of a weight have one scheme, as engines need it
        first = matrices.get(min(chosen), ())
        schemes[name] = settings.scheme_of(first[0].module if first else min(chosen))
        if not parameter.sites and schemes[name].inputs is not InputScaling.NONE:
            unseen.append(name)
        inside = [matrix for tensor in chosen for matrix in matrices.get(tensor, ())]
        parts = max(1, len(inside) // max(1, parameter.num_experts))
        # A per-tensor scale is shared by what is fused; experts have their own, and projections
        # that the checkpoint stores in one tensor share that of the tensor.
        is_whole = name in known and len(inside) == 1 and not parameter.num_experts
        group = inside[0].fused_group if is_whole else name
        groups[group].append(replace(parameter, num_parts=parts))

    def quantize(group: list[WeightParameter]) -> tuple[Requantized, Mapping[str, StoredScheme]]:
        first, inputs = group[0], {}
        scheme = schemes[first.name]
        for parameter in group:
            scales = []
            if scale_input is not None and scheme.has_static_inputs:
                scales = [float(scale_input(linears[site.module])) for site in parameter.sites]
            # experts share the largest
            scale = max(scales, default=None)
            inputs[parameter.name] = replace(StoredScheme.of(scheme), input_scale=scale)
        passes = numerics.weights_through_float16 and scheme.weights is Granularity.TENSOR
        change = Requantized(
            parameters=tuple(group),
            quantizer=Quantizer(
                fmt=fmt,
                scale=scheme.weights,
                block=scheme.block,
                power_of_two=scheme.has_power_of_two_scales,
                smallest_scale=SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE,
            ),
            through_float16=passes and not (first.num_experts and len(first.sites) == 1),
            stored=source if any(_is_rounded(each.name, source) for each in group) else None,
        )
        return change, inputs

    weights = [quantize(group) for group in groups.values()]
    notes = []
    if selection.refusal is not None:
        notes.append(f"`quantize` does not write this model: {selection.refusal.message}")
    if unseen:
        notes.append(f"{cut_list(sorted(unseen), 1)}: {_NO_LINEAR}")
    if missed:
        notes.append(f"not quantized here, though an engine may: {cut_list(list(missed), 1)}")
    return emulate_linears(weights, fmt, geometry, numerics, notes=notes)


def _describe_other(
    name: str, source: WeightSource, matrices: dict[str, list[Matrix]]
) -> WeightParameter | None:
    """Describe a parameter that belongs to no linear of a layer; None if that is not known."""
    module = source.model.get_submodule(name.rpartition(".")[0])
    plain = WeightParameter(name=name)
    if is_linear(module):
        return replace(plain, is_transposed=is_transposed(module))
    inside = matrices.get(source.single_tensors.get(name, ""), ())
    stacked = [matrix for matrix in inside if matrix.stack]
    if not stacked:
        return None
    num_experts = 1 + max(matrix.expert for matrix in stacked)
    return replace(plain, is_transposed=stacked[0].is_transposed, num_experts=num_experts)


def _is_rounded(name: str, source: WeightSource) -> bool:
    """Tell whether the dtype of the model lacks numbers of the checkpoint's."""
    own = source.model.get_parameter(name).dtype
    entries = (source.source.tensors[each] for each in source.tensor_names([name]))
    return any(torch.promote_types(TORCH_DTYPES[entry.dtype], own) != own for entry in entries)


# --- stored: a checkpoint is matched with the model that it was made from ---------------------


def emulate_stored(
    checkpoint: Fp8Checkpoint,
    original: Checkpoint,
    geometry: ModelGeometry,
    source: WeightSource,
    numerics: Numerics,
) -> Candidate:
    """Emulate the FP8 weights of a checkpoint, and what else differs from the `original`.

    FP8 weights of the text decoder that belong to no linear of a layer are only copied. Those
    outside the decoder are left out. `source` reads the checkpoint.
    """
    model, folder, others = source.model, checkpoint.folder, dict(source.model.named_parameters())
    read = checkpoint.read_clip_limits  # merged and renamed as the weights are
    limits = source.reading_from(
        SimpleNamespace(folder=folder, tensors=checkpoint.tensors, read=read, read_rows=read)
    )
    weights: list[tuple[HeldWeight, Mapping[str, StoredScheme]]] = []
    for parameter in find_parameters(geometry, model):
        tensors = sorted(_list_tensors(parameter.name, source))
        unquantized = [name for name in tensors if name not in checkpoint.quantized]
        if unquantized and len(unquantized) < len(tensors):
            raise ModelError(f"{folder}: {parameter.name} is FP8 in part: {unquantized[0]} is not")
        if unquantized:
            continue
        others.pop(parameter.name, None)
        scales = torch.cat([checkpoint.weight_scale(name).flatten() for name in tensors])
        per = checkpoint.scheme(tensors[0]).weights
        change = HeldWeight(
            parameters=(parameter,),
            source=source,
            fmt=checkpoint.fmt,
            clip_limits=limits,
            scales=(per, float(scales.min()), float(scales.max())),
        )
        inputs = _join_inputs(parameter.name, tensors, checkpoint)
        weights.append((change, {parameter.name: inputs}))
    if not weights:
        raise ModelError(
            f"{folder}: none of its FP8 weights belongs to a linear of the model",
            hint="name the model that the checkpoint was made from",
        )
    inside = sorted(name for name in others if is_of_decoder(name, model))
    # No FP8 scheme changes these, and all candidates are scored with the unquantized model's head.
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = [module.weight for module in embeddings if module is not None]
    names = [name for name, value in model.named_parameters() if any(value is w for w in ends)]
    for end in sorted(source.tensor_names(names)):
        if end in checkpoint.quantized:
            raise ModelError(
                f"{folder}: {end} is an embedding or the output head, which are not emulated in "
                "FP8",
                hint="exclude lm_head and embeddings from quantization, as every tool does by "
                "default",
            )
        is_stored_alike = end in original.tensors and original.dtype(end) == checkpoint.dtype(end)
        if is_stored_alike and _is_changed(end, checkpoint, original):
            raise ModelError(
                f"{folder}: its {end} is not that of the model",
                hint="pass the model that the checkpoint was made from",
            )
    copied = [
        HeldWeight(parameters=(WeightParameter(name=name),), source=source, fmt=checkpoint.fmt)
        for name in inside
        if any(_is_changed(each, checkpoint, original) for each in _list_tensors(name, source))
    ]
    notes = []
    quantized = sorted(
        name for name in others if source.tensor_names([name]) & checkpoint.quantized
    )
    if unseen := [name for name in quantized if name in inside]:
        notes.append(f"{cut_list(unseen, 1)}: {_NO_LINEAR}")
    if beside := [name for name in quantized if name not in inside]:
        notes.append(f"not compared, as it is outside the text decoder: {cut_list(beside, 1)}")
    return emulate_linears(
        *(weights, checkpoint.fmt, geometry, numerics), copied=copied, notes=notes
    )


def _is_changed(name: str, checkpoint: Checkpoint, original: Checkpoint) -> bool:
    """Tell whether any byte differs: a fine-tune may change a few rows of an embedding only."""
    own, other = checkpoint.tensors[name], original.tensors.get(name)
    if other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
        return True
    for start in range(0, own.size_bytes, _BYTES_AT_ONCE):
        stop = min(start + _BYTES_AT_ONCE, own.size_bytes)
        mine, theirs = (each.read_array(name, start, stop) for each in (checkpoint, original))
        if not np.array_equal(mine, theirs):
            return True
    return False


def _list_tensors(parameter: str, source: WeightSource) -> frozenset[str]:
    """List the tensors that a parameter is made from; there must be one."""
    if names := source.tensor_names([parameter]):
        return names
    strangers = ", ".join(source.unused[:3]) or "none"
    raise ModelError(
        f"{source.source.folder}: there is no weight for {parameter}",
        hint=f"tensors there that the model does not have: {strangers}",
    )


def _join_inputs(parameter: str, tensors: Iterable[str], checkpoint: Fp8Checkpoint) -> StoredScheme:
    """Give how the config quantizes the inputs of a weight; experts share the largest scale."""
    found = {checkpoint.scheme(name) for name in tensors}
    kinds = {each.inputs for each in found}
    if len(kinds) > 1:
        raise ModelError(
            f"{checkpoint.folder}: the inputs of {parameter} are quantized in {len(kinds)} ways: "
            f"{', '.join(sorted(kinds))}"
        )
    scales = [each.input_scale for each in found if each.input_scale is not None]
    bounds = [each.upper_bound for each in found if each.upper_bound is not None]
    one, bound = next(iter(found)), max(bounds, default=None)
    return replace(one, input_scale=max(scales, default=None), upper_bound=bound)
