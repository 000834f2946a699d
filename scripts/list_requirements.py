"""Print the requirements of an installed package on this platform, one per line."""

from __future__ import annotations

import argparse
from importlib.metadata import requires

from packaging.requirements import Requirement


def main() -> None:
    """Print the requirements whose markers match, except those named after --without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--without", nargs="*", default=[])
    arguments = parser.parse_args()
    for line in requires(arguments.package) or []:
        found = Requirement(line)
        holds = found.marker is None or found.marker.evaluate({"extra": ""})
        if holds and found.name.lower() not in arguments.without:
            found.marker = None
            print(found)


if __name__ == "__main__":
    main()
