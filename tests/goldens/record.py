"""Run the program on models whose bits do not depend on the machine, and note what came out.

An entry is a feature, a case and a key with its value. Values are the same on every machine, except
those of the features in `NEAR`: a forward pass decides them, and they hold to six digits.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import fp8calib
from tests.cli.program import Outcome, run
from tests.doors import replace_amax
from tests.goldens import drawn, foreign
from tests.goldens.models import EVERY_FAMILY, KINDS, OF_THEIR_OWN, make_amax, save, write_text
from tests.kit.minutes import in_minutes

Entry = tuple[str, str, str]
"""Feature, key, value."""
ENGINES = ("vllm", "sglang")
NEAR = ("statistics", "verify-kv", "verify-weights")
"""Features whose values are numbers of a forward pass."""
FORMATS = ("kv-overlay", "kv-overlay-head", "tgi", "kv-scales", "vllm-json", "rfc")
SCHEMES = ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block", "mxfp8", "mxfp8-a16")
DIALECTS = {
    "compressed-tensors": SCHEMES,
    "autofp8": ("fp8-static", "fp8-block"),
    "modelopt": ("fp8-static", "fp8-dynamic"),
}
# What differs between two runs, or tells the version of the tool.
_UNSTABLE = ("version", "path", "time", "sha256", "fingerprint", "hash", "digest", "_fp8calib")
QUICK = ("--samples", 9, "--seq-len", 20, "--dtype", "float32", "--device", "cpu")


def list_cases() -> list[Any]:
    """List all cases: families, then groups of drawn checkpoints, most of both in minutes."""
    families = sorted(KINDS.keys() - {"gemma2", "gpt_bigcode", "qwen3_moe"} | OF_THEIR_OWN)
    others = sorted(set(EVERY_FAMILY) - set(families))
    groups = [f"drawn-{group}" for group in range(drawn.NUM_GROUPS)]
    return [*families, groups[0], *in_minutes(*others, *groups[1:]), "foreign"]


def record(case: str, place: Path) -> list[Entry]:
    """Give the entries of a case, which is run in an empty folder."""
    if case.startswith("drawn-"):
        return list(_drawn(int(case.removeprefix("drawn-")), place))
    return list(_foreign(place) if case == "foreign" else _family(case, place))


def _family(family: str, place: Path) -> Iterator[Entry]:
    model, out = place / "model", place / "out"
    save(family, model)
    data = write_text(place / "rows.jsonl")
    succeed("calibrate", model, "--data", data, *QUICK, "--no-check", "--out", out)
    stats = out / "stats.safetensors"
    yield from _statistics(stats)
    yield from _notes("overlay", out / "kv-overlay", values=False)
    replace_amax(stats, make_amax(stats))
    is_kind = family in KINDS
    formats = FORMATS if is_kind else ("kv-overlay",)
    command = ("export", stats, "--model", model, *(x for f in formats for x in ("--format", f)))
    succeed(*command, "--no-check", "--out", place / "tp1")
    yield from _written(place / "tp1")
    yield from _check("overlay", place / "tp1" / "kv-overlay")
    command = ("quantize", model, "--scheme", "fp8-dynamic", "--out", place / "dynamic")
    yield from _quantized("fp8-dynamic", command)
    if not is_kind:
        return
    yield from _memory("calibrate", model, "--data", data, "--recipe", "w8a8-static")
    yield from _memory("verify", model, "--data", data, "--scheme", "fp8-dynamic")
    yield from _memory("verify", model, "--data", data, "--scales", stats)
    outcome = run("export", stats, "--format", "vllm-json", "--tp", 2, "--out", place / "tp2")
    yield from (_written(place / "tp2") if not outcome.code else [_refused("vllm-json", outcome)])
    outcome = run("export", stats, "--format", "rfc", "--tp", 2, "--out", place / "rfc2")
    yield from (_written(place / "rfc2") if not outcome.code else [_refused("rfc", outcome)])
    for dialect, schemes in DIALECTS.items():
        for scheme in schemes:
            name = f"{scheme}/{dialect}"
            command = ("quantize", model, "--scheme", scheme, "--format", dialect)
            command = (*command, "--stats", stats, "--out", place / dialect / scheme)
            yield from _quantized(name, command)
    yield from _verify("verify-kv", model, place / "tp1" / "kv-overlay", data)
    static = place / "compressed-tensors" / "fp8-static"
    if static.is_dir():
        yield from _verify("verify-weights", model, static, data)


def _memory(*command: object) -> Iterator[Entry]:
    """Note the memory that a run is planned to need, but for that of the process."""
    outcome = run(*command, *QUICK, "--batch-size", 2, "--dry-run", "--json")
    key = f"{command[0]} {command[4]}"
    if outcome.code:
        yield "memory", key, f"refused {outcome.code}"
        return
    for name, size in outcome.json["plan"]["peak_parts"].items():
        if name != "process":
            yield "memory", f"{key} {name}", str(size)


def succeed(*arguments: object) -> Outcome:
    """Run the program, which must succeed."""
    outcome = run(*arguments)
    assert outcome.code == 0, (arguments, outcome.err)
    return outcome


# --- what came out -------------------------------------------------------------------------------


def _statistics(path: Path) -> Iterator[Entry]:
    stats = fp8calib.load_stats(path)
    for site, seen in stats.sites.items():
        counts = 0 if seen.histogram is None else int(seen.histogram.sum())
        size, largest, total = seen.amax.numel(), float(seen.amax.max()), float(seen.amax.sum())
        yield "statistics", str(site), f"{seen.count} {counts} {size} {largest:.6g} {total:.6g}"
    for item in stats.header.skipped:
        yield "statistics", f"skipped {item.site}", ""


def _quantized(name: str, command: tuple[object, ...]) -> Iterator[Entry]:
    outcome = run(*command, "--allow-unservable", "--no-check")
    if outcome.code:
        yield _refused(name, outcome)
        return
    yield from _notes(name, Path(str(command[-1])))
    yield from _check(name, Path(str(command[-1])))


def _refused(feature: str, outcome: Outcome) -> Entry:
    return feature, "refused", str(outcome.code)


def _written(out: Path) -> Iterator[Entry]:
    for path in sorted(out.iterdir()):
        if path.is_dir():
            yield from _notes(path.name, path)
        elif path.suffix == ".json":
            yield (
                path.name.split(".")[0],
                path.name,
                _hash(_canonical(json.loads(path.read_text()))),
            )
        else:
            yield from _tensors(path.name.split(".")[0].replace("_", "-"), path)


def _notes(feature: str, folder: Path, *, values: bool = True) -> Iterator[Entry]:
    """Note the tensors of a checkpoint, and its JSON files."""
    for path in sorted(folder.glob("*.safetensors")):
        if values:
            yield from _tensors(feature, path)
    names = sorted(path.name for path in folder.iterdir())
    kept = [name for name in names if name not in {"README.md", "report.json"}]
    yield feature, "files", " ".join(kept)
    for name in ("config.json", "model.safetensors.index.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            yield feature, name, _hash(_canonical(content))


def _tensors(feature: str, path: Path) -> Iterator[Entry]:
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = "x".join(map(str, tensor.shape))
            yield feature, name, f"{dtype} {shape} {hashlib.sha256(raw).hexdigest()[:12]}"
        metadata = sorted(file.metadata() or {})
        yield feature, f"{path.name} metadata", " ".join(metadata)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(value: Any) -> str:
    def clean(x: Any) -> Any:
        if isinstance(x, dict):
            kept = {k: v for k, v in x.items() if not any(word in k for word in _UNSTABLE)}
            return {key: clean(item) for key, item in kept.items()}
        return [clean(item) for item in x] if isinstance(x, list) else x

    return json.dumps(clean(value), sort_keys=True)


def _check(feature: str, folder: Path) -> Iterator[Entry]:
    yield feature, "check", ask_check(folder)


def ask_check(folder: Path, *options: object) -> str:
    """Sum up what `check` says of a folder: the exit code, and for each engine its statuses."""
    outcome = run("check", folder, "--engine", ",".join(ENGINES), *options, "--json")
    if outcome.code not in {0, 8, 9}:
        return f"{outcome.code} {outcome.json['error']['kind']}"
    engines = outcome.json["engines"]
    return " ".join([str(outcome.code), *(_sum_up(name, engines[name]) for name in ENGINES)])


def _sum_up(name: str, report: Any) -> str:
    statuses = Counter(layer[role]["status"] for layer in report["layers"] for role in "kv")
    weights = (report.get("weights") or {}).get("status", "-")
    kinds = ",".join(f"{status}:{count}" for status, count in sorted(statuses.items()))
    return f"{name}:{'ok' if report['ok'] else 'no'}:{kinds or '-'}:{weights}"


def _verify(feature: str, model: Path, scales: Path, data: Path) -> Iterator[Entry]:
    command = ("verify", model, "--scales", scales, "--data", data, *QUICK, "--json")
    report = succeed(*command).json
    for candidate in report["candidates"]:
        name = "given" if candidate["name"] == str(scales) else candidate["name"]
        for figure in ("ppl", "ppl_ratio", "kld_mean"):
            yield feature, f"{name} {figure}", f"{candidate[figure]:.6g}"
    for layer in report["layers"]:
        if layer["candidate"] == str(scales):
            yield feature, f"sqnr {layer['site']}", f"{layer['sqnr_db']:.6g}"


def _drawn(group: int, place: Path) -> Iterator[Entry]:
    for number, case in drawn.list_group(group):
        folder = place / str(number)
        if drawn.write_case(case, place, folder):
            yield "drawn", f"{number} {case}", ask_check(folder)


def _foreign(place: Path) -> Iterator[Entry]:
    for folder in foreign.list_folders():
        yield from foreign.record(folder, place / folder.name)
        yield "foreign", f"{folder.name} check", ask_check(folder)
