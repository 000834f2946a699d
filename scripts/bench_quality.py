"""Measure what FP8 weights and inputs cost in accuracy, and what other tools' checkpoints cost.

Started by scripts/bench --quality. Everybody calibrates on the same tokens; KL divergence and
perplexity come from `fp8calib verify` on text that nobody calibrated on. Prints two tables.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_run import PROGRAM, PYTHON, script

WORK = Path("build/bench-quality")
TARGET = 1.02
"""Our KL divergence by the better peer's, at most."""
ENGINES = {"reference": "as stored", "vllm": "as vLLM loads it"}
OURS = ("fp8calib, shared scales", "fp8calib, separate scales")
PEERS = ("llm-compressor", "ModelOpt")
DATA_FREE = ("fp8-dynamic", "w8a16", "fp8-block")
RECIPE = """\
name: inputs
description: What static FP8 weights and inputs need, and no scales of the KV cache.
observe: {kv: false, query: false, inputs: true, weights: true}
formats: []
"""

Candidate = Mapping[str, Any]


def main() -> None:
    """Write every checkpoint, verify all, print."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print(describe(arguments), flush=True)
    write_tokens(arguments)
    static = write_static(arguments)
    free = write_data_free(arguments.model)
    found = {
        "reference": verify(arguments, "reference", static | free),
        "vllm": verify(arguments, "vllm", static),
    }
    print(f"\n{format_static(found, static)}\n")
    print(format_schemes(found["reference"], static, free))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    shutil.rmtree(WORK)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; scripts/bench itself adds the first two options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --quality", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, default=64, help="sequences to calibrate on")
    parser.add_argument("--held-out", type=int, default=32, help="sequences to verify on")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (default 512)")
    parser.add_argument("--dtype", default="float32", help="of everybody (default float32)")
    parser.add_argument(
        "--peers", action="store_true", help="llm-compressor and ModelOpt too (in .venv-peers)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args()


def describe(arguments: argparse.Namespace) -> str:
    """Say on what the figures are taken."""
    return (
        f"{Path(arguments.model).name}, {arguments.dtype}: calibrated on {arguments.samples} x "
        f"{arguments.seq_len} tokens, verified on {arguments.held_out} x {arguments.seq_len} others"
    )


# --- checkpoints -------------------------------------------------------------------------------


def write_tokens(arguments: argparse.Namespace) -> None:
    """Write what is calibrated on, and text that has none of it."""
    for part, count in (("calibrate", arguments.samples), ("verify", arguments.held_out)):
        size = (str(count), str(arguments.seq_len))
        call(PYTHON, script("bench_tokens.py"), arguments.model, tokens_of(part), *size, part)


def write_static(arguments: argparse.Namespace) -> dict[str, Path]:
    """Write static checkpoints: ours with shared and with separate scales, and the peers'."""
    recipe, stats = WORK / "recipe.yaml", WORK / "stats"
    recipe.write_text(RECIPE)
    call(
        *(PROGRAM, "calibrate", arguments.model, "--data", tokens_of("calibrate")),
        *("--recipe", recipe, "--out", stats, "--dtype", arguments.dtype),
        *("--samples", arguments.samples, "--seq-len", arguments.seq_len),
    )
    written = {}
    for name, options in zip(OURS, ([], ["--no-shared-scales"]), strict=True):
        written[name] = WORK / name.rpartition(", ")[2].replace(" ", "-")
        source = ("--scheme", "fp8-static", "--stats", stats / "stats.safetensors")
        call(PROGRAM, "quantize", arguments.model, *source, "--out", written[name], *options)
    if arguments.peers:
        tool = (arguments.peers_python, script("bench_peer_checkpoints.py"))
        call(*tool, arguments.model, tokens_of("calibrate"), arguments.dtype, WORK)
        written |= {name: WORK / name for name in PEERS}
    return written


def write_data_free(model: str) -> dict[str, Path]:
    """Write a checkpoint of every scheme that needs no data."""
    written = {scheme: WORK / scheme for scheme in DATA_FREE}
    for scheme, out in written.items():
        call(PROGRAM, "quantize", model, "--scheme", scheme, "--out", out)
    return written


def verify(
    arguments: argparse.Namespace, engine: str, checkpoints: Mapping[str, Path]
) -> dict[str, Candidate]:
    """Verify all checkpoints as an engine serves them: what `verify` says of each."""
    size = ("--samples", arguments.held_out, "--seq-len", arguments.seq_len)
    scales = [item for path in checkpoints.values() for item in ("--scales", path)]
    told = call(
        *(PROGRAM, "verify", arguments.model, "--data", tokens_of("verify"), *size, *scales),
        *("--engine", engine, "--dtype", arguments.dtype, "--json"),
    )
    candidates = {each["name"]: each for each in json.loads(told)["candidates"]}
    return {name: candidates[str(path)] for name, path in checkpoints.items()}


def tokens_of(part: str) -> Path:
    """Name the file of a part's tokens."""
    return WORK / f"{part}.jsonl"


def call(*command: object) -> str:
    """Run a child and give what it prints; what it says beside stands in a log."""
    log = WORK / "log"
    with log.open("wb") as file:
        done = subprocess.run(  # noqa: S603
            [str(part) for part in command], check=False, stdout=subprocess.PIPE, stderr=file
        )
    if done.returncode:
        sys.exit(f"{log.read_text(errors='replace')}\nfailed: {' '.join(map(str, command))}")
    return done.stdout.decode()


# --- tables ------------------------------------------------------------------------------------


def format_static(found: Mapping[str, Mapping[str, Candidate]], static: Mapping[str, Path]) -> str:
    """Compare the static checkpoints' KL divergence, as stored and as an engine loads them."""
    titles = [f"KLD, {title}" for title in ENGINES.values()]
    rows = [
        [name, *(f"{found[engine][name]['kld_mean']:.5f}" for engine in ENGINES)] for name in static
    ]
    peers = [name for name in PEERS if name in static]
    for name in OURS if peers else ():
        ratios = [compare_divergence(found[engine], name, peers) for engine in ENGINES]
        rows.append([f"{name} / better peer (target {TARGET})", *ratios])
    return format_table(["static, per tensor", *titles], rows)


def compare_divergence(candidates: Mapping[str, Candidate], name: str, peers: Sequence[str]) -> str:
    """Divide a checkpoint's divergence by the better peer's, and judge."""
    ratio = candidates[name]["kld_mean"] / min(candidates[peer]["kld_mean"] for peer in peers)
    return f"{ratio:.3f} {'ok' if ratio <= TARGET else 'over'}"


def format_schemes(
    candidates: Mapping[str, Candidate], static: Mapping[str, Path], free: Mapping[str, Path]
) -> str:
    """Tell of every scheme its size and what it costs."""
    schemes = {"fp8-static": (OURS[0], static[OURS[0]])} | {k: (k, v) for k, v in free.items()}
    rows = []
    for scheme, (name, path) in schemes.items():
        each = candidates[name]
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
        ratio = f"{each['ppl_ratio']:.4f} ± {each['ppl_ratio_se']:.4f}"
        agreement = f"{each['top1_agreement']:.1%}"
        rows.append([scheme, f"{size:.0f} MB", ratio, f"{each['kld_mean']:.4f}", agreement])
    return format_table(["scheme", "weights", "perplexity ratio", "KLD", "top-1"], rows)


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Give a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
