"""Compare `check` with engines on what llm-compressor, ModelOpt and auto-round write.

`scripts/test-engines --peers FOLDER` loads the cells of the grid (`cells.py`), over tiny models, in
vLLM and in transformers.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import TypeAdapter

from tests.real_engines.fuzz.architectures import save_model
from tests.real_engines.fuzz.compare import Finding, Kind, Observation
from tests.real_engines.fuzz.draw import UNDRAWN, Case
from tests.real_engines.fuzz.engines import TransformersObserver, VllmObserver, list_tensors
from tests.real_engines.fuzz.evaluate import Observe, ask_check, judge
from tests.real_engines.peers.cells import ARCHITECTURES
from tests.real_engines.vllm_job import ROOT, ForkServer

_WRITERS = {".venv-peers": "write", ".venv-auto-round": "write_auto_round"}
"""By environment."""


def main() -> int:
    """Run the command line; 1 where `check` calls something fine that is not, or crashes."""
    parser = argparse.ArgumentParser(prog="scripts/test-engines", description=__doc__)
    parser.add_argument("--peers", metavar="FOLDER", type=Path, required=True, help="for the files")
    parser.add_argument("--cells", default="", help="finds ARCHITECTURE/TOOL/PRESET/KV")
    parser.add_argument("--architecture", action="append", help="instead of those of the grid")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models, out = options.peers / "models", options.peers / "out"
    out.mkdir(parents=True, exist_ok=True)
    for name in options.architecture or ARCHITECTURES:
        if not (models / name).exists():
            save_model(name, models / name, "bfloat16")
    for environment, module in _WRITERS.items():
        python = ROOT / environment / "bin" / "python"
        command = [python, "-m", f"tests.real_engines.peers.{module}", models, out, options.cells]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    cells = sorted(path.parent for path in out.rglob("config.json"))
    wanted = [cell for cell in cells if re.search(options.cells, str(cell.relative_to(out)))]
    seen = options.peers / "seen"
    with (
        TemporaryDirectory(dir=options.peers) as work,
        ForkServer(options.peers / "vllm.log") as server,
    ):
        observers: dict[str, Observe] = {
            "vllm": _remember(VllmObserver(server, Path(work)), seen / "vllm", out),
            "transformers": _remember(TransformersObserver(Path(work)), seen / "transformers", out),
        }
        return _compare_all(wanted, out, models, observers)


def _remember(observe: Observe, seen: Path, out: Path) -> Observe:
    """Ask an engine about a cell once: another run compares another `check` with its answer."""
    adapter = TypeAdapter(Observation)

    def recall(case: Case, cell: Path, model: Path) -> Observation | None:
        known = seen / f"{cell.relative_to(out)}.json"
        if known.exists():
            return adapter.validate_python(json.loads(known.read_text()))
        observation = observe(case, cell, model)
        assert observation is not None
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(asdict(observation)))  # scales may be NaN
        return observation

    return recall


def _compare_all(cells: list[Path], out: Path, models: Path, observers: dict[str, Observe]) -> int:
    counts: Counter[str] = Counter()
    for cell in cells:
        name = str(cell.relative_to(out))
        for engine, observe in observers.items():
            found = _compare(engine, observe, cell, models / name.partition("/")[0])
            kind = found.kind.value if isinstance(found, Finding) else found
            counts[f"{engine}: {kind}"] += 1
            print(f"{engine} {name}: {kind}", file=sys.stderr, flush=True)
            if isinstance(found, Finding):
                print(f"{engine} {name}: {found.kind.value}", flush=True)
                print(f"  check:  {_shorten(found.check)}\n  engine: {_shorten(found.engine)}")
    print(f"\n{len(cells)} checkpoints")
    for label, count in sorted(counts.items()):
        print(f"  {count:4}  {label}")
    return int(any(kind.value in label for label in counts for kind in (Kind.CRASH, Kind.FALSE_OK)))


def _compare(engine: str, observe: Observe, cell: Path, model: Path) -> Finding | str:
    seen = observe(UNDRAWN, cell, model)
    assert seen is not None
    has_integers = any(not tensor.is_floating_point() for _, tensor in list_tensors(cell))
    seen = replace(seen, weights_fault="") if has_integers else seen
    has_kv = "none" not in cell.name
    found = judge(lambda: ask_check(cell, engine), engine, seen, cell, has_kv=has_kv)
    if isinstance(found, str):
        return f"not compared: {found}" if found else "agreed"
    if (
        has_integers
        and not seen.error
        and found.check.startswith(("weights misread", "weights bad"))
    ):
        return "not compared: check names a fault of integers, which are not decoded here"
    return found


def _shorten(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    sys.exit(main())
