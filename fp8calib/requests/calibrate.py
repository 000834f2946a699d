"""The request of `fp8calib calibrate`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated

from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import RecipeOptions
from fp8calib.options.shipped_recipes import describe_recipes
from fp8calib.requests import shared


@dataclass(frozen=True, slots=True)
class CalibrateRequest(RecipeOptions):
    """Run calibration text through a model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """

    model: shared.RunModel
    data: shared.DataOption = None
    _: KW_ONLY
    recipe: Annotated[
        str | Path,
        Option(
            "--recipe",
            metavar="NAME|FILE",
            reads=str,
            help="What to observe and write: a YAML file or a name. "
            + " ".join(f"{name}: {purpose}" for name, purpose in describe_recipes()),
        ),
    ] = "kv"
    observe: Annotated[
        Collection[str] | None,
        Option(
            only_in_python=True,
            help="The kinds of sites to observe: kv, query, inputs, weights; None: the recipe's.",
        ),
    ] = None
    out: Annotated[
        str | Path | None,
        Option(
            "--out",
            metavar="DIR",
            reads=Path,
            help="Output folder; default ./<model>-fp8calib.",
            about_argument="Output folder; None writes nothing.",
        ),
    ] = None
    device: shared.DeviceOption = "auto"
    dtype: shared.DtypeOption = "auto"
    device_map: shared.DeviceMapOption = None
    memory: shared.MemoryOption = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the plan and exit: run and write nothing.")
    ] = False
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted or killed run.")] = (
        False
    )
    shard: Annotated[
        str | None,
        Option(
            "--shard",
            metavar="I/N",
            help="Run only part I of N (from 1); `fp8calib export` joins all.",
        ),
    ] = None
    replace_scales: shared.ReplaceScalesOption = False
    revision: shared.RevisionOption = None
    trust_remote_code: shared.TrustOption = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None
    progress: shared.ProgressArgument = None

    def on_command_line(self) -> CalibrateRequest:
        """Fill in the folder: the command always writes."""
        folder = f"{Path(str(self.model)).resolve().name}-fp8calib"
        return self if self.out is not None else replace(self, out=Path(folder))
