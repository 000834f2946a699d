"""Which names of scales stop vLLM's weight loader is what `check` says, name by name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import ScaleFolder, open_folder
from fp8calib.engines.status import Status
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.architectures import families
from tests.engines.check_handmade import PER_TENSOR, QUARK
from tests.engines.test_check_vllm_loader import ELSEWHERE, IN_ATTENTION
from tests.kit.checkpoints import change_config
from tests.real_engines.exports import HEADS, LATENT, WIDTH
from tests.real_engines.vllm_job import ForkServer

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": WIDTH,
    "mistral": WIDTH,
    "qwen2": WIDTH,
    "qwen3": HEADS,
    "gemma2": HEADS,
    "gpt2": WIDTH,
    "gpt_neox": WIDTH,
    "falcon": WIDTH,
    "opt": {**WIDTH, "word_embed_proj_dim": 128},
    "starcoder2": WIDTH,
    "mixtral": WIDTH,
    "qwen3_moe": HEADS,
    "qwen3_next": HEADS,
    "deepseek_v3": LATENT,
    "jamba": WIDTH,
}
"""Model types, and the changes with which vLLM takes them on a CPU."""
Outcomes = Mapping[str, list[str] | str]
"""By name: the parameters that a tensor is loaded into, or the error."""
METHODS = ("none", "compressed-tensors", "fp8", "quark")
COMPANIONS = ("input_scale", "weight_scale", "output_scale", "k_scale", "weight_zero_point")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Outcomes]:
    """Let vLLM's loaders try all names, model by model."""
    root = tmp_path_factory.mktemp("names")
    jobs: dict[Path, list[str]] = {}
    for family in MODELS:
        for method in METHODS:
            folder = root / f"{family}-{method}"
            _save(family, method, folder)
            jobs[folder] = _list_names(open_folder(folder), _read(folder))
    found: dict[Path, Outcomes] = {}
    with ForkServer(root / "log") as server:
        for folder, names in jobs.items():
            result = folder.with_suffix(".names")
            error = server.ask("names", result, model=folder, names=names)
            assert not error, (folder, error)
            found[folder] = json.loads(result.read_text())
    return found


def _save(family: str, method: str, folder: Path) -> None:
    if family in zoo.ZOO:
        zoo.save(family, folder, **MODELS[family])
    else:
        families.save(family, {**families.FAMILIES[family], **MODELS[family]}, folder)
    (names,) = open_folder(folder).tensors.values()
    ignored = [name.rpartition(".")[0] for name in names]
    if method != "none":
        change_config(folder, quantization_config=_make_config(method, ignored))


def _make_config(method: str, ignored: Sequence[str]) -> Mapping[str, object]:
    """Make a config that quantizes no weight."""
    if method == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ignored}
    if method == "quark":
        export = {**QUARK["export"], "pack_method": "reorder"}  # type: ignore[dict-item]
        return {**QUARK, "exclude": ignored, "export": export}
    return PER_TENSOR


def _read(folder: Path) -> ModelGeometry:
    return read_geometry(folder, open_folder(folder).config)


def _list_names(folder: ScaleFolder, geometry: ModelGeometry) -> list[str]:
    """List names to try; vLLM takes no v_scale without a k_scale, but only after loading."""
    paths = [attention.checkpoint_module for _, attention in geometry.attentions()]
    (stored,) = folder.tensors.values()
    modules = {name.rpartition(".")[0] for name in stored if name.endswith(".weight")}
    names = [f"{path}.{suffix}" for path in paths for suffix in IN_ATTENTION]
    names += [f"{module}.{suffix}" for module in sorted(modules) for suffix in COMPANIONS]
    loaded_alone = [name for name in names if not name.endswith("v_proj.output_scale")]
    return [*dict.fromkeys([*loaded_alone, *ELSEWHERE])]


def _ask(path: Path, geometry: ModelGeometry, name: str) -> bool:
    """Say whether `check` says that vLLM refuses the folder with this tensor in a second file."""
    save_file({name: torch.tensor([0.25])}, path / "scale.safetensors")
    report = check_folder(open_folder(path), geometry, ["vllm==0.32"], 1)["vllm==0.32"]
    return report.layers[0].k.status is Status.REFUSED


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", MODELS)
def test_check_refuses_the_names_that_stop_the_loader(
    answers: Mapping[Path, Outcomes], family: str, method: str
) -> None:
    path = next(path for path in answers if path.name == f"{family}-{method}")
    geometry, outcomes = _read(path), answers[path]
    assert len(outcomes) > len(IN_ATTENTION)

    found = {name: _ask(path, geometry, name) for name in outcomes}

    assert found == {name: isinstance(outcome, str) for name, outcome in outcomes.items()}
