"""Time quantize against cp of the same checkpoint, and against llm-compressor's data-free path.

Started by scripts/bench --quantize. The checkpoint is made up: a Llama of 8B's layer sizes in many
shards. Imports no torch, nor numpy: a child's memory, as the kernel counts it, begins at its
parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench_child import Watched, watch
from bench_run import PROGRAM, Figure, compare, save_figures, show

WORK = Path("build/bench-quantize")
SCHEMES = ("fp8-dynamic", "w8a16", "fp8-block")
CAP_BYTES = 1_500_000_000
"""Of writable private memory, to which the kernel holds quantize."""
NUM_LAYERS = 17
"""A shard each: 8 GB of bfloat16 in all."""
NUM_PEER_LAYERS = 6
"""Of the model that llm-compressor is timed on: 3.1 GB."""
HIDDEN, INTERMEDIATE, KV, WORDS = 4096, 14336, 1024, 32000
PEER = (
    "import sys; from llmcompressor import model_free_ptq; "
    "model_free_ptq(sys.argv[1], sys.argv[2], scheme='FP8_DYNAMIC', ignore=['lm_head', "
    "'re:.*embed.*', 're:.*norm.*'], max_workers=1, device='cpu')"
)


def main() -> None:
    """Build the checkpoints, measure, print a line a figure."""
    arguments = parse_arguments()
    shutil.rmtree(WORK, ignore_errors=True)
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    figures = show(measure_copies(arguments.layers, arguments.rounds))
    if arguments.peers:
        layers = min(arguments.layers, NUM_PEER_LAYERS)
        figures += show(measure_peer(arguments.peers_python, layers))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    if arguments.json:
        save_figures(arguments.json, figures)
    shutil.rmtree(WORK)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; scripts/bench itself adds the first two options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --quantize", description=__doc__.split(".")[0]
    )
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds (default 3)")
    parser.add_argument(
        "--layers",
        type=int,
        default=NUM_LAYERS,
        help=f"of 0.44 GB each (default {NUM_LAYERS}: 8 GB, which needs 20 GB of disk)",
    )
    parser.add_argument("--peers", action="store_true", help="llm-compressor too (in .venv-peers)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    return parser.parse_args()


def measure_copies(layers: int, rounds: int) -> list[Figure]:
    """Time every data-free scheme against cp, warm and cold, held to the cap."""
    source = WORK / "source"
    make_checkpoint(source, layers)
    warm = measure(source, WORK / "out", rounds, is_cold=False)
    cold = measure(source, WORK / "out", 1, is_cold=True)
    shutil.rmtree(source)
    figures = [
        compare_field(f"{scheme} / cp, {cache}", taken[scheme], taken["cp"], "duration_s", target)
        for cache, taken, target in (("warm", warm, 3.0), ("cold", cold, None))
        for scheme in SCHEMES
    ]
    cap = [Watched(duration_s=0, peak_bytes=CAP_BYTES)]
    figures += [
        compare_field(f"{scheme}: peak memory / cap", warm[scheme][:1], cap, "peak_bytes", 1.0)
        for scheme in SCHEMES
    ]
    return figures


def measure_peer(python: str, layers: int) -> list[Figure]:
    """Time llm-compressor's data-free path on a smaller model, and quantize on the same."""
    source, out = WORK / "small", WORK / "out"
    make_checkpoint(source, layers)
    touch(source, drop=False)
    ours = [run(quantize_command(source, out, "fp8-dynamic"), out)]
    touch(source, drop=False)
    theirs = [run([python, "-c", PEER, str(source), str(out)], out)]
    shutil.rmtree(source)
    return [
        compare_field("fp8-dynamic / model_free_ptq", ours, theirs, "duration_s", 0.2),
        compare_field("fp8-dynamic: peak memory / its own", ours, theirs, "peak_bytes", 0.5),
    ]


def compare_field(
    name: str, upper: Sequence[Watched], lower: Sequence[Watched], field: str, target: float | None
) -> Figure:
    """Divide round by round."""
    unit = 1e6 if field == "peak_bytes" else 1
    sides = ([getattr(each, field) / unit for each in side] for side in (upper, lower))
    return compare("quantize", name, *sides, target)


def measure(
    source: Path, out: Path, rounds: int, *, is_cold: bool
) -> Mapping[str, Sequence[Watched]]:
    """Copy and quantize in turn, the source's pages in memory or not."""
    commands = {
        "cp": ["cp", "-r", str(source), str(out)],
        **{scheme: quantize_command(source, out, scheme) for scheme in SCHEMES},
    }
    taken: dict[str, list[Watched]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            touch(source, drop=is_cold)
            taken[name].append(run(command, out, is_capped=name != "cp"))
    return taken


def quantize_command(source: Path, out: Path, scheme: str) -> list[str]:
    """Give the command line that is measured."""
    return [PROGRAM, "quantize", str(source), "--scheme", scheme, "--out", str(out), "--json"]


def run(command: Sequence[str], out: Path, *, is_capped: bool = False) -> Watched:
    """Run a child to its end, watch its memory, and remove what it wrote."""
    watched = watch(command, WORK / "log", cap=cap if is_capped else None)
    shutil.rmtree(out)
    return watched


def cap() -> None:
    """Hold this process to the cap: the kernel refuses it more writable private memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (CAP_BYTES, CAP_BYTES))


def touch(folder: Path, *, drop: bool) -> None:
    """Bring a folder's files into the page cache, or let the kernel drop them from it."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            if drop:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def make_checkpoint(folder: Path, num_layers: int) -> None:
    """Write a Llama of 8B's layer sizes, a shard per layer and one for the rest."""
    folder.mkdir(parents=True)
    data = make_weights(1 << 23)
    weight_map: dict[str, str] = {}
    for number in range(num_layers + 1):
        tensors = list_layer(number) if number < num_layers else list_rest()
        name = f"model-{number + 1:05d}-of-{num_layers + 1:05d}.safetensors"
        write_shard(folder / name, tensors, data)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": num_layers,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_weights(count: int) -> bytes:
    """Draw bfloat16 numbers between 2**-9 and 1, of both signs."""
    source = random.Random(0)  # noqa: S311 -- numbers, no secrets
    exponents = (0x3B, 0x3C, 0x3D, 0x3E)
    table = bytes(exponents[code % 4] | (code & 0x80) for code in range(256))
    data = bytearray(2 * count)
    data[0::2] = source.randbytes(count)
    data[1::2] = source.randbytes(count).translate(table)
    return bytes(data)


def list_layer(number: int) -> dict[str, tuple[int, ...]]:
    """List a layer's tensors with their shapes."""
    path = f"model.layers.{number}"
    return {
        f"{path}.input_layernorm.weight": (HIDDEN,),
        f"{path}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        f"{path}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{path}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{path}.post_attention_layernorm.weight": (HIDDEN,),
        f"{path}.self_attn.k_proj.weight": (KV, HIDDEN),
        f"{path}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{path}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{path}.self_attn.v_proj.weight": (KV, HIDDEN),
    }


def list_rest() -> dict[str, tuple[int, ...]]:
    """List the tensors outside the layers."""
    return {
        "lm_head.weight": (WORDS, HIDDEN),
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }


def write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]], data: bytes) -> None:
    """Write a safetensors file of bfloat16, the same numbers over and over."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        stop = offset + 2 * multiply(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            piece = data[:offset]
            file.write(piece)
            offset -= len(piece)


def multiply(numbers: Iterable[int]) -> int:
    """Multiply."""
    product = 1
    for number in numbers:
        product *= number
    return product


if __name__ == "__main__":
    main()
