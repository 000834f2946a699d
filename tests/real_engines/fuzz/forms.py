"""The forms in which checkpoints hold KV scales and FP8 weights, with random scales."""

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.fp8.registry import FP8_DIALECTS, list_written_fp8
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.formats.write import write_table
from fp8calib.model.geometry import KV_ROLES, ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.model.module_paths import span_experts
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import find_scheme
from fp8calib.quantization.plan import CalibratedScales
from fp8calib.quantization.select import find_selection
from tests.engines.check_handmade import FP8, MODELOPT, PER_TENSOR, QUARK
from tests.quantization.by_hand import run
from tests.real_engines.fuzz.draft import Draft, load_draft

Write = Callable[[Path, Path, Random], Draft]
"""From the model's folder and an empty one, make the checkpoint."""
_OWN_FILE = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
_KV_ONLY = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to store scales."""

    name: str
    method: str
    """The `quant_method`; empty where there is no quantization_config."""
    write: Write
    scheme: str = ""
    """The scheme of FP8 weights; empty where the weights are not FP8."""
    has_kv: bool = True


def draw_scale(random: Random) -> float:
    """Draw a scale that bfloat16 and float16 do not hold exactly."""
    return float(torch.tensor(2 ** random.uniform(-9, -1), dtype=torch.float32))


def open_geometry(model: Path) -> ModelGeometry:
    """Find where a model's layers are."""
    return read_geometry(model, json.loads((model / "config.json").read_text()))


def _list_attentions(geometry: ModelGeometry) -> list[tuple[int, str]]:
    return [(layer.index, pair.checkpoint_module) for layer, pair in geometry.attentions()]


def _write_dialect(name: str, *, per_head: bool = False) -> Write:
    """Make the writer of one of the program's own dialects."""

    def write(model: Path, out: Path, random: Random) -> Draft:
        geometry = open_geometry(model)
        scales = {}
        for _, attention in geometry.attentions():
            for role in KV_ROLES:
                heads = attention.num_kv_heads if per_head else 1
                values = torch.tensor([[draw_scale(random) for _ in range(heads)]])
                values = values if per_head else values.reshape(1)
                scales[attention.site(role)] = Scale(values=values, source="observed")
        table = ScaleTable(geometry=geometry, fmt=E4M3FN, tp=1, per_head=per_head, scales=scales)
        with Checkpoint.open(model) as source:
            write_table(table, name, out, source=source)
        return load_draft(out, random, _list_attentions(geometry))

    return write


def _write_names(
    *suffixes: str,
    config: Mapping[str, Any] | None = None,
    own_file: Mapping[str, Any] | None = None,
) -> Write:
    """Make the writer of scales under these ends of names, beside unquantized weights."""

    def write(model: Path, _: Path, random: Random) -> Draft:
        draft = load_draft(model, random, _list_attentions(open_geometry(model)))
        for _, path in draft.attentions:
            for suffix in suffixes:
                draft.put(f"{path}.{suffix}", torch.tensor([draw_scale(random)]))
        linears = _list_linears(draft)
        if config is not None:
            draft.config["quantization_config"] = _exclude(config, linears)
        if own_file is not None:
            draft.own_file = copy.deepcopy(dict(own_file))
            draft.own_file["quantization"]["exclude_modules"] = ["*"]
        return draft

    return write


def _exclude(config: Mapping[str, Any], linears: list[str]) -> dict[str, Any]:
    """Leave all linears unquantized, as the method spells it."""
    excluded = {
        "fp8": {"ignored_layers": linears},
        "modelopt": {"ignore": ["*"]},
        "quark": {"exclude": linears},
    }
    return copy.deepcopy({**config, **excluded.get(config["quant_method"], {})})


def _list_linears(draft: Draft) -> list[str]:
    """List the paths of everything that may be a linear in an engine."""
    names = ["lm_head"]
    for name in draft:
        if draft[name].dim() >= 2:
            names.append(name.removesuffix(".weight"))
            head, found, _ = name.replace(".input_linear", ".experts").partition(".experts")
            names += [head + found] if found else []
    return list(dict.fromkeys(names))


def _write_fp8(dialect: str, scheme: str, *, has_kv: bool) -> Write:
    """Make the writer of FP8 weights by `quantize`."""

    def write(model: Path, out: Path, random: Random) -> Draft:
        geometry = open_geometry(model)
        chosen = FP8_DIALECTS[dialect]
        with Checkpoint.open(model) as source:
            matrices = find_selection(source).require().quantized
            names: dict[str, torch.Tensor] = {}
            for (_, pair), role in itertools.product(geometry.attentions(), KV_ROLES):
                has_projections = f"{pair.checkpoint_module}.k_proj.weight" in source.tensors
                spelled = chosen.name_kv(geometry, pair, role, has_projections)
                names |= dict.fromkeys(spelled, torch.tensor(draw_scale(random)))
        groups = [span_experts(matrix.fused_group) for matrix in matrices]
        shared = {group: torch.tensor(draw_scale(random)) for group in dict.fromkeys(groups)}
        inputs = {m.module: shared[group] for m, group in zip(matrices, groups, strict=True)}
        has_inputs = find_scheme(scheme).has_static_inputs
        scales = CalibratedScales(inputs=inputs if has_inputs else {}, kv=names if has_kv else {})
        run(model, out, scheme, dialect, scales=scales)
        return load_draft(out, random, _list_attentions(geometry))

    return write


_PAIR = ("k_scale", "v_scale")
_PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
_OUTPUTS = ("k_proj.output_scale", "v_proj.output_scale")
_CACHES = ("k_cache.scale", "v_cache.scale")
_INNER = ("attn.k_scale", "attn.v_scale")
_CT = "compressed-tensors"

_KV_FORMS = (
    Form(name="kv-overlay", method=_CT, write=_write_dialect("kv-overlay")),
    Form(
        name="kv-overlay-head", method=_CT, write=_write_dialect("kv-overlay-head", per_head=True)
    ),
    Form(name="tgi", method="", write=_write_dialect("tgi")),
    Form(name="bare", method="", write=_write_names(*_PAIR)),
    Form(name="ct-kv_scale", method=_CT, write=_write_names("kv_scale", config=PER_TENSOR)),
    Form(
        name="ct-modelopt-names", method=_CT, write=_write_names(*_PROJECTIONS, config=PER_TENSOR)
    ),
    Form(name="ct-cache-names", method=_CT, write=_write_names(*_CACHES, config=PER_TENSOR)),
    Form(name="ct-inner-names", method=_CT, write=_write_names(*_INNER, config=PER_TENSOR)),
    Form(name="fp8", method="fp8", write=_write_names(*_PAIR, config=FP8)),
    Form(name="fp8-kv_scale", method="fp8", write=_write_names("kv_scale", config=FP8)),
    Form(name="fp8-quark-names", method="fp8", write=_write_names(*_OUTPUTS, config=FP8)),
    Form(
        name="modelopt",
        method="modelopt",
        write=_write_names(*_PROJECTIONS, config=MODELOPT, own_file=_OWN_FILE),
    ),
    Form(name="modelopt-pair", method="modelopt", write=_write_names(*_PAIR, config=MODELOPT)),
    Form(
        name="modelopt-own-file", method="", write=_write_names(*_PROJECTIONS, own_file=_OWN_FILE)
    ),
    Form(
        name="modelopt-kv-only",
        method="modelopt",
        write=_write_names(*_PROJECTIONS, config=_KV_ONLY),
    ),
    Form(name="quark", method="quark", write=_write_names(*_OUTPUTS, config=QUARK)),
)
_FP8_FORMS = tuple(
    Form(
        name=f"{dialect.name}/{scheme}{'+kv' if has_kv else ''}",
        method=dialect.method,
        scheme=scheme,
        has_kv=has_kv,
        write=_write_fp8(dialect.name, scheme, has_kv=has_kv),
    )
    for dialect in list_written_fp8()
    for scheme in dialect.schemes
    for has_kv in (False, True)
)
FORMS: Mapping[str, Form] = {form.name: form for form in (*_KV_FORMS, *_FP8_FORMS)}
