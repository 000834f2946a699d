"""Numerics of engines: the plain rule by default, a source for whatever is not."""

from dataclasses import fields

import pytest

from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.registry import ENGINES

NUMERICS = {key: engine.numerics for key, engine in ENGINES.items() if engine.numerics is not None}
PLAIN = Numerics(name="plain")
SETTINGS = [f.name for f in fields(Numerics) if f.name not in {"name", "run", "sources"}]


def _differences(numerics: Numerics) -> set[str]:
    return {name for name in SETTINGS if getattr(numerics, name) != getattr(PLAIN, name)}


def test_the_reference_is_the_plain_rule() -> None:
    assert _differences(NUMERICS["reference"]) == set()


@pytest.mark.parametrize("name", NUMERICS)
def test_every_field_that_is_not_the_plain_rule_names_its_source(name: str) -> None:
    numerics = NUMERICS[name]

    read = {"prompt_reads_cache"} if name != "reference" else set()  # true of all, read in each
    assert set(numerics.sources) == _differences(numerics) | read
    assert numerics.run <= set(numerics.sources)


@pytest.mark.parametrize("name", NUMERICS)
def test_every_source_names_a_version_and_a_file(name: str) -> None:
    for source in NUMERICS[name].sources.values():
        repository, version, path = source.split(maxsplit=2)
        assert repository in {
            "vLLM",
            "vllm-project/vllm",
            "SGLang",
            "Dao-AILab/flash-attention",
            "sgl-project/sgl-flash-attn",
        }
        assert version[0].isdigit() or len(version) == 7
        assert path.split()[0].rstrip(":,;").endswith((".py", ".cu", ".cuh", ".cpp", ".h", ".hpp"))


def test_the_smallest_scales_are_the_numbers_of_the_engines() -> None:
    per_token = {name: numerics.smallest_dynamic_scale for name, numerics in NUMERICS.items()}
    per_group = {name: numerics.smallest_group_scale for name, numerics in NUMERICS.items()}

    assert per_token == {
        "reference": 0.0,
        "vllm": 1 / 229376,
        "vllm-cpu": 1 / 229376,
        "sglang": 0.0,
    }
    assert per_group == {
        "reference": 0.0,
        "vllm": 1e-10 / 448,
        "vllm-cpu": 0.0,
        "sglang": 1e-10 / 448,
    }
