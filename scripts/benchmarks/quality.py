"""Measure the accuracy that FP8 weights and inputs cost, and that other tools' checkpoints cost.

Started by `scripts/bench --quality`. All tools calibrate on the same tokens. KL divergence and
perplexity come from `fp8calib verify` on text that no tool calibrated on. Prints two tables.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8calib.numerics.schemes import list_without_calibration
from scripts.benchmarks.child_process import PROGRAM, call, run_arguments, worker, write_tokens
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser

WORK = Path("build/bench-quality")
TARGET = 1.02
"""The largest ratio of our KL divergence to the better peer's."""
ENGINES = {"reference": "as stored", "vllm": "as vLLM loads it"}
OURS = "fp8calib"
PEERS = ("llm-compressor", "ModelOpt")
RECIPE = """\
name: inputs
description: Statistics for static FP8 weights and inputs; no KV-cache scales.
observe: {kv: false, query: false, inputs: true, weights: true}
formats: []
"""

Candidate = Mapping[str, Any]


def main() -> None:
    """Write every checkpoint, verify all, print."""
    options = parse_options()
    print(describe(options), flush=True)
    held_out = Namespace(**{**vars(options), "samples": options.held_out})
    with work_folder(WORK):
        write_tokens(options, name_tokens("calibrate"))
        write_tokens(held_out, name_tokens("verify"), part="verify")
        static, data_free = write_static(options), write_data_free(options.model)
        candidates = {
            "reference": verify(held_out, "reference", static | data_free),
            "vllm": verify(held_out, "vllm", static),
        }
        print(f"\n{format_static(candidates, static)}\n")
        print(format_schemes(candidates["reference"], static, data_free))
        if options.json:
            options.json.write_text(json.dumps(candidates, indent=2) + "\n")


def parse_options() -> Namespace:
    """Read the command line."""
    dtypes = ("float32", "bfloat16", "float16")
    parser = make_parser("--quality", __doc__, samples=64, dtypes=dtypes, has_peers=True)
    parser.add_argument("--held-out", type=int, default=32, help="sequences to verify on (32)")
    return parser.parse_args()


def describe(options: Namespace) -> str:
    """Describe the model and the amount of text."""
    return (
        f"{Path(options.model).name}, {options.dtype}: calibrated on {options.samples} x "
        f"{options.seq_len} tokens, verified on {options.held_out} x {options.seq_len} others"
    )


# --- checkpoints -------------------------------------------------------------------------------


def write_static(options: Namespace) -> dict[str, Path]:
    """Write static checkpoints: ours and the peers'."""
    recipe, stats, tokens = WORK / "recipe.yaml", WORK / "stats", name_tokens("calibrate")
    recipe.write_text(RECIPE)
    arguments = run_arguments(options, tokens, options.dtype)
    call(PROGRAM, "calibrate", options.model, *arguments, "--recipe", recipe, "--out", stats)
    written = {OURS: WORK / "fp8-static"}
    source = ("--scheme", "fp8-static", "--stats", stats / "stats.safetensors")
    made = (PROGRAM, "quantize", options.model, "--allow-unservable", *source)
    call(*made, "--out", written[OURS])
    if options.peers:
        job = (options.model, tokens, options.dtype, WORK)
        call(*worker("peers.checkpoints", *job, python=options.peers_python))
        written |= {name: WORK / name for name in PEERS}
    return written


def write_data_free(model: str) -> dict[str, Path]:
    """Write a checkpoint of every scheme that needs no data."""
    schemes = [*list_without_calibration(), "fp8-block"]
    written = {scheme: WORK / scheme for scheme in schemes}
    for scheme, out in written.items():
        call(PROGRAM, "quantize", model, "--allow-unservable", "--scheme", scheme, "--out", out)
    return written


def verify(
    options: Namespace, engine: str, checkpoints: Mapping[str, Path]
) -> dict[str, Candidate]:
    """Verify all checkpoints as an engine serves them; return the report's entry for each."""
    arguments = run_arguments(options, name_tokens("verify"), options.dtype)
    scales = [item for path in checkpoints.values() for item in ("--scales", path)]
    more = (*scales, "--engine", engine, "--json")
    output = json.loads(call(PROGRAM, "verify", options.model, *arguments, *more))
    candidates = {each["name"]: each for each in output["candidates"]}
    return {name: candidates[str(path)] for name, path in checkpoints.items()}


def name_tokens(part: str) -> Path:
    """Name the file of a part's tokens."""
    return WORK / f"{part}.jsonl"


# --- tables ------------------------------------------------------------------------------------


def format_static(found: Mapping[str, Mapping[str, Candidate]], static: Mapping[str, Path]) -> str:
    """Compare the static checkpoints' KL divergence, as stored and as an engine loads them."""
    titles = [f"KLD, {title}" for title in ENGINES.values()]
    rows = [[name, *(_format_kld(found[engine][name], 5) for engine in ENGINES)] for name in static]
    peers = [name for name in PEERS if name in static]
    if peers:
        ratios = [compare_divergence(found[engine], peers) for engine in ENGINES]
        rows.append([f"{OURS} / better peer (target {TARGET})", *ratios])
    return format_table(["static, per tensor", *titles], rows)


def compare_divergence(candidates: Mapping[str, Candidate], peers: Sequence[str]) -> str:
    """Divide our divergence by the better peer's, and compare with the target."""
    ratio = candidates[OURS]["kld_mean"] / min(candidates[peer]["kld_mean"] for peer in peers)
    return f"{ratio:.3f} {'ok' if ratio <= TARGET else 'over'}"


def format_schemes(
    candidates: Mapping[str, Candidate], static: Mapping[str, Path], free: Mapping[str, Path]
) -> str:
    """Show the size and the loss of every scheme."""
    schemes = {"fp8-static": (OURS, static[OURS])} | {k: (k, v) for k, v in free.items()}
    rows = []
    for scheme, (name, path) in schemes.items():
        each = candidates[name]
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
        ratio = f"{each['ppl_ratio']:.4f} ± {each['ppl_ratio_se']:.4f}"
        agreement = f"{each['top1_agreement']:.1%}"
        rows.append([scheme, f"{size:.0f} MB", ratio, _format_kld(each, 4), agreement])
    return format_table(["scheme", "weights", "perplexity ratio", "KLD", "top-1"], rows)


def _format_kld(candidate: Candidate, digits: int) -> str:
    return f"{candidate['kld_mean']:.{digits}f} ± {candidate['kld_se']:.{digits}f}"


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
