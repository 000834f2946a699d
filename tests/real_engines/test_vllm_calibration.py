"""Calibration inside vLLM against our own run of the same model."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.cli import main_inner
from tests import zoo
from tests.architectures.families import FAMILIES, SIZES
from tests.cli.quantized_children import save_fp4, save_int
from tests.plugins.vllm.recorded import read_golden
from tests.plugins.vllm.vllm_cases import CASES, GOLDENS, SEQ_LEN, WIDTH, make_rows
from tests.real_engines.exports import LATENT
from tests.real_engines.vllm_job import Calibrator

SERVED = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "opt", "falcon", "gptj", "arcee"),
    *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "cohere", "cohere2", "ernie4_5"),
    *("exaone4", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense", "ministral", "nemotron"),
    *("olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "stablelm", "starcoder2", "bloom"),
    "apertus",
    *("falcon_h1", "nemotron_h"),  # hybrid
    *("mixtral", "qwen3_moe", "qwen2_moe", "dots1", "ernie4_5_moe", "glm4_moe", "granitemoe"),
    *("olmoe", "lfm2_moe"),
    "deepseek_v3",
)
OTHER = {
    "deepseek_v3": "v (the rotary part) by 2e-2: the rotary kernel for CPU ignores strides of q, k",
    "ernie4_5_moe": "equal inputs of experts, and other experts chosen",
    "lfm2_moe": "experts chosen otherwise by 7e-2, k by 6e-2",
    "gemma3n_text": "inputs of per_layer_projection by 6e-1; k and v are equal",
    "cohere2": "q by 9e-2, k by 2e-2",
    "bloom": "inputs by 3e-4, k by 2e-5",
    "apertus": "inputs by 2e-3, k by 5e-5",
}
"""Families that vLLM 0.32 for CPU computes otherwise than transformers 5.23 (measured)."""
REFUSED = {
    "qwen3_next": "CPU GDN attention requires BF16",
    "jamba": "selective_scan_fwd",
    "gpt_oss": "No Unquantized MoE backend",
    "mpt": "not supported anymore",
}
"""Families that vLLM 0.32 for CPU does not run in float32, with what it says."""
QUANTIZED: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "INT4": (lambda base, folder: save_int(folder, 4, group=32, base=base), ""),
    "INT8": (lambda base, folder: save_int(folder, 8, base=base), ""),
    "NVFP4": (
        lambda base, folder: save_fp4(folder, "nvfp4", base=base),
        "Marlin FP4 not available",
    ),
    "MXFP4": (
        lambda base, folder: save_fp4(folder, "mxfp4", base=base),
        "Failed to find a kernel that can implement the MXFP4 linear layer",
    ),
}
"""Quantized checkpoints, and why vLLM 0.32 for CPU refuses to start with one."""
SIZES_SERVED = {"hidden_size": 128, "head_dim": 32}
"""vLLM's CPU kernels want heads of a multiple of 32 elements."""


def save_served(family: str, folder: Path) -> Path:
    """Write a tiny float32 model of a family with random weights."""
    if family == "mpt":
        sizes = {**SIZES, "d_model": 128, "n_heads": 4, "n_layers": 2}
    elif family in zoo.ZOO:
        own = {"deepseek_v3": LATENT, "falcon": WIDTH}  # these compute their head_dim
        zoo.save(family, folder, **own.get(family, SIZES_SERVED))
        return folder
    else:
        sizes = {**SIZES, **FAMILIES[family], **SIZES_SERVED}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_workers_answer_as_recorded(
    calibrate: Calibrator, data: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    answers = GOLDENS / f"{name}.json" if "FP8CALIB_RECORD" in os.environ else tmp_path / "new"
    options = ["--data", data, "--seq-len", SEQ_LEN, "--no-pack", "--dtype", "float32"]
    ranks = ["--tensor-parallel-size", case.tp, "--pipeline-parallel-size", case.pp]

    code, printed = calibrate(
        case.save_model(tmp_path / "model"),
        tmp_path / "out",
        *options,
        *ranks,
        ranks=case.tp * case.pp,
        record=answers,
    )

    assert code == 0, printed
    assert answers.exists(), printed
    fresh, recorded = read_golden(answers), read_golden(GOLDENS / f"{name}.json")
    assert fresh.keys() == recorded.keys()
    assert fresh["fp8calib_describe"] == recorded["fp8calib_describe"]


@pytest.mark.parametrize("family", [*SERVED, *REFUSED])
def test_every_site_is_what_transformers_computes(
    calibrate: Calibrator, data: Path, tmp_path: Path, family: str
) -> None:
    """Sites, counts and values of tiny models; `OTHER` and `REFUSED` name what is not so."""
    model = save_served(family, tmp_path / "model")
    options = ["--data", data, "--seq-len", SEQ_LEN, "--no-pack", "--dtype", "float32"]
    assert (
        main_inner(["calibrate", str(model), "--out", str(tmp_path / "own"), *map(str, options)])
        == 0
    )

    code, printed = calibrate(model, tmp_path / "engine", *options)

    if family in REFUSED:
        assert code != 0
        assert REFUSED[family] in printed
        return
    assert code == 0, printed
    own, found = (load_stats_file(tmp_path / name) for name in ("own", "engine"))
    missing = {site for site in own.sites if site not in found.sites}
    named = {skipped.site for skipped in found.header.skipped}
    assert all("experts" in site.module and str(site) in named for site in missing)
    if family in OTHER:
        return
    for site in own.sites.keys() & found.sites.keys():
        assert found.sites[site].count == own.sites[site].count, site
        torch.testing.assert_close(
            found.sites[site].amax, own.sites[site].amax, rtol=1e-5, atol=1e-7, msg=str(site)
        )


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_quantized_checkpoint_is_calibrated_as_vllm_runs_it(
    calibrate: Calibrator, data: Path, tmp_path: Path, form: str
) -> None:
    write, refusal = QUANTIZED[form]
    zoo.save("llama", tmp_path / "base", hidden_size=128, intermediate_size=128)
    model = write(tmp_path / "base", tmp_path / "model")
    # the longest text that the model takes
    options = ["--data", data, "--seq-len", 128, "--dtype", "bfloat16", "--format", "kv-scales"]

    code, printed = calibrate(model, tmp_path / "engine", *options)

    if refusal:
        assert code != 0
        assert "vLLM cannot start with this model" in printed
        assert refusal in printed
        return
    assert code == 0, printed
    main_inner(["calibrate", str(model), "--out", str(tmp_path / "own"), *map(str, options)])
    own, found = (load_stats_file(tmp_path / name) for name in ("own", "engine"))
    assert found.header.measured_quantized == f"{form} weights (compressed-tensors)"
    assert found.sites.keys() == own.sites.keys()
    for site in (site for site in own.sites if site.role in ("k", "v", "q")):
        torch.testing.assert_close(
            found.sites[site].amax, own.sites[site].amax, rtol=2**-6, atol=0.0, msg=str(site)
        )


def test_the_run_is_resumed_after_a_rank_died(calibrate: Calibrator, tmp_path: Path) -> None:
    case = CASES["llama-tp2"]
    model, out = case.save_model(tmp_path / "model"), tmp_path / "out"
    rows = [json.dumps(row) for row in make_rows()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows * 300))
    options = ["--data", tmp_path / "rows.jsonl", "--seq-len", SEQ_LEN, "--samples", 9 * 300]
    options += ["--no-pack", "--dtype", "float32", "--tensor-parallel-size", case.tp]

    killer = threading.Thread(target=kill_rank, args=(tmp_path / "out.partial",))
    killer.start()
    code, printed = calibrate(model, out, *options, ranks=case.tp)
    killer.join()

    assert code != 0
    assert "vLLM stopped: " in printed
    code, printed = calibrate(model, out, *options, "--resume", ranks=case.tp)
    assert code == 0, printed
    assert "of 2700 sequences are done, continuing" in printed
    assert sum(stats.count for stats in load_stats_file(out).sites.values()) > 0


def kill_rank(partial: Path) -> None:
    """Kill a worker of vLLM once statistics are saved."""
    while not list(partial.glob("checkpoint-*")):
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        if process.cmdline()[:1] == ["VLLM::Worker_TP1"]:
            process.send_signal(signal.SIGKILL)


def test_shards_in_engines_of_their_own_merge_to_the_bytes_of_one_run(
    calibrate: Calibrator, data: Path, tmp_path: Path
) -> None:
    model = CASES["llama"].save_model(tmp_path / "model")
    options = ["--data", data, "--seq-len", SEQ_LEN, "--no-pack", "--batch-size", 2]
    assert calibrate(model, tmp_path / "whole", *options)[0] == 0
    shards = [tmp_path / f"shard-{index}" for index in (1, 2)]
    for index, out in enumerate(shards, 1):
        assert calibrate(model, out, *options, "--shard", f"{index}/2")[0] == 0

    joined = tmp_path / "joined"
    assert main_inner(["export", *map(str, shards), "--out", str(joined)]) == 0

    assert (joined / "stats.safetensors").read_bytes() == (
        tmp_path / "whole" / "stats.safetensors"
    ).read_bytes()
