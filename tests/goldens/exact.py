"""The driver of `scripts/compare-with`: make models, run one tree on them, compare two runs.

It imports the product through `tests.doors` and the command line alone, since it runs on old trees.
"""

import hashlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests import doors, zoo
from tests.architectures.families import FAMILIES
from tests.cli.program import run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [7, 20, 13, 3, 20, 9, 20, 4, 11, 6, 18, 2, 15]
SCHEMES = ("fp8-static", "fp8-dynamic", "fp8-block", "mxfp8")
QUICK = ("--samples", 8, "--seq-len", 20, "--dtype", "float32", "--device", "cpu")


def make_models(work: Path, families: list[str]) -> None:
    """Write the models of all families, or of those that are named."""
    for family in families or sorted(zoo.ZOO | FAMILIES):
        for dtype in DTYPES:
            model = zoo.build(family).to(dtype)
            model.save_pretrained(work / "models" / f"{family}-{str(dtype).removeprefix('torch.')}")
    rows = [{"input_ids": row.tolist()} for row in zoo.draw([20] * 8, seed=5)]
    (work / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run_all(work: Path, out: Path) -> None:
    """Run this tree on all models, and keep what came out."""
    torch.set_num_threads(1)
    found: dict[str, torch.Tensor | str] = {}
    with doors.ask_once():
        for folder in sorted((work / "models").iterdir()):
            scratch = out.with_suffix("")
            for key, value in _run(folder, work / "rows.jsonl", scratch / folder.name):
                found[f"{folder.name} {key}"] = value
    torch.save(found, out)


def _run(folder: Path, rows: Path, place: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    place.mkdir(parents=True)
    dtype = getattr(torch, folder.name.rpartition("-")[2])
    plan = doors.make_plan(zoo.draw(LENGTHS, seed=9), packed=False)
    ways = {
        "whole": {},
        "streamed": {"streamed": True},
        **{f"shard {index}": {"shard": (index, 2)} for index in (1, 2)},
    }
    shards = []
    for way, options in ways.items():
        try:
            _, stats = doors.run_calibration(folder, plan, batch_size=2, dtype=dtype, **options)
        except Exception as error:  # noqa: BLE001 -- both trees refuse, or it is a difference
            yield f"statistics {way}", f"{type(error).__name__}"
            continue
        if way.startswith("shard"):
            shards.append(stats)
            continue
        for key, tensor in doors.list_tensors(stats).items():
            yield f"statistics {way} {key}", tensor
    if len(shards) == 2:
        for key, tensor in doors.list_tensors(doors.join_shards(shards)).items():
            yield f"statistics joined {key}", tensor
    yield from _files(folder, rows, place)


def _files(folder: Path, rows: Path, place: Path) -> Iterator[tuple[str, str]]:
    outcome = run("calibrate", folder, "--data", rows, *QUICK, "--out", place / "c", "--json")
    yield "calibrate", str(outcome.code)
    if outcome.code:
        return
    yield from _hash(place / "c" / "kv-overlay", "overlay")
    stats = ("--stats", place / "c" / "stats.safetensors", "--allow-unservable")
    for scheme in SCHEMES:
        command = ("quantize", folder, "--scheme", scheme, *stats, "--out", place / scheme)
        yield f"quantize {scheme}", str(run(*command).code)
        yield from _hash(place / scheme, scheme)
    if folder.name.endswith("float32"):
        for name in ("c/kv-overlay", "fp8-static", "fp8-dynamic"):
            yield from _verify(folder, place / name, rows, name)


def _verify(folder: Path, scales: Path, rows: Path, name: str) -> Iterator[tuple[str, str]]:
    if not scales.is_dir():
        return
    outcome = run("verify", folder, "--scales", scales, "--data", rows, *QUICK, "--json")
    yield f"verify {name}", str(outcome.code)
    if outcome.code:
        return
    for place, candidate in enumerate(outcome.json["candidates"]):
        for figure in ("ppl", "ppl_ratio", "ppl_ratio_se", "kld_mean", "kld_p99", "top1_agreement"):
            yield f"verify {name} {place} {figure}", repr(candidate[figure])
    for place, layer in enumerate(outcome.json["layers"]):
        sums = [repr(layer[figure]) for figure in ("sqnr_db", "clipped", "flushed")]
        yield f"verify {name} {place} {layer['site']}", " ".join(sums)


def _hash(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Hash each tensor of a checkpoint, and its config."""
    from safetensors import safe_open  # noqa: PLC0415

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 -- not a mapping
                tensor = file.get_tensor(key).contiguous()
                raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
                text = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"
                yield f"{name} {key}", text
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        yield f"{name} config", json.dumps(config, sort_keys=True)


def compare(old_path: Path, new_path: Path) -> int:
    """Print what differs between two runs; 1 if anything does."""
    old, new = torch.load(old_path), torch.load(new_path)
    counts: Counter[str] = Counter()
    different: dict[str, list[str]] = {}
    for key in sorted(old | new):
        first, *others = key.split()[1:]
        kind = f"{first} {others[0]}" if first in {"statistics", "verify"} else first
        if key not in new or key not in old:
            name = f"{key.rpartition('/')[2]} " if "statistics" in kind else ""
            what = f"{kind} {name}only in the {'old' if key in old else 'new'} tree"
        elif _equals(old[key], new[key]):
            counts[kind] += 1
            continue
        else:
            what = f"{kind} differs"
        different.setdefault(what, []).append(key)
    for kind, count in sorted(counts.items()):
        print(f"{count:7,} equal: {kind}")
    for what, keys in sorted(different.items()):
        print(f"{len(keys):7,} {what}, such as {'; '.join(keys[:3])}")
    return int(bool(different))


def _equals(one: torch.Tensor | str, other: torch.Tensor | str) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    try:
        if verb == "models":
            make_models(Path(arguments[0]), arguments[1:])
        elif verb == "run":
            run_all(Path(arguments[0]), Path(arguments[1]))
        else:
            sys.exit(compare(Path(arguments[0]), Path(arguments[1])))
    except Exception:  # noqa: BLE001 -- a script
        traceback.print_exc()
        sys.exit(2)
