"""Measure the KV scales of a model beside its quantized children: its own, the child's, and 1.0.

Started by `scripts/bench --quality --children`. The reference is the child itself, with a KV cache
that is not quantized. Prints a table.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks.child_process import PROGRAM, call, run_arguments, worker, write_tokens
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table

WORK = Path("build/bench-children")
OURS = ("fp8-dynamic", "fp8-static", "w8a16")
PEERS = ("w4a16", "nvfp4a16", "mxfp4a16")
"""Forms of `peers.children`."""
MODELS = {"demo": "SmolLM2-135M", "rescaled": "rescaled"}
STATIC = """\
name: inputs
description: Statistics for static inputs alone.
observe: {kv: false, query: false, inputs: true, weights: true}
formats: []
"""
TITLES = {"base": "of the base", "own": "of the child", "1.0": "1.0"}


def main() -> None:
    """Write the children of every model, calibrate and verify each, print."""
    options = parse_options()
    held_out = Namespace(**{**vars(options), "samples": options.held_out})
    print(
        f"calibrated on {options.samples} x {options.seq_len} tokens, verified on "
        f"{options.held_out} x {options.seq_len} others",
        flush=True,
    )
    rows = []
    with work_folder(WORK):
        write_tokens(options, WORK / "calibrate.jsonl")
        write_tokens(held_out, WORK / "verify.jsonl", part="verify")
        (WORK / "static.yaml").write_text(STATIC)
        for name in options.models:
            model = Path(options.model)
            if name == "rescaled":
                model = WORK / name
                call(*worker("workers.changed_models", options.model, name, model))
            for form, found in measure(options, held_out, name, model):
                rows.append([MODELS[name], form, *map(format_candidate, found.values())])
                print(*rows[-1], flush=True)
    print(f"\n{format_table(['model', 'child', *TITLES.values()], rows)}")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--quality --children", __doc__, samples=12, dtypes=("float32",))
    parser.set_defaults(seq_len=256)
    parser.add_argument("--held-out", type=int, default=8, help="sequences to verify on (8)")
    parser.add_argument("--peers", action="store_true", help="add children of llm-compressor")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--forms", nargs="*", choices=(*OURS, *PEERS), help="only these children")
    return parser.parse_args()


def measure(
    options: Namespace, held_out: Namespace, name: str, model: Path
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give the candidates of `verify` for each child."""
    base = calibrate(options, model, WORK / f"{name}-stats")
    for form in options.forms or (*OURS, *(PEERS if options.peers else ())):
        child = WORK / f"{name}-{form}"
        write_child(options, form, model, child)
        own = calibrate(options, child, WORK / f"{name}-{form}-stats")
        scales = ("--scales", base, "--scales", own)
        text = run_arguments(held_out, WORK / "verify.jsonl", options.dtype)
        output = json.loads(call(PROGRAM, "verify", child, *text, *scales, "--json"))
        found = {each["name"]: each for each in output["candidates"]}
        names = (str(base), str(own), "scale-1.0")
        yield form, dict(zip(TITLES, (found[each] for each in names), strict=True))


def calibrate(options: Namespace, model: Path, out: Path, *more: object) -> Path:
    """Calibrate, and give the statistics."""
    text = run_arguments(options, WORK / "calibrate.jsonl", options.dtype)
    call(PROGRAM, "calibrate", model, *text, *(more or ("--format", "kv-scales")), "--out", out)
    return out / "stats.safetensors"


def write_child(options: Namespace, form: str, model: Path, out: Path) -> None:
    """Quantize the model, without KV scales."""
    if form in PEERS:
        job = (form, model, WORK / "calibrate.jsonl", out)
        call(*worker("peers.children", *job, python=options.peers_python))
        return
    more: tuple[object, ...] = ()
    if form == "fp8-static":
        stats = calibrate(
            options, model, WORK / f"{out.name}-inputs", "--recipe", WORK / "static.yaml"
        )
        more = ("--stats", stats)
    call(PROGRAM, "quantize", model, "--scheme", form, *more, "--out", out)


def format_candidate(candidate: Mapping[str, Any]) -> str:
    """Format the divergence and the perplexity ratio."""
    return f"{candidate['kld_mean']:.4f} ({candidate['ppl_ratio']:.4f})"


if __name__ == "__main__":
    main()
