"""The request of `fp8calib receipt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model, require_path
from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import DATA
from fp8calib.requests import shared
from fp8calib.requests.verify import check_scales


@dataclass(frozen=True, slots=True)
class ReceiptRequest:
    """Check a receipt of `verify`, sign it, or draw its badge.

    Exit code 8 if the file, its signature, the files that it names or its figures disagree.

    Example: fp8calib receipt verify receipt.json --model SmolLM2-135M-Instruct --rerun
    """

    action: Annotated[
        str,
        Option(
            choices=("verify", "sign", "badge"),
            help="verify: check it; sign: write FILE.sig or FILE.minisig; badge: write FILE.svg.",
        ),
    ]
    file: Annotated[
        str | Path,
        Option(metavar="FILE", reads=Path, check=require_path, help="The receipt."),
    ]
    _: KW_ONLY
    model: Annotated[
        str | Path | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The unquantized model, whose files are hashed.",
        ),
    ] = None
    scales: Annotated[
        Sequence[str | Path],
        Option(
            "--scales",
            metavar="PATH",
            reads=list[str],
            check=check_scales,
            help="What was measured, in the order of the receipt; repeat for several.",
        ),
    ] = ()
    data: Annotated[str | Path | Sequence[str | Path] | None, DATA] = None
    rerun: Annotated[
        bool, Option("--rerun", help="With `verify`: measure again, and compare the figures.")
    ] = False
    key: Annotated[
        str | Path | None,
        Option(
            "--key",
            metavar="FILE",
            reads=Path,
            check=partial(require_path, option="--key"),
            help="With `sign`, your private key of SSH or minisign. With `verify`, the signer's "
            "public key.",
        ),
    ] = None
    device: shared.DeviceOption = "auto"
    memory: shared.MemoryOption = None
    revision: shared.RevisionOption = None
    trust_remote_code: shared.TrustOption = False
    progress: shared.ProgressArgument = None
