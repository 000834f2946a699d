"""Run what of SGLang runs alone: the loader of a model's class, and its KV cache method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.real_engines.fuzz.draw import Case
from tests.real_engines.fuzz.engines import list_tensors
from tests.real_engines.fuzz.forms import open_geometry
from tests.real_engines.fuzz.kv_damages import TENSOR_DAMAGES
from tests.real_engines.fuzz.observation import HeldPair, Observation
from tests.real_engines.sglang_attention import gives_scales_a_place
from tests.real_engines.sglang_models import hold_kv_scales, load, read_classes
from tests.real_engines.sglang_survey import MODELS, STRIPPED

_FORMS = (
    *("kv-overlay", "ct-kv_scale", "ct-modelopt-names", "ct-cache-names", "ct-inner-names"),
    *("fp8", "fp8-kv_scale", "fp8-quark-names", "modelopt", "modelopt-pair", "quark"),
)
"""Those whose config gives attention layers SGLang's KV cache method, and says nothing else."""
Tensors = dict[str, torch.Tensor]


def read_wheel() -> None:
    """Read all that SGLang's wheel is asked for, so that forks need not."""
    read_classes()
    for architecture in MODELS.values():
        gives_scales_a_place(architecture)
    hold_kv_scales(None, None)


def observe_sglang(case: Case, model: Path, original: Path) -> Observation | None:
    """Load the scales of a checkpoint.

    None where that takes more than the loader: for other classes and paths of attention, for FP8
    weights, and for whatever the config decides.
    """
    is_loader = TENSOR_DAMAGES.issuperset(case.damages) and case.form in _FORMS
    if not (is_loader and case.architecture in MODELS):
        return None
    paths = {
        layer.index: pair.checkpoint_module for layer, pair in open_geometry(model).attentions()
    }
    if any(path != f"model.layers.{index}.self_attn" for index, path in paths.items()):
        return None
    has_places = gives_scales_a_place(MODELS[case.architecture])
    weights = _read(original)
    scales = {name: tensor for name, tensor in _read(model).items() if name not in weights}
    places = _name_parameters(paths, is_stripped=case.architecture in STRIPPED)
    try:
        names = [name for pair in places.values() for name in pair if has_places]
        loaded = load(MODELS[case.architecture], scales, names)
        if None in loaded.values():
            return None
        layers = {
            index: hold_kv_scales(*(loaded.get(name) for name in pair))
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
