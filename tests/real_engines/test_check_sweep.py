"""What `check` knows of the linears of all tiny models: nothing wrong is fine, little is unknown.

`tests/engines/test_check_sweep.py` has the families that are tried by default.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.facts.classes import make_pattern
from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import Refusal, Unjudged
from fp8calib.engines.weights.linears import list_groups
from fp8calib.model.geometry_from_config import read_geometry
from tests import zoo
from tests.engines.test_check_sweep import is_fine
from tests.engines.test_check_weights import ask
from tests.kit.checkpoints import change_config
from tests.quantization.by_hand import run
from tests.real_engines.fuzz.draw import UNDRAWN
from tests.real_engines.fuzz.engines import VllmObserver
from tests.real_engines.vllm_job import ForkServer

UNWRITTEN = ("dbrx", "gpt2", "gpt_oss")
"""Families of which no FP8 checkpoint is written."""
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**DYNAMIC, "dynamic": False, "strategy": "channel"},
            "input_activations": DYNAMIC,
        }
    },
}
MOST_UNKNOWN = 0.03


@pytest.fixture(scope="module")
def vllm_observer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmObserver]:
    """Start the process that loads weights in vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    with ForkServer(folder / "log") as server:
        yield VllmObserver(server, folder)


@pytest.mark.parametrize("family", sorted(set(zoo.CONFIGS) - set(UNWRITTEN)))
def test_what_is_fine_without_a_name_in_ignore_is_fine_in_vllm(
    tmp_path: Path, family: str, vllm_observer: VllmObserver
) -> None:
    """A name of each kind is taken out of the list of what is not quantized."""
    model = tmp_path / "model"
    zoo.save(family, model)
    folder = run(model, tmp_path / "whole", "fp8-dynamic").out
    if not is_fine(ask(folder, "vllm==0.32")):
        pytest.skip("vLLM does not load it in FP8")
    whole = vllm_observer(UNDRAWN, folder, model)
    if whole.error:
        pytest.skip(f"vLLM does not load it here: {whole.error}")
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    for number, name in enumerate({make_pattern(each): each for each in ignored}.values()):
        changed = Path(shutil.copytree(folder, tmp_path / str(number)))
        change_config(changed, lambda config, name=name: _take_out(config, name))
        if is_fine(ask(changed, "vllm==0.32")):
            seen = vllm_observer(UNDRAWN, changed, model)
            assert (seen.error, seen.weights_fault) == ("", whole.weights_fault), name


def _take_out(config: dict[str, Any], name: str) -> None:
    config["quantization_config"]["ignore"].remove(name)


def test_few_linears_are_unknown(tmp_path: Path) -> None:
    """Under a config that quantizes all of them, but for families that vLLM does not run."""
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    unstarted = VLLM_RUN.values["model type that it does not start"]
    for family in zoo.CONFIGS:
        zoo.save(family, tmp_path / family)
        folder = open_folder(change_config(tmp_path / family, quantization_config=CONFIG))
        geometry = read_geometry(folder.path, folder.config)
        tensors = {name: each for held in folder.tensors.values() for name, each in held.items()}
        for engine in ("vllm", "sglang"):
            if engine == "vllm" and family in unstarted:
                continue
            make_reader = ENGINES[engine].make_reader
            assert make_reader is not None
            reader = make_reader(folder, geometry)
            for group in list_groups(tensors, geometry, reader.classes):
                counts[engine] += len(group.members)
                is_unknown = group.state in ("", "maybe", "refused")
                try:
                    reader.find_scheme(group)
                except Unjudged:
                    is_unknown = True
                except Refusal:
                    pass
                unknown[engine] += is_unknown * len(group.members)
    assert min(counts.values()) > 1000
    for engine, count in counts.items():
        assert unknown[engine] <= MOST_UNKNOWN * count, engine
