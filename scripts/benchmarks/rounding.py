"""Measure what `quantize --rounding gptq` gains over rounding to nearest, in domain and beyond.

Started by `scripts/bench --quality --rounding`. Calibrates on pages of Debian's handbook, and
scores on other pages of it, on Python's documentation and on licences. Prints two tables: the
divergences, and the processor time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from pydoc_data import topics
from statistics import mean, median

from scripts.benchmarks.child_process import (
    PROGRAM,
    Usage,
    call,
    measure,
    run_arguments,
    worker,
    write_tokens,
)
from scripts.benchmarks.figures import work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table

WORK = Path("build/bench-rounding")
PACKAGE = "debian-handbook"
PAGES = "unpacked/usr/share/doc/debian-handbook/html/en-US"
LICENCES = Path("/usr/share/common-licenses")
IN_DOMAIN = "handbook"
SCORED = (IN_DOMAIN, "python", "licences")
CALIBRATION = ("calibrate-1", "calibrate-2", "calibrate-3")
TARGETS: Mapping[str, tuple[float, float, float]] = {
    "w8a16": (0.40, 0.70, 0.95),
    "fp8-dynamic": (0.65, 0.80, 0.97),
    "fp8-static": (0.80, 0.90, 0.97),
    "fp8-block": (0.65, 0.85, 0.97),
    "mxfp8-a16": (0.45, 0.70, 0.95),
    "mxfp8": (0.75, 0.85, 0.97),
}
"""The largest ratio of the KL divergences: to nearest in domain and out of domain, to a peer's."""
SAME_CODES = {"fp8-dynamic": "w8a16", "mxfp8": "mxfp8-a16"}
"""A scheme, and the one that rounds its weights in the same way."""
ENGINES = {"mxfp8-a16": "reference"}
"""Who is emulated instead of vLLM, which quantizes the inputs of all MXFP8 weights."""
TIMES = {"calibrate": 2.5, "llm-compressor": 0.5}
"""The most processor time of `quantize --rounding gptq`, as a multiple of what is named."""
MODELS = {"demo": "", "off its grid": "off-grid", "widened": "widened"}
STATIC_RECIPE = """\
name: static-gptq
description: Input scales, and weights rounded by GPTQ.
observe: {kv: false, query: false, inputs: true, weights: true}
formats: []
quantize: {scheme: fp8-static, rounding: gptq}
"""
_SHORTEST_PAGE = 1500

Sums = Mapping[str, Sequence[float]]
"""One sum over the tokens of each sequence: kld, loss, agree, tokens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The checkpoints of a scheme from one calibration text, and what writing them took."""

    scheme: str
    sample: str
    nearest: Path
    gptq: Path
    peer: Path | None = None
    times: Mapping[str, Usage]
    """Of `gptq`, and of what it is compared with."""


def main() -> None:
    """Write every checkpoint, score all, print."""
    options = parse_options()
    with work_folder(WORK):
        write_texts()
        write_rows(options)
        rows, found, every = [], {}, []
        for title, schemes in choose_runs(options).items():
            runs = list(write_runs(options, title, schemes))
            scores = found[title] = score(options, title, runs)
            chosen = [[run for run in runs if run.scheme == scheme] for scheme in schemes]
            rows += [format_row(title, each, scores) for each in chosen]
            every += runs
        print(format_table(TITLES, rows))
        print(f"\n{format_table(TIME_TITLES, list(format_times(every)))}")
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser(
        "--quality --rounding", __doc__, samples=32, dtypes=("float32",), has_peers=True
    )
    parser.add_argument("--held-out", type=int, default=24, help="sequences of each text (24)")
    parser.add_argument("--calibrations", type=int, default=3, help="texts to calibrate on (3)")
    parser.add_argument("--schemes", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--models", nargs="+", default=["demo", "off its grid"], choices=MODELS)
    return parser.parse_args()


def choose_runs(options: Namespace) -> Mapping[str, list[str]]:
    """Choose the schemes of each model; blocks need one whose widths are multiples of 128."""
    others = [scheme for scheme in TARGETS if scheme in options.schemes and scheme != "fp8-block"]
    chosen = {title: others for title in options.models if others}
    return chosen | ({"widened": ["fp8-block"]} if "fp8-block" in options.schemes else {})


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
        (WORK / f"{name}.txt").write_text("\n\n".join(parts), encoding="utf-8")


def read_page(page: Path) -> str:
    """Read the visible text of an HTML page."""
    parser = _Text()
    parser.feed(page.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def write_rows(options: Namespace) -> None:
    """Write the token ids of every text, as every tool reads them."""
    for name in (*CALIBRATION[: options.calibrations], *SCORED):
        count = options.held_out if name in SCORED else options.samples
        size = Namespace(**{**vars(options), "samples": count})
        write_tokens(size, name_rows(name), text=WORK / f"{name}.txt")


def name_rows(name: str) -> Path:
    """Name the file of a text's token ids."""
    return WORK / f"{name}.jsonl"


# --- checkpoints -------------------------------------------------------------------------------


def write_runs(options: Namespace, title: str, schemes: Sequence[str]) -> Iterator[Run]:
    """Write the checkpoints of a model with each rounding, from each text."""
    for scheme in schemes:
        for sample in CALIBRATION[: options.calibrations]:
            yield write_run(options, title, scheme, sample)


def write_run(options: Namespace, title: str, scheme: str, sample: str) -> Run:
    """Write the checkpoints of a scheme."""
    model = make_model(options, title)
    folder = WORK / title.replace(" ", "-") / sample
    folder.mkdir(parents=True, exist_ok=True)
    text = run_arguments(options, name_rows(sample), options.dtype)
    nearest, gptq, peer = (folder / f"{scheme}-{name}" for name in ("nearest", "gptq", "peer"))
    made = [PROGRAM, "quantize", str(model), "--scheme", scheme]
    times = {}
    if scheme == "fp8-static":
        recipe = folder / "recipe.yaml"
        recipe.write_text(STATIC_RECIPE)
        stats = folder / "stats"
        made_static = [PROGRAM, "calibrate", str(model), *text, "--recipe", str(recipe)]
        times["gptq"] = measure([*made_static, "--out", str(stats)], folder / "log")
        (stats / scheme).rename(gptq)
        call(*made, "--stats", stats / "stats.safetensors", "--out", nearest)
    else:
        call(*made, "--out", nearest)
        weights = folder / f"{SAME_CODES.get(scheme, scheme)}-gptq"
        if weights.exists():
            shutil.copytree(weights, gptq)
            shutil.copy(nearest / "config.json", gptq)
        else:
            asked = [*made, *text, "--rounding", "gptq", "--out", str(gptq)]
            times["gptq"] = measure(asked, folder / "log")
    if "gptq" in times:
        out = ["--out", str(folder / f"{scheme}-plain")]
        plain = [PROGRAM, "calibrate", str(model), *text, *out]
        times["calibrate"] = measure(plain, folder / "log")
    if options.peers:
        job = (model, scheme, name_rows(sample), options.dtype, peer)
        command = worker("peers.rounding", *job, python=options.peers_python)
        times["llm-compressor"] = measure(command, folder / "log")
    return Run(
        scheme=scheme,
        sample=sample,
        nearest=nearest,
        gptq=gptq,
        peer=peer if options.peers else None,
        times=times,
    )


def score(options: Namespace, title: str, runs: Sequence[Run]) -> Mapping[str, Mapping[str, Sums]]:
    """Score all checkpoints of a model: text -> checkpoint -> sums."""
    texts = list(map(name_rows, SCORED))
    found: dict[str, dict[str, Sums]] = {text: {} for text in SCORED}
    engines = {run.scheme: ENGINES.get(run.scheme, "vllm") for run in runs}
    for engine in dict.fromkeys(engines.values()):
        own = [run for run in runs if engines[run.scheme] == engine]
        paths = [path for run in own for path in (run.nearest, run.gptq, run.peer) if path]
        out = WORK / "scores.json"
        job = (make_model(options, title), options.dtype, out, "--engine", engine)
        call(*worker("workers.divergences", *job, "--texts", *texts, "--checkpoints", *paths))
        for text, scores in json.loads(out.read_text()).items():
            found[text] |= scores
    return found


# --- tables ------------------------------------------------------------------------------------

TITLES = (
    *("model", "scheme", "text", "KLD, nearest", "KLD, gptq", "gptq / nearest", "range"),
    *("log of perplexity, gptq - nearest", "gptq / llm-compressor"),
)
TIME_TITLES = ("scheme", "processor time of gptq", "ratio", "range")
SIDES = ("nearest", "gptq")


def format_row(
    title: str, runs: Sequence[Run], scores: Mapping[str, Mapping[str, Sums]]
) -> list[str]:
    """Format the divergences of a scheme on every text, over all calibrations."""
    scheme = runs[0].scheme
    cells: list[list[str]] = []
    for text in SCORED:
        found = scores[text]
        nearest, gptq = ([found[str(getattr(run, name))] for run in runs] for name in SIDES)
        ratios = [divide(a, b) for a, b in zip(gptq, nearest, strict=True)]
        pairs = [(found[str(run.gptq)], found[str(run.peer)]) for run in runs if run.peer]
        in_domain, beyond, to_peer = TARGETS[scheme]
        cells.append(
            [
                text,
                f"{mean(map(compute_kld, nearest)):.5f}",
                f"{mean(map(compute_kld, gptq)):.5f}",
                judge([ratio for ratio, _ in ratios], in_domain if text == IN_DOMAIN else beyond),
                show_range(ratios),
                show_difference(gptq, nearest),
                judge([divide(*pair)[0] for pair in pairs], to_peer) if pairs else "",
            ]
        )
    return [title, scheme, *("<br>".join(column) for column in zip(*cells, strict=True))]


def compute_kld(sums: Sums) -> float:
    """Give the mean KL divergence of a token."""
    return sum(sums["kld"]) / sum(sums["tokens"])


def divide(upper: Sums, lower: Sums) -> tuple[float, float]:
    """Divide the divergences of two checkpoints; give the ratio and its standard error.

    A ratio of two sums over the same sequences (Cochran, Sampling Techniques, 6.3).
    """
    ratio = sum(upper["kld"]) / sum(lower["kld"])
    residuals = [a - ratio * b for a, b in zip(upper["kld"], lower["kld"], strict=True)]
    return ratio, _cluster_error(residuals) / sum(lower["kld"])


def _cluster_error(residuals: Sequence[float]) -> float:
    count = len(residuals)
    return math.sqrt(sum(each**2 for each in residuals) * count / max(count - 1, 1))


def judge(ratios: Sequence[float], target: float) -> str:
    """Show the median of ratios and compare it with the target."""
    ratio = median(ratios)
    return f"{ratio:.2f} {'ok' if ratio <= target else f'over {target}'}"


def show_range(ratios: Sequence[tuple[float, float]]) -> str:
    """Show the range over calibrations, and the largest standard error of one ratio."""
    values = [ratio for ratio, _ in ratios]
    return f"{min(values):.3f} to {max(values):.3f}, each ± {max(e for _, e in ratios):.3f}"


def show_difference(gptq: Sequence[Sums], nearest: Sequence[Sums]) -> str:
    """Show how much larger the perplexity is than by nearest, with the largest standard error."""
    shown = [measure_difference(a, b, "loss") for a, b in zip(gptq, nearest, strict=True)]
    return f"{mean(a for a, _ in shown):+.4f} ± {max(e for _, e in shown):.4f}"


def measure_difference(upper: Sums, lower: Sums, name: str) -> tuple[float, float]:
    """Give how much larger a sum of one checkpoint is, a token, and the standard error of that."""
    tokens = sum(upper["tokens"])
    differences = [x - y for x, y in zip(upper[name], lower[name], strict=True)]
    average = sum(differences) / tokens
    residuals = [x - average * n for x, n in zip(differences, upper["tokens"], strict=True)]
    return average, _cluster_error(residuals) / tokens


def format_times(runs: Sequence[Run]) -> Iterator[list[str]]:
    """Compare the processor time of rounding with that of calibration and of the peer."""
    for scheme in dict.fromkeys(run.scheme for run in runs):
        for name, target in TIMES.items():
            times = [run.times for run in runs if run.scheme == scheme]
            ratios = [t["gptq"].cpu_s / t[name].cpu_s for t in times if {"gptq", name} <= t.keys()]
            if ratios:
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                yield [scheme, f"/ {name}", judge(ratios, target), spread]


if __name__ == "__main__":
    main()
