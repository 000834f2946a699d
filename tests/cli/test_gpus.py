"""The program on GPUs: real ones where the machine has them, else simulated."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations import accelerate as placing

from fp8calib.calibration import memory_plan
from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.data.sequences import Batch
from fp8calib.model.geometry import Role
from fp8calib.quantization.shard_writer import ShardWriter
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import Outcome, snapshot, succeed
from tests.cli.test_ranks import finish, make_rows, start_ranks
from tests.kit.minutes import HAS_MINUTES, takes_minutes
from tests.simulated_gpus import simulated_gpus

HAS_GPU = torch.cuda.is_available()
FAMILIES = ("llama", "mixtral", "deepseek_v3", "qwen3_next")
if HAS_GPU or HAS_MINUTES:
    FAMILIES += ("gemma3n_text",)
SIZE = ("--samples", 8, "--seq-len", 32, "--batch-size", 4, "--no-pack", "--dtype", "float32")
SCHEMES = ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block")
FIGURES = (
    ("whole", "stats.safetensors"),
    ("streamed", "fp8-static"),
    ("whole", "fp8-dynamic"),
    ("streamed", "stats.safetensors"),
)
"""How a model runs, and what is verified."""

pytestmark = pytest.mark.skipif(
    not HAS_GPU and shutil.which("g++") is None, reason="simulated GPUs are compiled by g++"
)


def pair(name: str, cases: Sequence[object]) -> pytest.MarkDecorator:
    """Run every family with one case; on a real GPU, or in minutes, with all of them.

    Neighbours have the next one, so that no case is left out.
    """
    pairs = [
        (family, case)
        for number, family in enumerate(FAMILIES)
        for place, case in enumerate(cases)
        if HAS_GPU or HAS_MINUTES or place == number % len(cases)
    ]
    return pytest.mark.parametrize(
        ("calibrated", name), pairs, indirect=["calibrated"], ids=str, scope="module"
    )


@pytest.fixture(name="rows", scope="module")
def _rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 8)


@pytest.fixture(name="calibrated", scope="module", params=FAMILIES)
def _calibrated(
    request: pytest.FixtureRequest, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    zoo.save(request.param, folder / "model", max_shard_size="100KB")
    succeed(*calibration(folder, rows), "--device", "cpu", "--out", folder / "cpu")
    return folder


def calibration(folder: Path, rows: Path) -> tuple[object, ...]:
    recipe = ("--recipe", "w8a8-static", "--format", "kv-scales")
    return ("calibrate", folder / "model", "--data", rows, *SIZE, *recipe)


def outside_the_layers(model: Path) -> tuple[str, ...]:
    """Leave out what gemma3n has beside its layers, where inputs are not measured."""
    if json.loads((model / "config.json").read_text())["model_type"] != "gemma3n_text":
        return ()
    names = ("altup_projections", "altup_unembed_projections", "per_layer_model_projection")
    return tuple(part for name in names for part in ("--ignore", f"model.{name}*"))


def gpus() -> AbstractContextManager[None]:
    return nullcontext() if HAS_GPU else simulated_gpus(1)


@contextmanager
def streamed() -> Iterator[None]:
    """Let no model fit whole."""
    with mock.patch.object(memory_plan, "whole_bytes", return_value={"weights": 2**60}):
        yield


def require_same_statistics(first: Path, second: Path) -> None:
    """Compare amaxes; another order of summation moves a value across the edge of a bin."""
    one, two = (load_file(folder / "stats.safetensors") for folder in (first, second))
    assert one.keys() == two.keys()
    amaxes = [name for name in one if name.endswith("amax")]
    assert amaxes
    for name in amaxes:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5)


def require_same_figures(first: Outcome, second: Outcome) -> None:
    names = ("kld_mean", "ppl_ratio", "top1_agreement")
    for here, there in zip(first.json["candidates"], second.json["candidates"], strict=True):
        assert {name: there[name] for name in names} == pytest.approx(
            {name: here[name] for name in names}, rel=0.05
        )


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_simulated_gpus_refuse_what_gpus_refuse() -> None:
    host = torch.arange(6.0).view(2, 3)
    with simulated_gpus(2):
        first, second = host.cuda(), host.to("cuda:1")
        assert (first.device, second.device) == (torch.device("cuda:0"), torch.device("cuda:1"))
        assert (first @ first.T).cpu().tolist() == (host @ host.T).tolist()
        for other in (second, host):
            with pytest.raises(RuntimeError, match="on one device"):
                first + other
        with pytest.raises(RuntimeError, match="numpy"):
            first.numpy()
        first[0] += 1
        assert first.sum().item() == 18
        assert host.sum() == 15
    assert not torch.cuda.is_available()


@pair("mode", ["streamed", "whole"])
def test_statistics_of_a_gpu_are_those_of_the_cpu(
    calibrated: Path, rows: Path, mode: str, tmp_path: Path
) -> None:
    with gpus(), streamed() if mode == "streamed" else nullcontext():
        done = succeed(
            *calibration(calibrated, rows), "--device", "cuda", "--out", tmp_path / "out", "--json"
        )
    assert done.json["memory"]["streamed"] is (mode == "streamed")
    assert done.json["memory"]["device_peak_bytes"] > 0
    require_same_statistics(calibrated / "cpu", tmp_path / "out")
    folders = (calibrated / "cpu", tmp_path / "out")
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert reports[0]["hashes"]["model"] == reports[1]["hashes"]["model"]
    stored = [load_stats_file(folder / "stats.safetensors") for folder in folders]
    assert stored[0].header.unquantized == stored[1].header.unquantized
    for site, here in stored[0].sites.items():
        if site.role is Role.WEIGHT:
            there = stored[1].sites[site].tensors
            assert all(torch.equal(x, there[name]) for name, x in here.tensors.items()), site


def test_batches_of_a_gpu_are_chosen_unless_they_are_given(tmp_path: Path) -> None:
    """They are halved where memory runs out, which the report names."""
    ids = [{"input_ids": [3 + (i * j + j) % 90 for j in range(32)]} for i in range(8)]
    rows = write_rows(tmp_path / "rows.jsonl", ids)
    zoo.save("llama", tmp_path / "model")
    command = ("calibrate", tmp_path / "model", "--data", rows, "--samples", 8, "--seq-len", 32)
    sizes = [0]
    run = Decoder.run

    def spy(self: Decoder, batch: Batch, cache: object) -> torch.Tensor:
        sizes.append(len(batch.lengths))
        if len(batch.lengths) > 2:
            error = OutOfMemoryInForward("no room for more")
            raise error
        return run(self, batch, cache)

    with gpus(), mock.patch.object(Decoder, "run", spy):
        done = succeed(*command, "--device", "cuda", "--out", tmp_path / "chosen", "--json")
    assert sizes == [0, 8, 4, 2, 2, 2, 2]
    assert done.json["batch_size"] == 8192 // 32
    assert done.json["batch_back_off"] == [
        {"first": 0, "batch_size": 4},
        {"first": 0, "batch_size": 2},
    ]
    with gpus():
        given = (*command, "--device", "cuda", "--batch-size", 2, "--out", tmp_path / "two")
        assert succeed(*given, "--json").json["batch_back_off"] == []
    one, two = (tmp_path / name / "stats.safetensors" for name in ("chosen", "two"))
    assert one.read_bytes() == two.read_bytes()


@pair("case", FIGURES)
def test_figures_of_a_gpu_are_those_of_the_cpu(
    calibrated: Path, rows: Path, case: tuple[str, str]
) -> None:
    mode, of = case
    what = ("--scheme", of) if of == "fp8-dynamic" else ("--scales", calibrated / "cpu" / of)
    command = ("verify", calibrated / "model", "--data", rows, *SIZE, *what, "--json")
    cpu = succeed(*command, "--device", "cpu")
    with gpus(), streamed() if mode == "streamed" else nullcontext():
        gpu = succeed(*command, "--device", "cuda")
    require_same_figures(cpu, gpu)


@pytest.mark.skipif(HAS_GPU, reason="a real GPU has room for all")
def test_candidates_share_a_batch_where_memory_allows(tmp_path: Path, rows: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    succeed(*calibration(tmp_path, rows), "--device", "cpu", "--out", tmp_path / "cpu")
    command = ("verify", tmp_path / "model", "--data", rows, *SIZE, "--batch-size", 2)
    given = tmp_path / "cpu" / "stats.safetensors"
    command = (*command, "--engine", "reference", "--scales", given)
    cpu = succeed(*command, "--device", "cpu", "--json")
    assert cpu.json["memory"]["models_in_a_batch"] is None
    with gpus():
        both = succeed(*command, "--device", "cuda", "--json")
        assert both.json["memory"]["models_in_a_batch"] == 3
        assert both.json["hashes"] == cpu.json["hashes"]  # on a GPU beside the passes
        assert "2 of the candidates share each batch: their figures differ by rounding" in both.err
        room = both.json["memory"]["device_peak_bytes"] - 1
        find = memory_plan.find_limits

        def find_less(work: memory_plan.Workload, given: float | None) -> memory_plan.Workload:
            return replace(find(work, given), device_bytes=room)

        with mock.patch("fp8calib.verification.verify.find_limits", find_less):
            alone = succeed(*command, "--device", "cuda", "--json")
    assert alone.json["memory"]["models_in_a_batch"] is None
    assert not alone.json["memory"]["streamed"]
    assert alone.json["memory"]["device_peak_bytes"] < both.json["memory"]["device_peak_bytes"]
    for found in (both, alone):
        for here, there in zip(found.json["candidates"], cpu.json["candidates"], strict=True):
            assert here["kld_mean"] == pytest.approx(there["kld_mean"], rel=1e-3)


@pytest.mark.skipif(HAS_GPU, reason="accelerate spreads no model that fits one real GPU")
@takes_minutes
@pytest.mark.parametrize("family", ["mixtral", "gemma3n_text"])
def test_a_model_spread_over_gpus_gives_the_same(family: str, rows: Path, tmp_path: Path) -> None:
    model = zoo.save(family, tmp_path / "model", num_hidden_layers=4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    seen: list[dict[str, object]] = []
    infer = placing.infer_auto_device_map

    def spy(*args: object, **kwargs: object) -> dict[str, object]:
        seen.append(infer(*args, **kwargs))
        return seen[-1]

    spread = ("--device-map", "auto")
    succeed(*calibration(tmp_path, rows), "--device", "cpu", "--out", tmp_path / "cpu")
    verification = ("verify", tmp_path / "model", "--data", rows, *SIZE, "--json")
    verification = (*verification, "--scales", tmp_path / "cpu" / "fp8-static")
    with (
        mock.patch("tests.simulated_gpus._infer_device_map", spy),
        simulated_gpus(2, room_bytes=weights * 3 // 4),
    ):
        succeed(*calibration(tmp_path, rows), *spread, "--out", tmp_path / "out")
        spread_figures = succeed(*verification, *spread)
    assert [set(device_map.values()) for device_map in seen] == [{0, 1}] * 2
    require_same_statistics(tmp_path / "cpu", tmp_path / "out")
    require_same_figures(succeed(*verification, "--device", "cpu"), spread_figures)


@pair("scheme", SCHEMES)
def test_bytes_of_a_gpu_are_those_of_the_cpu(calibrated: Path, scheme: str, tmp_path: Path) -> None:
    stats = calibrated / "cpu" / "stats.safetensors"
    command = ("quantize", calibrated / "model", "--scheme", scheme, "--allow-unservable")
    if scheme == "fp8-static":
        outside = outside_the_layers(calibrated / "model")
        command = (*command, "--stats", stats, *outside)
    succeed(*command, "--out", tmp_path / "cpu")
    devices = set()
    put_rows = ShardWriter._put_rows

    def spy(self: ShardWriter, tensor: Any, rows: range, values: torch.Tensor) -> None:
        devices.add(values.device.type)
        put_rows(self, tensor, rows, values)

    with gpus(), mock.patch.object(ShardWriter, "_put_rows", spy):
        succeed(*command, "--device", "cuda", "--out", tmp_path / "gpu")
    assert devices == {"cuda"}
    assert snapshot(tmp_path / "gpu") == snapshot(tmp_path / "cpu")


@pytest.mark.skipif(HAS_GPU, reason="the simulated ranks would find the real GPU")
def test_ranks_with_a_gpu_each_write_the_file_of_one(rows: Path, tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "model")
    command = (*calibration(tmp_path, rows), "--device", "cuda", "--json")
    with simulated_gpus(1):
        succeed(*command, "--out", tmp_path / "one")
    with simulated_gpus(2):
        ranks = start_ranks(2, *command, "--out", tmp_path / "two")
    for rank, process in enumerate(ranks):
        code, out, err = finish(process)
        assert code == 0, err
        assert f"on cuda:{rank}" in err or rank
        if not rank:
            assert json.loads(out)["ranks"] == 2
    one, two = (tmp_path / name / "stats.safetensors" for name in ("one", "two"))
    assert two.read_bytes() == one.read_bytes()


def test_gptq_rounds_on_a_gpu(tmp_path: Path) -> None:
    """Real GPUs sum in another order, which moves few codes."""
    zoo.save("mixtral", tmp_path / "model")
    rows = [{"input_ids": [3 + (i * j + j * j) % 90 for j in range(32)]} for i in range(24)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    size = ("--samples", 24, "--seq-len", 32, "--batch-size", 6, "--dtype", "float32", "--json")
    made = ("gptq", tmp_path / "model", "--scheme", "w8a16", "--data", data, *size)
    made += ("--allow-unservable",)
    cpu = succeed(*made, "--device", "cpu", "--out", tmp_path / "cpu").json
    with gpus():
        gpu = succeed(*made, "--device", "cuda", "--out", tmp_path / "gpu").json
    one, two = ([(x["module"], x["rounding"]) for x in each["rounded"]] for each in (cpu, gpu))
    assert one == two
    own, other = (load_file(tmp_path / n / "model.safetensors") for n in ("cpu", "gpu"))
    for name, value in own.items():
        same = (value.float() == other[name].float()).float().mean()
        assert same > 0.99 if HAS_GPU else same == 1, name
