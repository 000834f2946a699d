"""What the installed transformers does with the KV scales and the FP8 weights of a folder.

Its own loader answers (`loader.py`). Read here is what it does without a word: scales that no
attention module has a parameter for, rounding to the model's dtype, memory that nobody set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature

import numpy as np
import torch
from numpy.typing import NDArray

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.replay.declared import amend_for_dtype
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.loaded_scales import LoadContext
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Slot,
    Unjudged,
    is_scale,
    judge_number,
    report_refusal,
)
from fp8calib.engines.status import Status
from fp8calib.engines.transformers.loader import find_run_error, load_on_meta
from fp8calib.engines.weights.layers import PLAIN_DTYPES
from fp8calib.engines.weights.stored import read_scale_values
from fp8calib.errors import shorten
from fp8calib.formats.fp8.compressed_tensors import MX_FORMAT
from fp8calib.formats.fp8.match_scales import EXPONENT_DTYPES
from fp8calib.formats.fp8.registry import list_scale_names
from fp8calib.formats.fp8.weights import (
    WEIGHT_FORMATS,
    is_companion,
    is_linear_scale,
    name_weight_scales,
)
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.geometry import KV_ROLES, Attention, ModelGeometry
from fp8calib.model.module_paths import span_experts, split_expert

_FP8_DTYPES = {TORCH_DTYPES[name] for name in WEIGHT_FORMATS}
_RENAMED_SCALES = ("scale", "qscale_weight")
"""What transformers 5.23 renames to weight_scale_inv (quantizers/quantizer_finegrained_fp8.py)."""
_CONFIG_FIX = "write the quantization_config of kv-overlay"
_WEIGHT_FIX = "complete the checkpoint, or serve it with another engine"
_RUN_FIX = "serve it with another engine, or quantize it by another scheme"
_RENAMED = "compressed-tensors 0.20 finds no attention: its forward takes no past_key_values"
"""compressed-tensors 0.20 `quantization/lifecycle/initialize.py`, run with transformers 5.24, whose
classes call the argument `cache`."""
_SINCE_RENAMED = (
    "transformers 5.24 uses no KV scale: it renamed an argument by which compressed-tensors 0.20 "
    "finds attention"
)
_SHARED = "scales of layers that read another layer's cache are unexpected: that layer's count"
_UNSET = "the scale is MISSING, and the parameter holds uninitialised memory"
_FNUZ = "compressed-tensors quantizes to e4m3fn, for which the scale is twice too large"
_E5M2 = "compressed-tensors quantizes to e4m3fn with a scale that was made for e5m2"


def report_transformers(folder: ScaleFolder, geometry: ModelGeometry, _tp: int) -> EngineReport:
    """Report what `from_pretrained` with `dtype="auto"` does, in one process."""
    try:
        return _Report(folder, geometry).make()
    except Refusal as refusal:
        report = report_refusal(geometry, refusal)
        entries = (entry for file in folder.tensors.values() for entry in file.values())
        if isinstance(refusal, Unjudged) or not _have_weights(entries):
            return report
        verdict = LoadVerdict(status=Status.REFUSED, why=refusal.why, fix=refusal.fix)
        return report.model_copy(update={"weights": verdict})


class _Report:
    """The report on a model that was loaded."""

    def __init__(self, folder: ScaleFolder, geometry: ModelGeometry) -> None:
        self._folder = folder
        self._model, loading, opened, self._filled = load_on_meta(folder)
        self._missing: set[str] = set(loading["missing_keys"])
        """The parameters that no tensor filled."""
        self._unexpected: set[str] = set(loading["unexpected_keys"])
        """The tensors that filled no parameter, by the names that transformers gave them."""
        self._files = tuple(opened)
        self._read = {name: file for file, names in opened.items() for name in names}
        self._sources = {self._filled[name]: name for name in self._read if name in self._filled}
        """By parameter: the tensor that filled it alone."""
        self._context = LoadContext(folder, geometry, self._files)
        section = folder.config.get("quantization_config")
        self._section: Mapping[str, object] = section if isinstance(section, dict) else {}
        self._is_mx = self._section.get("quant_method") == "mxfp8"
        self._stored = {
            name: folder.tensors[file][name] for name, file in sorted(self._read.items())
        }
        """The tensors that filled a parameter, or a part of one."""

    def _find_module(self, path: str) -> torch.nn.Module | None:
        """Find a module; None where the model has none of that path."""
        try:
            return self._model.get_submodule(path)
        except AttributeError:
            return None

    def _find_parameter(self, name: str) -> torch.Tensor | None:
        """Find a parameter or a buffer by its name or the tensor's; None where there is none."""
        module, _, leaf = self._filled.get(name, name).rpartition(".")
        found = getattr(self._find_module(module), leaf, None)
        return found if isinstance(found, torch.Tensor) else None

    def make(self) -> EngineReport:
        """Make it; raise `Refusal` where the model does not run."""
        context = self._context
        for name in sorted(each for each in self._missing if each.endswith(".weight")):
            parameter = self._find_parameter(name)
            if parameter is not None and parameter.dtype in _FP8_DTYPES:
                why = f"{shorten(name)} is missing, and random FP8 numbers cannot be made"
                raise Refusal(why, fix=_WEIGHT_FIX)
        if SINGLE_FILE_NAME in self._files and self._folder.has_index:
            what = f"transformers reads {SINGLE_FILE_NAME} and ignores {INDEX_NAME}"
            context.problems.append(what)
        layers = []
        for layer, reader in context.geometry.attentions():
            owner, attention = layer.index, reader
            if reader.producer is not None:
                context.problems.append(_SHARED)
                owner = reader.producer
                attention = context.geometry.layers[owner].attention or reader
            k, v = (self._judge((owner, role), attention) for role in KV_ROLES)
            layers.append(LayerVerdict(layer=layer.index, k=k, v=v))
        if any(Status.USED in (layer.k.status, layer.v.status) for layer in layers):
            context.problems.insert(0, _SINCE_RENAMED)
        report = context.report(layers, unread="reported as unexpected")
        report = report.add(problems=self._note_unexpected())
        report = amend_for_dtype(report, self._folder, fnuz=_FNUZ, e5m2=_E5M2)
        for status, faults in (
            (Status.MISREAD, self._list_weight_faults()),
            (Status.BAD, self._list_bad_scales()),
        ):
            if report.weights is None and (fault := next(faults, None)):
                verdict = LoadVerdict(status=status, why=fault, fix=_WEIGHT_FIX)
                report = report.model_copy(update={"weights": verdict})
        # The last, because it decompresses the weights.
        is_quantized = bool(self._folder.config.get("quantization_config"))
        if is_quantized and (error := find_run_error(self._model)):
            raise Refusal(f"the first forward pass fails: {error}", fix=_RUN_FIX)
        return report

    def _judge(self, slot: Slot, attention: Attention) -> LoadVerdict:
        context = self._context
        own = f"{attention.module}.{slot[1]}_scale"
        name, parameter = self._filled.get(own, own), self._find_parameter(own)
        if parameter is None:
            why = "reported as unexpected, and the cache is not quantized"
            module = self._find_module(attention.module)
            arguments = {"past_key_value", "past_key_values"}
            if module is not None and arguments.isdisjoint(signature(module.forward).parameters):
                why = f"{why}: {_RENAMED}"
            verdict = context.judge_absent(slot, why, _CONFIG_FIX)
            return verdict.model_copy(update={"value": None})
        read = self._sources.get(name)
        stored = None if read is None else self._folder.scales[self._read[read]].get(read)
        if name in self._missing or stored is None:
            verdict = context.judge_absent(slot, _UNSET, _CONFIG_FIX, value=None)
            why = verdict.why if _UNSET in verdict.why else f"{verdict.why}; {_UNSET}"
            return verdict.model_copy(update={"why": why})
        if f"{name.removesuffix('scale')}zero_point" in self._missing:
            why = f"{stored}: the scheme is asymmetric, and the zero point is MISSING"
            return LoadVerdict(status=Status.MISREAD, why=f"{why} (uninitialised)", fix=_CONFIG_FIX)
        values = torch.tensor(stored.values).to(parameter.dtype).float().tolist()
        if parameter.dtype is not torch.float32:
            name = str(parameter.dtype).removeprefix("torch.")
            context.problems.append(f"scales are rounded to the model's {name}")
        bad = [value for value in values if not is_scale(value)]
        heads = f"the largest of {len(values)} heads, " if len(values) != 1 else ""
        verdict = judge_number(bad[0] if bad else max(values), f"{heads}{stored}")
        scheme = self._section.get("kv_cache_scheme")
        fields = scheme if isinstance(scheme, dict) else {"type": ""}
        if (fields.get("type", "int"), int(fields.get("num_bits", 8))) != ("float", 8):
            why = f"{stored}: kv_cache_scheme is not FP8"
            update = {"status": Status.MISREAD, "why": why, "fix": _CONFIG_FIX}
            return verdict.model_copy(update=update)
        return verdict

    def _note_unexpected(self) -> Iterator[str]:
        """Note the tensors that are left out, but for scales of K and V, which have verdicts."""
        found = sorted(name for name in self._unexpected if parse_name(name) is None)
        if found:
            others = f"{len(found)} tensors, such as {shorten(found[0])}"
            yield f"{others}, have no parameter: they are UNEXPECTED and left out"
        opened = [self._folder.tensors.get(file, {}) for file in self._files]
        several = [name for name in self._read if sum(name in held for held in opened) > 1]
        if several:
            first = shorten(sorted(several)[0])
            yield f"{first} is in several files: transformers keeps the last one"

    def _list_weight_faults(self) -> Iterator[str]:
        """List what makes weights wrong without an error."""
        missing = sorted(name for name in self._missing if parse_name(name) is None)
        for name in missing if _have_weights(self._context.tensors.values()) else ():
            what = "uninitialised memory" if is_linear_scale(name) else "random numbers, or ones"
            yield f"{shorten(name)} is missing: transformers reports it MISSING, and uses {what}"
        yield from self._list_lost_biases()
        for name, entry in self._stored.items():
            yield from self._list_dtype_faults(name, entry)
            yield from self._list_scaling_faults(name, entry)
            yield from self._list_spread_faults(name)
        yield from self._list_joined_faults()

    def _list_lost_biases(self) -> Iterator[str]:
        """List biases, not of zeros, of modules that the config gives none."""
        for name, parameter in sorted(self._filled.items()):
            if parameter not in self._unexpected or not parameter.endswith(".bias"):
                continue
            module = self._find_module(parameter.removesuffix(".bias"))
            file = next((file for file in self._files if name in self._folder.tensors[file]), None)
            weight = getattr(module, "weight", None)
            if file is None or weight is None:
                continue
            is_its_own = self._folder.tensors[file][name].shape == tuple(weight.shape[:1])
            if is_its_own and self._read_floats(file, name).any():
                yield f"{shorten(name)} is left out: its module has no bias by config.json"

    def _read_floats(self, file: str, name: str) -> NDArray[np.float32]:
        with TensorFile(self._folder.path / file) as opened:
            return opened.read_floats(name)

    def _list_bad_scales(self) -> Iterator[str]:
        inputs = list_scale_names(of_inputs=True)
        used = {  # joined experts need no scales of their inputs
            name: (self._read[name], entry)
            for name, entry in self._stored.items()
            if not name.endswith(inputs) or self._find_parameter(name) is not None
        }
        bad, _, _ = read_scale_values(self._folder, used)
        for name, what in bad.items():
            yield f"{shorten(name)} holds {what}"

    def _list_dtype_faults(self, name: str, entry: TensorEntry) -> Iterator[str]:
        """List where values are cast to others, or taken for what they are not.

        MXFP8's scales are exponents in uint8; transformers 5.23 takes all other dtypes for scales
        (integrations/finegrained_fp8.py, _dequantize_one; run).
        """
        text = f"{shorten(name)} is {entry.dtype}"
        parameter, stored = self._find_parameter(name), TORCH_DTYPES[entry.dtype]
        module = self._find_module(self._filled.get(name, name).rpartition(".")[0])
        scheme = getattr(module, "quantization_scheme", None)
        is_float = getattr(getattr(scheme, "weights", None), "type", "float") == "float"
        has_exponents = is_linear_scale(name) and getattr(scheme, "format", None) == MX_FORMAT
        # FP4: two values in a byte, and exponents beside them in MXFP4
        is_packed = f"{name.rpartition('.')[0]}.weight_packed" in self._stored
        if parameter is None or len(entry.shape) != 2:
            pass
        elif is_float and has_exponents is stored.is_floating_point and not is_packed:
            # exponents with their bias of 127 are some 100, scales of weights far below 1
            if not has_exponents or (self._read_floats(self._read[name], name) <= 1).any():
                kind = "exponents" if has_exponents else "floats"
                yield f"{text}: transformers takes its values for {kind}"
        elif stored.itemsize == 1 and parameter.dtype.itemsize > 1 and scheme is not None:
            yield f"{shorten(name)} is FP8, but transformers uses its codes as the weight"
        elif parameter.dtype is torch.float8_e4m3fn and stored is not parameter.dtype:
            if stored.itemsize > 1:
                yield f"{text}, but the config quantizes it: it is cast to FP8"
            else:
                cast = "casts its values to float8_e4m3fn, where those above 448 are NaN"
                yield f"{text}: transformers {cast}"
        if self._is_mx and is_linear_scale(name) and entry.dtype not in EXPONENT_DTYPES:
            is_integer = not stored.is_floating_point
            if is_integer or (self._read_floats(self._read[name], name) > 1).any():
                yield f"{text}: transformers takes its values for scales"

    def _list_scaling_faults(self, name: str, entry: TensorEntry) -> Iterator[str]:
        """List an FP8 weight that is multiplied by no scale, or another one that is by a scale."""
        if len(entry.shape) < 2 or is_companion(name):
            return
        module = name.removesuffix(".weight")
        beside = (*name_weight_scales(name), *(f"{module}.{leaf}" for leaf in _RENAMED_SCALES))
        scale = next((each for each in beside if each in self._stored), "")
        if entry.dtype in WEIGHT_FORMATS and not scale:
            yield f"{shorten(name)} is FP8, but transformers uses its codes as the weight"
        if entry.dtype in PLAIN_DTYPES and scale and self._find_parameter(scale) is None:
            yield f"{shorten(name)} is {entry.dtype}, and transformers multiplies it by {scale}"

    def _list_spread_faults(self, name: str) -> Iterator[str]:
        """List scales of blocks that are spread evenly, but blocks are meant otherwise.

        transformers 5.23 integrations/finegrained_fp8.py (Fp8Dequantize), run on a CPU: a block's
        size is that of the weight divided by the number of scales. Of MXFP8 it is 32, or a part of
        that, whatever the config says.
        """
        module, _, leaf = name.rpartition(".")
        weight, scale = self._stored.get(f"{module}.weight"), self._stored[name].shape
        block = self._section.get("weight_block_size")
        if leaf != "weight_scale_inv" or weight is None or len(scale) != 2:
            return
        # two values of FP4 share a byte
        if not isinstance(block, list) or len(block) != 2 or weight.dtype not in WEIGHT_FORMATS:
            return
        for size, number, width in zip(weight.shape, scale, block, strict=True):
            is_wrong = number > 1 and number == -(-size // width) and bool(size % width)
            if self._is_mx:  # parts of a block may have exponents of their own
                is_wrong = 0 in (size, number) or bool(number * width % size or size % number)
            if is_wrong:
                yield f"{shorten(name)}: transformers spreads {number} scales evenly over {size}"

    def _list_joined_faults(self) -> Iterator[str]:
        """List the experts that transformers joins in one tensor without a scale for each of them.

        transformers 5.23 integrations/compressed_tensors.py (CompressedTensorsDequantize), run: it
        pairs weights and scales in their order.
        """
        numbers: dict[str, set[int]] = defaultdict(set)
        for name in self._stored:
            expert = split_expert(name)
            if expert is not None and self._find_parameter(name) is None:
                numbers[span_experts(name)].add(expert[1])
        for name in sorted(numbers):
            if name.endswith(".weight_global_scale"):
                yield f"{shorten(name)} is left out: transformers joins experts without it"
            scales = [numbers[each] for each in name_weight_scales(name) if each in numbers]
            if scales and scales[0] != numbers[name]:
                counts = f"{len(numbers[name])} experts and {len(scales[0])} scales"
                yield f"{shorten(name)} has {counts}, which transformers gives to the first ones"


def _have_weights(entries: Iterable[TensorEntry]) -> bool:
    """Check whether files hold more than scales: those of a model whose weights are elsewhere."""
    return any(len(entry.shape) > 1 and 0 not in entry.shape for entry in entries)
