"""Compare `fp8calib plan` with other tools' searches, with a greedy plan, and with its own cost.

Started by `scripts/bench --plans`. ModelOpt's `auto_quantize` and auto-round's `AutoScheme` choose
the linears that become FP8 with static inputs; `plan` chooses as many bytes on the same text. All
plans are then emulated on other text. The greedy plan takes what `plan` knows of groups alone, the
least loss for a byte first. `--time` gives the time of the search, as a multiple of a calibration
pass over the same text.
"""

from __future__ import annotations

import json
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import Fp8CalibWarning
from fp8calib.fp8.schemes import SCHEMES
from fp8calib.jobs.calibration import run_calibration
from fp8calib.jobs.planning.measure import MeasuredPlan, open_measured
from fp8calib.jobs.planning.opened import open_plan
from fp8calib.jobs.planning.runs import Measurements
from fp8calib.jobs.reporter import PythonReporter
from fp8calib.requests.plan import PlanRequest
from fp8calib.verification.compare.paired import compare_paired
from fp8calib.verification.planning.arrays import Plan
from fp8calib.verification.planning.choices import Group, count_bytes
from fp8calib.verification.planning.search import Budget, Found
from fp8calib.verification.report import describe_pair
from scripts.benchmarks.child_process import call, worker
from scripts.benchmarks.figures import Figure, compare, report, take_turns, work_folder
from scripts.benchmarks.options import make_parser
from scripts.benchmarks.quality import format_table

WORK = Path("build/bench-plans")
STATIC = "fp8-static"
MIXED = ("fp8-static", "fp8-dynamic", "fp8-block")
BITS = (9.0, 10.5, 12.0, 14.0)
SHARES = (0.1, 0.3, 0.5, 0.7)
"""Of the way from the smallest plan to the model in 16 bits."""
TARGET = 15.0
"""The most time of the search, as a multiple of a calibration pass."""
TITLES = ("budget", "by", "bytes / plan", "KLD", "of plan", "against it")


def main() -> None:
    """Print a table for each comparison."""
    options = parse_options()
    warnings.simplefilter("ignore", Fp8CalibWarning)
    with work_folder(WORK):
        if options.time:
            report(measure_times(options), options.json)
            return
        rows = [*(compare_peers(options) if options.peers else ()), *compare_greedy(options)]
    print(f"\n{format_table(TITLES, rows)}")


def parse_options() -> Namespace:
    """Read the command line."""
    parser = make_parser("--plans", str(__doc__), samples=40, dtypes=("float32",))
    parser.add_argument("--peers", action="store_true", help="add the searches of other tools")
    parser.add_argument("--auto-round-python", default=".venv-auto-round/bin/python")
    parser.add_argument("--bits", type=float, nargs="*", default=BITS, help="a weight, of peers")
    parser.add_argument("--rounds", type=int, default=3, help="of --time (3)")
    parser.add_argument("--time", action="store_true", help="measure the time of plan alone")
    return parser.parse_args()


# --- plans ---------------------------------------------------------------------------------------


def request(options: Namespace, schemes: Sequence[str]) -> PlanRequest:
    """Ask for a plan of the weights."""
    return PlanRequest(
        options.model,
        max_bytes=0.5,
        kv_tokens=0,
        scheme=schemes,
        samples=options.samples,
        seq_len=options.seq_len,
        dtype=options.dtype,
    )


class Opened:
    """A model whose groups are priced, and what plans of it lose on other text."""

    def __init__(self, measured: MeasuredPlan) -> None:
        self._measured = measured
        self._search = measured.open_search()
        self._judge = measured.open_runs(measured.opened.held_out, "judging")
        self.groups = measured.groups

    def search(self, most_bytes: float) -> Found:
        """Search for the least loss in so many bytes of the groups."""
        return self._search.search(Budget(most_bytes=most_bytes), ())

    def compare(self, title: str, name: str, other: Plan, own: Plan) -> list[str]:
        """Judge a plan beside ours on the text that is held out."""
        runs = self._judge([other, own])
        klds = {name: runs[other][0].klds, "plan": runs[own][0].klds}
        pair = compare_paired("plan", name, klds, self._judge.lengths)
        sizes = [count_bytes(self.groups, each) for each in (own, other)]
        row = [
            title,
            name,
            f"{sizes[1] / sizes[0]:.3f}",
            f"{float(klds[name].double().mean()):.4f}",
            f"{float(klds['plan'].double().mean()):.4f}",
            describe_pair(pair),
        ]
        print(*row, flush=True)
        return row


@contextmanager
def open_for(options: Namespace, schemes: Sequence[str]) -> Iterator[MeasuredPlan]:
    """Calibrate the model, and open it with its groups."""
    reporter = PythonReporter(None)
    with open_plan(request(options, schemes)) as opened:
        stats = run_calibration(opened.model, opened.recipe, opened.calibration, reporter)
        measurements = Measurements(WORK / "measured.safetensors", opened.tag)
        with open_measured(opened, stats, measurements, reporter) as measured:
            yield measured


def compare_peers(options: Namespace) -> Iterator[list[str]]:
    """Compare with the searches of other tools, at the bytes of theirs."""
    with open_for(options, [STATIC]) as measured:
        opened = Opened(measured)
        tokens = WORK / "search.jsonl"
        rows = ({"input_ids": each.tolist()} for each in measured.opened.search.sequences)
        tokens.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        pythons = {"modelopt": options.peers_python, "auto_round": options.auto_round_python}
        for peer, python in pythons.items():
            out = WORK / f"{peer}.json"
            job = (options.model, tokens, out, *options.bits)
            call(*worker(f"peers.{peer}_plan", *job, python=python))
            for bits, linears in json.loads(out.read_text()).items():
                other = find_plan(opened.groups, linears)
                own = opened.search(count_bytes(opened.groups, other)).plan
                yield opened.compare(f"{bits} bits a weight", peer, other, own)


def find_plan(groups: Sequence[Group], linears: Sequence[str]) -> Plan:
    """Find the plan that quantizes some linears: groups whole, as engines join them."""
    chosen = set(linears)
    plan = []
    for group in groups:
        inside = chosen.intersection(group.linears)
        if inside and len(inside) < len(group.linears):
            msg = f"{group.name} is split"
            raise ValueError(msg)
        plan.append(1 if inside else 0)
    return tuple(plan)


def compare_greedy(options: Namespace) -> Iterator[list[str]]:
    """Compare with greedy plans, of schemes with FP8 inputs."""
    with open_for(options, MIXED) as measured:
        opened = Opened(measured)
        sizes = [[choice.size_bytes for choice in group.choices] for group in opened.groups]
        low, high = sum(map(min, sizes)), sum(each[0] for each in sizes)
        for share in SHARES:
            found = opened.search(low + share * (high - low))
            costs = {place: cost.kld_mean for place, cost in found.costs.items()}
            greedy = find_greedy(sizes, costs, count_bytes(opened.groups, found.plan))
            yield opened.compare(f"{share:.0%} of the way", "greedy", greedy, found.plan)


def find_greedy(
    sizes: Sequence[Sequence[int]], costs: Mapping[tuple[int, int], float], limit: float
) -> Plan:
    """Quantize what adds the least loss for a byte, until the plan fits."""
    plan = [0] * len(sizes)
    while sum(own[choice] for own, choice in zip(sizes, plan, strict=True)) > limit:
        prices = {
            (g, c): (costs[g, c] - costs.get((g, plan[g]), 0.0)) / saved
            for g, c in costs
            if (saved := sizes[g][plan[g]] - sizes[g][c]) > 0
        }
        group, choice = min(prices, key=lambda place: prices[place])
        plan[group] = choice
    return tuple(plan)


# --- time ----------------------------------------------------------------------------------------


def measure_times(options: Namespace) -> Iterator[Figure]:
    """Time the search against a calibration pass over its text, in turn."""
    seconds: dict[str, list[float]] = {"calibrate": [], "search": []}
    reporter = PythonReporter(None)
    with open_plan(request(options, list(SCHEMES))) as opened:
        stats = run_calibration(opened.model, opened.recipe, opened.calibration, reporter)
        observe = opened.recipe.observe.model_copy(update={"weights": False})
        recipe = opened.recipe.model_copy(update={"observe": observe})
        for number, name in enumerate(take_turns(seconds, options.rounds)):
            if name == "calibrate":
                started = time.perf_counter()
                run_calibration(opened.model, recipe, opened.search, reporter)
            else:
                measurements = Measurements(WORK / f"measured-{number}.safetensors", opened.tag)
                with open_measured(opened, stats, measurements, reporter) as measured:
                    size = sum(group.choices[0].size_bytes for group in measured.groups)
                    started = time.perf_counter()
                    Opened(measured).search(0.6 * size)
            seconds[name].append(time.perf_counter() - started)
            print(name, f"{seconds[name][-1]:.1f} s", flush=True)
    both = (seconds["search"], seconds["calibrate"])
    yield compare(options.dtype, "search / calibration pass", *both, TARGET)


if __name__ == "__main__":
    main()
