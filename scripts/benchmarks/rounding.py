"""Measure what `quantize --rounding gptq` gains over rounding to nearest, in domain and beyond.

Started by `scripts/bench --quality --rounding`. Calibrates on pages of Debian's handbook, and
scores on other pages of it, on Python's documentation and on licences. Prints a table.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from pydoc_data import topics
from statistics import mean, median
from typing import Any

from scripts.benchmarks.child_process import PROGRAM, call, run_arguments, worker
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table

WORK = Path("build/bench-rounding")
PACKAGE = "debian-handbook"
PAGES = "unpacked/usr/share/doc/debian-handbook/html/en-US"
LICENCES = Path("/usr/share/common-licenses")
IN_DOMAIN = "handbook"
CALIBRATION = ("calibrate-1", "calibrate-2", "calibrate-3")
OUT_OF_DOMAIN = ("python", "licences")
TARGETS: Mapping[str, tuple[float, float]] = {
    "w8a16": (0.40, 0.70),
    "fp8-dynamic": (0.65, 0.80),
    "fp8-static": (0.80, 0.90),
    "fp8-block": (0.65, 0.85),
}
"""The largest ratio of the KL divergences, in domain and out of domain."""
MODELS = {"demo": "", "off its grid": "off-grid", "widened": "widened"}
_SHORTEST_PAGE = 1500

Candidate = Mapping[str, Any]


def main() -> None:
    """Write every checkpoint, verify all, print."""
    options = parse_options()
    with work_folder(WORK):
        write_texts()
        found: dict[str, Any] = {}
        rows = []
        for title, scheme in choose_runs(options):
            model = make_model(options, title)
            for sample in CALIBRATION[: options.calibrations]:
                found[f"{title}/{scheme}/{sample}"] = compare(options, model, scheme, sample)
            runs = [v for k, v in found.items() if k.startswith(f"{title}/{scheme}/")]
            rows.append(format_row(title, scheme, runs))
            print(format_table(TITLES, rows[-1:]).splitlines()[-1], flush=True)
        print(f"\n{format_table(TITLES, rows)}")
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--quality --rounding", __doc__, samples=32, dtypes=("float32",))
    parser.add_argument("--held-out", type=int, default=24, help="sequences of each text (24)")
    parser.add_argument("--calibrations", type=int, default=3, help="texts to calibrate on (3)")
    parser.add_argument("--schemes", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--models", nargs="+", default=["demo", "off its grid"], choices=MODELS)
    return parser.parse_args()


def choose_runs(options: Namespace) -> Iterator[tuple[str, str]]:
    """Choose the models and schemes; blocks need a model whose widths are multiples of 128."""
    for scheme in options.schemes:
        for title in ["widened"] if scheme == "fp8-block" else options.models:
            yield title, scheme


def make_model(options: Namespace, title: str) -> Path:
    """Make a model from the demo's, if it does not exist yet."""
    if not MODELS[title]:
        return Path(options.model)
    path = WORK / MODELS[title]
    if not path.exists():
        call(*worker("workers.changed_models", options.model, MODELS[title], path))
    return path


# --- texts -------------------------------------------------------------------------------------


class _Text(HTMLParser):
    """The visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self._hidden += tag in {"script", "style", "head"}
        if tag in {"p", "div", "h1", "h2", "h3", "li", "pre", "br", "tr"}:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in {"script", "style", "head"}

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def write_texts() -> None:
    """Write the texts; every fourth page of the handbook is scored, the others calibrate."""
    call("sh", "-c", f"cd {WORK} && apt-get download {PACKAGE} && dpkg-deb -x {PACKAGE}_* unpacked")
    names = (IN_DOMAIN, *CALIBRATION)
    texts: dict[str, list[str]] = {name: [] for name in names}
    for number, page in enumerate(sorted((WORK / PAGES).glob("*.html"))):
        text = read_page(page)
        if len(text) >= _SHORTEST_PAGE:
            texts[names[number % len(names)]].append(text)
    texts["python"] = [topics.topics[name] for name in sorted(topics.topics)]
    files = sorted(path for path in LICENCES.iterdir() if not path.is_symlink())
    texts["licences"] = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    for name, parts in texts.items():
        name_text(name).write_text("\n\n".join(parts), encoding="utf-8")


def read_page(page: Path) -> str:
    """Read the visible text of an HTML page."""
    parser = _Text()
    parser.feed(page.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def name_text(name: str) -> Path:
    """Name the file of a text."""
    return WORK / f"{name}.txt"


# --- checkpoints -------------------------------------------------------------------------------


def compare(
    options: Namespace, model: Path, scheme: str, sample: str
) -> dict[str, list[Candidate]]:
    """Write a checkpoint with each rounding, and verify both on every text."""
    arguments = run_arguments(options, name_text(sample), options.dtype)
    stats, nearest, gptq = (WORK / f"{scheme}-{name}" for name in ("stats", "nearest", "gptq"))
    given: list[object] = []
    if scheme == "fp8-static":
        recipe = ("--recipe", "w8a8-static", "--format", "kv-scales")
        call(PROGRAM, "calibrate", model, *arguments, *recipe, "--out", stats, "--force")
        given = ["--stats", stats / "stats.safetensors"]
    made = (PROGRAM, "quantize", model, "--scheme", scheme, "--force", *given)
    call(*made, "--out", nearest)
    call(*made, "--rounding", "gptq", *arguments, "--out", gptq)
    scored = Namespace(**{**vars(options), "samples": options.held_out})
    found = {}
    for text in (IN_DOMAIN, *OUT_OF_DOMAIN):
        arguments = run_arguments(scored, name_text(text), options.dtype)
        scales = ("--scales", nearest, "--scales", gptq, "--json")
        output = json.loads(call(PROGRAM, "verify", model, *arguments, *scales))
        found[text] = output["candidates"][:2]
    return found


# --- table -------------------------------------------------------------------------------------

TITLES = ("model", "scheme", "text", "KLD, nearest", "KLD, gptq", "ratio", "range", "perplexity")


def format_row(title: str, scheme: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the divergences on every text, over all texts that were calibrated on."""
    cells: list[list[str]] = []
    for text in (IN_DOMAIN, *OUT_OF_DOMAIN):
        pairs = [run[text] for run in runs]
        ratios = [gptq["kld_mean"] / nearest["kld_mean"] for nearest, gptq in pairs]
        target = TARGETS[scheme][text != IN_DOMAIN]
        verdict = "ok" if median(ratios) <= target else f"over {target}"
        cells.append(
            [
                text,
                f"{mean(nearest['kld_mean'] for nearest, _ in pairs):.5f}",
                f"{mean(gptq['kld_mean'] for _, gptq in pairs):.5f}",
                f"{median(ratios):.2f} {verdict}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{mean(gptq['ppl_ratio'] - nearest['ppl_ratio'] for nearest, gptq in pairs):+.4f}",
            ]
        )
    return [title, scheme, *("<br>".join(column) for column in zip(*cells, strict=True))]


if __name__ == "__main__":
    main()
