"""Checkpoints drawn by the generator of the engine tests, undamaged and damaged."""

from collections.abc import Iterator
from pathlib import Path

from fp8calib.errors import Fp8CalibError
from tests.goldens.models import fill
from tests.real_engines.fuzz import architectures
from tests.real_engines.fuzz.draft import UnfitError
from tests.real_engines.fuzz.draw import Case, parse_case
from tests.real_engines.fuzz.evaluate import write

NUM_GROUPS = 6
CASES = Path(__file__).with_name("drawn-cases.txt")
"""A case a line: drawn once, so that what the generator can draw may change."""


def list_group(group: int) -> Iterator[tuple[int, Case]]:
    """List the cases of a group with their numbers: all of some architectures, built once each."""
    cases = [parse_case(line) for line in CASES.read_text().splitlines()]
    names = sorted({case.architecture for case in cases})[group::NUM_GROUPS]
    for number, case in enumerate(cases):
        if case.architecture in names:
            yield number, case


def write_case(case: Case, place: Path, folder: Path) -> bool:
    """Write the checkpoint of a case into `folder`; False where there is no such one."""
    model = place / f"{case.architecture}-{case.dtype}-{case.layers}"
    if not model.exists():
        changes = {"num_hidden_layers": case.layers} if case.layers else {}
        architectures.save_model(case.architecture, model, case.dtype, fill=fill, **changes)
    try:
        write(case, model, folder)
    except (UnfitError, Fp8CalibError):
        return False
    return True
