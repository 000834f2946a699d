"""Which transformers a release demands, and which types of models it knows beside transformers."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fp8calib.engines.facts.release import FOLDER, NEWER_TYPES, parse_version
from fp8calib.engines.status import Evidence
from tests.real_engines.package import Package, UnavailableError, open_package

TYPES = FOLDER / "transformers_types.json"

_AUTO_ROUND = "srt/layers/quantization/auto_round.py"
_AUTO_ROUND_KEYS = {"SUPPORTED_DTYPES": "data_type", "SUPPORTED_FORMATS": "packing_format"}


def read_demanded(package: Package) -> Iterator[str]:
    """Read the versions of transformers that the metadata of a wheel demands.

    Raises:
        UnavailableError: the package index does not answer.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--quiet", "--no-input", "--report", "-", package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{package.requirement}: {done.stderr[-300:]}")
    demands = json.loads(done.stdout)["install"][0]["metadata"]["requires_dist"]
    found = (re.fullmatch(r"transformers\s*([^;\[]*)", each.strip()) for each in demands)
    yield from (each[1].strip() for each in found if each)


def read_own_types(*folders: str) -> Callable[[Package], Iterator[str]]:
    """Make a reader of the types that an engine's own config classes have.

    Only those that some transformers does not know matter.
    """

    def read(package: Package) -> Iterator[str]:
        found: set[str] = set()
        for path in package.files:
            if any(folder in path for folder in folders):
                found.update(_list_types(ast.parse(package.read_file(path))))
        yield from sorted(found.intersection(NEWER_TYPES))

    return read


def _list_types(tree: ast.Module) -> Iterator[str]:
    """List the `model_type` of classes, and the keys of a registry of config classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LazyConfigDict":
            yield from (each.arg for each in node.keywords if each.arg)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            named = ast.unparse(target)
            if named == "model_type" and isinstance(node.value, ast.Constant):
                yield str(node.value.value)
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield from [str(target.slice.value)] * named.startswith("_CONFIG_REGISTRY[")


def read_types(requirement: str) -> None:
    """Add the types of models that a minor release of transformers is the first to know.

    Its minors are added in their order, because each is compared with those before.
    """
    package = open_package(requirement)
    minor = ".".join(requirement.partition("==")[2].split(".")[:2])
    known = json.loads(TYPES.read_text())
    before = {
        name
        for other, names in known.items()
        if parse_version(other) < parse_version(minor)
        for name in names
    }
    oldest = open_package(_OLDEST)
    known[minor] = sorted(_list_mapped(package) - before - _list_mapped(oldest))
    ordered = dict(sorted(known.items(), key=lambda each: parse_version(each[0])))
    TYPES.write_text(json.dumps(ordered, indent=1) + "\n")


_OLDEST = "transformers==5.12.1"
"""The oldest that a release demands exactly; the types that it knows are known to all."""


def _list_mapped(package: Package) -> set[str]:
    """List the keys of transformers' CONFIG_MAPPING_NAMES."""
    found: set[str] = set()
    for file in ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"):
        for node in ast.walk(package.parse(file)):
            is_mapping = isinstance(node, ast.Assign | ast.Call) and ast.unparse(node).startswith(
                ("CONFIG_MAPPING_NAMES =", "CONFIG_MAPPING_NAMES.update(")
            )
            for item in ast.walk(node) if is_mapping else ():
                if isinstance(item, ast.Dict):
                    found.update(key.value for key in item.keys if isinstance(key, ast.Constant))
                elif isinstance(item, ast.Tuple) and isinstance(item.elts[0], ast.Constant):
                    found.add(str(item.elts[0].value))
    return found


def read_auto_round(package: Package) -> Iterator[str]:
    """Read what the engine's class of auto-round's configs accepts, and the experts it loads."""
    file = "quantization/inc/inc.py" if package.has("quantization/inc/inc.py") else _AUTO_ROUND
    classes = [node for node in package.parse(file).body if isinstance(node, ast.ClassDef)]
    for node in (line for each in classes for line in each.body):
        if not isinstance(node, ast.Assign):
            continue
        key = _AUTO_ROUND_KEYS.get(ast.unparse(node.targets[0]))
        if key is not None:
            yield from (f"{key} {value}" for value in sorted(ast.literal_eval(node.value)))
    if package.has("inc/schemes/inc_mxfp8_moe.py"):
        yield "experts of MXFP8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How to read a fact in the package of a release."""

    read: Callable[[Package], Iterable[str] | bool]
    """Gives the values that are true of the release, or whether the fact is true."""
    source: str
    how: Evidence
    """Run, where functions of the package are run; read, where its text is."""
    is_difference: bool = False
    """Values that are true of all known releases are no facts."""

    def list_values(self, package: Package) -> list[str]:
        """List the values that are true of a release; an empty one for a fact without values."""
        found = self.read(package)
        return [""] * found if isinstance(found, bool) else [*found]
