"""What commands do before a model runs: silence libraries, check devices, plan the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.plan import DataPlan, build_plan
from fp8calib.data.sources import BuiltinPart
from fp8calib.errors import UsageError
from fp8calib.model.load import ModelSource, load_tokenizer

DEFAULT_SEQ_LEN = 2048


def quiet_libraries() -> None:
    """Turn off the progress bars and messages of transformers."""
    import transformers  # noqa: PLC0415

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def describe_decoded(model: str, checkpoint: Checkpoint) -> Iterator[str]:
    """Describe a model that is quantized already, and is decoded while it is read."""
    if checkpoint.form:
        yield (
            f"{model} is quantized already: its {checkpoint.form} are dequantized, and their "
            "errors are in everything that is measured; inputs are not quantized"
        )


def check_device_map(device_map: str | None, device: str) -> None:
    """Refuse an unknown --device-map, and one that contradicts --device."""
    if device_map not in {None, "auto"}:
        raise UsageError(f"--device-map {device_map}: must be auto")
    if device_map and device != "auto":
        raise UsageError("--device-map auto chooses the devices itself: leave out --device")


def plan_data(
    source: ModelSource,
    *,
    sources: Sequence[str],
    samples: int,
    seq_len: int | None,
    pack: bool,
    seed: int,
    part: BuiltinPart,
) -> DataPlan:
    """Build the data plan of a run; without a length, 2048 tokens or the model's maximum.

    Raises:
        UsageError: the length is above the model's maximum, or a data spec is invalid.
        DataError: the data cannot be read.
    """
    vocab_size = int(source.text_config.vocab_size)
    longest = source.max_positions
    length = seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise UsageError(
            f"--seq-len {length} is above the model's maximum of {longest} positions",
            hint=f"use --seq-len {longest} or less",
        )
    return build_plan(
        sources,
        tokenizer=lambda: load_tokenizer(source, vocab_size),
        vocab_size=vocab_size,
        samples=samples,
        seq_len=length,
        pack=pack,
        seed=seed,
        part=part,
        longest_padded=source.longest_padded,
    )
