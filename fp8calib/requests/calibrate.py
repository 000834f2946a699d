"""The request of `fp8calib calibrate`, as it is asked: nothing is resolved yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.options.option import Option
from fp8calib.requests.shared import (
    BATCH_SIZE,
    SAMPLES,
    DataOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    MemoryOption,
    NoPackOption,
    QueryScaleOption,
    ReplaceScalesOption,
    RevisionOption,
    RuleOption,
    RunModel,
    SeqLenOption,
    TextColumnOption,
    TpOption,
    TrustOption,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """Run calibration text through a model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """

    model: RunModel
    data: DataOption = None
    text_column: TextColumnOption = None
    recipe: Annotated[
        str,
        Option(
            "--recipe",
            metavar="NAME|FILE",
            help="What to observe and write; see `fp8calib recipes`.",
        ),
    ] = "kv"
    out: Annotated[
        Path | None,
        Option("--out", metavar="DIR", help="Output folder; default ./<model>-fp8calib."),
    ] = None
    formats: FormatOption = None
    tp: TpOption = None
    samples: Annotated[int | None, SAMPLES] = None
    seq_len: SeqLenOption = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    no_pack: NoPackOption = False
    seed: Annotated[
        int | None,
        Option("--seed", metavar="S", help="Seed for mixing weighted data specs."),
    ] = None
    rule: RuleOption = None
    fallback: FallbackOption = None
    fp8_dtype: Fp8DtypeOption = None
    query_scale: QueryScaleOption = None
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    device_map: DeviceMapOption = None
    memory: MemoryOption = None
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
            help="Run only part I of N (from 1); `fp8calib merge` joins the statistics.",
        ),
    ] = None
    replace_scales: ReplaceScalesOption = False
    revision: RevisionOption = None
    trust_remote_code: TrustOption = False
    force: ForceOption = False

    @property
    def ignorable(self) -> dict[str, object]:
        """The options that have no effect with some recipes."""
        return {
            "--tp": self.tp,
            "--data": self.data,
            "--text-column": self.text_column,
            "--samples": self.samples,
            "--seq-len": self.seq_len,
            "--batch-size": self.batch_size,
            "--no-pack": self.no_pack,
            "--seed": self.seed,
        }
