"""The command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def make_parser(
    mode: str,
    documentation: str,
    *,
    rounds: int = 0,
    samples: int = 0,
    dtypes: Sequence[str] = (),
    has_peers: bool = False,
) -> argparse.ArgumentParser:
    """Build the parser of a mode with those of the shared options that have a default here.

    The first line of `documentation` describes the mode; the first of `dtypes` is the default.
    """
    description = documentation.split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog=f"scripts/bench {mode}".strip(), description=description)
    # scripts/bench itself adds these two
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-python", required=True, help=argparse.SUPPRESS)
    if dtypes:
        parser.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    if rounds:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"measured rounds ({rounds})"
        )
    if samples:
        parser.add_argument("--samples", type=int, default=samples, help=f"sequences ({samples})")
        parser.add_argument("--seq-len", type=int, default=512, help="tokens per sequence (512)")
    if has_peers:
        parser.add_argument(
            "--peers", action="store_true", help="add llm-compressor and ModelOpt (in .venv-peers)"
        )
    if rounds or samples:
        parser.add_argument("--json", type=Path, metavar="FILE", help="save all figures in FILE")
    return parser
