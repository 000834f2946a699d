"""`vllm check`: the loader as rank r of N, in one process, holds what a server's ranks hold."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.plugins import vllm as vllm_plugin
from fp8calib.plugins.vllm.loader import LoaderAnswer, ask_loader
from tests import zoo
from tests.kit.checkpoints import change_json
from tests.real_engines.exports import Exports, read_scales
from tests.real_engines.vllm_job import PYTHON, VllmServer


def ask(folder: Path, tp: int) -> LoaderAnswer:
    return ask_loader(folder, PYTHON, has_kv=True, tp=tp, trusts_code=False)


def check(folder: Path, tp: int) -> EngineReport:
    report = vllm_plugin.check(folder, python=PYTHON, tp=tp)
    (engine,) = report.engines.values()
    return engine


def list_held(ranks: list[Mapping[str, Mapping[str, object]]]) -> list[object]:
    return [
        {name: (list(each["k"]), list(each["v"])) for name, each in held.items()}  # type: ignore[call-overload]
        for held in ranks
    ]


@pytest.mark.parametrize("form", ["kv-overlay", "kv-overlay-head"])
def test_the_ranks_of_one_process_hold_what_those_of_a_server_hold(
    exports: Exports, vllm: VllmServer, form: str
) -> None:
    folder = exports("llama", form) / form

    served, asked = vllm(folder, tp=2), ask(folder, 2)

    assert (served.error, asked.error, asked.stage) == ("", "", "done")
    assert len(served.ranks) == 2
    assert list_held(list(asked.scales)) == list_held(list(served.ranks))


@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_holds_the_scales_of_its_own_heads(exports: Exports, tp: int) -> None:
    """Two KV heads: half a head for each of four ranks is the whole head on two of them."""
    folder = exports("llama", "kv-overlay-head") / "kv-overlay-head"
    stored = read_scales(folder)

    answer = ask(folder, tp)

    assert len(answer.scales) == tp
    for rank, held in enumerate(answer.scales):
        head = rank * 2 // tp
        for layer, (k, v) in stored.items():
            own = held[f"model.layers.{layer}.self_attn.attn"]
            assert own == {"k": (pytest.approx(k[head]),), "v": (pytest.approx(v[head]),)}
    report = check(folder, tp)
    assert report.ok
    assert not [each for each in report.problems if "defect" in each]


def test_heads_that_three_ranks_cannot_share_are_refused_by_vllm_itself(exports: Exports) -> None:
    report = check(exports("llama") / "kv-overlay", 3)

    why = report.layers[0].k.why
    assert report.layers[0].k.status == "refused"
    assert "on rank 0 of 3: ValidationError" in why
    assert "Total number of attention heads (4) must be divisible by tensor parallel size" in why


def test_a_weight_without_the_rows_of_the_last_rank_names_the_rank(
    exports: Exports, tmp_path: Path
) -> None:
    """The first three quarters of the rows suffice for the first of two ranks."""
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in (exports("llama") / "kv-overlay").iterdir():
        if path.suffix == ".safetensors":
            save_file(cut(load_file(path)), folder / path.name, metadata={"format": "pt"})
        else:
            (folder / path.name).write_bytes(path.read_bytes())

    report = check(folder, 2)

    assert report.layers[0].k.status == "refused"
    assert "stops at the weights on rank 1 of 2: " in report.layers[0].k.why


def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.1.mlp.down_proj.weight"
    if name not in tensors:
        return tensors
    columns = tensors[name].shape[1]
    return {**tensors, name: tensors[name][:, : columns * 3 // 4].contiguous()}


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature"])
def test_a_generation_config_that_vllm_refuses_is_not_ok(name: str, tmp_path: Path) -> None:
    """It is read after the weights."""
    zoo.save("llama", tmp_path / "m", architectures=["LlamaForCausalLM"])
    path = change_json(tmp_path / "m" / "generation_config.json", {name: 1, "do_sample": True})
    assert ask(tmp_path / "m", 1).stage == "done"
    change_json(path, {name: -1})
    answer = ask(tmp_path / "m", 1)
    assert (answer.stage, name in answer.error) == ("config", True)
