"""Print as JSON what a release of SGLang does with KV scales, by its own code.

python -m tests.real_engines.sglang_survey
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout

import torch

from tests.engines.check_handmade import spell
from tests.real_engines import test_sglang_models as newest
from tests.real_engines.sglang_attention import gives_scales_a_place
from tests.real_engines.sglang_loader import list_models_with_scales
from tests.real_engines.sglang_models import _parse, hold_kv_scales, load, read_classes

QUANTIZATION = "sglang/srt/layers/quantization/"
CONFIGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "compressed-tensors": (
        "compressed_tensors/compressed_tensors.py",
        ("CompressedTensorsConfig",),
    ),
    "fp8": ("fp8.py", ("Fp8Config",)),
    "modelopt": ("modelopt_quant.py", ("ModelOptFp8Config", "ModelOptQuantConfig")),
    "quark": ("quark/quark.py", ("QuarkConfig",)),
}
"""By method: the file and the classes of its config; the second is a base of the first."""


def main() -> None:
    """Run the loaders of all models on the names of scales."""
    with redirect_stdout(sys.stderr):  # some loaders print
        found = list_found()
    json.dump(found, sys.stdout)


def list_found() -> dict[str, object]:
    """Collect everything."""
    return {
        "models": {name: survey(name) for name in newest.MODELS if is_there(newest.MODELS[name])},
        "wrappers": {
            name: survey_wrapper(name)
            for name in newest.WRAPPERS
            if is_there(newest.WRAPPERS[name][0])
        },
        "places": {
            name: gives_scales_a_place(architecture)
            for name, architecture in (newest.MODELS | newest.OTHERS).items()
            if is_there(architecture)
        },
        "files": sorted(list_models_with_scales()),
        "methods": [method for method in CONFIGS if gives_parameters(method)],
        "zeros": hold_zeros(),
    }


def is_there(architecture: str) -> bool:
    """Tell whether the release has a class."""
    return architecture in read_classes()


def survey(name: str) -> dict[str, str]:
    """Give what becomes of each spelling in a text model."""
    architecture = newest.MODELS[name]
    path = "model.layers.{}" + ("" if name in newest.STRIPPED else ".self_attn")
    places = spell("attn.k_scale", "attn.v_scale", path=path)
    places = places if gives_scales_a_place(architecture) else {}
    return {
        spelling: newest.find_outcome(
            lambda leaves=leaves: load(architecture, newest.to_tensors(spell(*leaves)), places),
            places,
            spelling,
        )
        for spelling, leaves in newest.SPELLINGS.items()
    }


def survey_wrapper(name: str) -> dict[str, str]:
    """Give what becomes of each spelling in a model with other inputs."""
    architecture, _, text = newest.WRAPPERS[name]
    places = newest.find_wrapped_places(architecture)

    def run(leaves: tuple[str, ...]) -> Callable[[], Mapping[str, object]]:
        scales = newest.to_tensors(spell(*leaves, path="model.language_model.layers.{}.self_attn"))
        return lambda: load(architecture, scales, places, text=text)

    return {
        spelling: newest.find_outcome(run(leaves), places, spelling)
        for spelling, leaves in newest.SPELLINGS.items()
    }


def gives_parameters(method: str) -> bool:
    """Tell whether a method's config gives attention a method of its own."""
    file, names = CONFIGS[method]
    classes = (
        node
        for node in _parse(QUANTIZATION + file).body
        if isinstance(node, ast.ClassDef) and node.name in names
    )
    return any("RadixAttention" in ast.unparse(node) for node in classes)


def hold_zeros() -> list[float] | str:
    """Give what a layer multiplies by, whose scales are zero."""
    try:
        return list(hold_kv_scales(torch.tensor(0.0), torch.tensor(0.0)))
    except AssertionError:
        return "refused"


if __name__ == "__main__":
    main()
