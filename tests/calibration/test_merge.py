"""Joining parts: sums and maxima typed by hand, and every set of parts that is none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8calib.calibration.calibration_stats import (
    CalibrationStats,
    load_stats_file,
    merge_shards,
    save_stats,
)
from fp8calib.calibration.stats_header import StatsShard
from fp8calib.data.sequences import Share
from fp8calib.errors import ModelError, UsageError
from tests import zoo
from tests.calibration.test_calibration_stats import WEIGHT, K, make_stats
from tests.doors import WorkShare, as_bytes, opened


def through_files(
    parts: list[CalibrationStats], folder: Path
) -> list[tuple[str, CalibrationStats]]:
    found = []
    for number, part in enumerate(parts):
        save_stats(part, folder / f"{number}.safetensors")
        loaded = load_stats_file(folder / f"{number}.safetensors", accepts_shard=True)
        found.append((f"file {number}", loaded))
    return found


def make_parts(count: int = 2) -> list[tuple[str, CalibrationStats]]:
    """Give parts of the two sequences of the handmade header, weights in the first."""
    whole = make_stats()
    bounds = [2 * index // count for index in range(count + 1)]
    return [
        (
            f"part{index + 1}",
            replace(
                whole,
                sites={K: whole.sites[K], **({} if index else {WEIGHT: whole.sites[WEIGHT]})},
                shard=StatsShard(
                    index=index + 1,
                    count=count,
                    batch_size=1,
                    sequences=((bounds[index], bounds[index + 1]),),
                ),
            ),
        )
        for index in range(count)
    ]


def with_header(stats: CalibrationStats, **changes: Any) -> CalibrationStats:
    return replace(stats, header=stats.header.model_copy(update=changes))


def with_part(stats: CalibrationStats, **changes: Any) -> CalibrationStats:
    assert stats.shard is not None
    return replace(stats, shard=stats.shard.model_copy(update=changes))


CHANGED_HEADERS = {
    "different config.json": {"model_fingerprint": "b" * 32 + "a" * 32},
    "different data (8 tokens": {"data_fingerprint": "dd"},
    "different recipe (kv cc": {"recipe_hash": "ee"},
    "different recipe (kv": {"recipe_name": "mine"},
    "different dtype (float32, and bfloat16)": {"compute_dtype": "bfloat16"},
    "different version of torch (2, and 3)": {"versions": {"torch": "3"}},
    "different version of fp8calib (none, and 1)": {"versions": {"torch": "2", "fp8calib": "1"}},
    "different histogram_sequences (8, and 4)": {"histogram_sequences": 4},
}


@pytest.mark.parametrize("words", CHANGED_HEADERS)
def test_parts_of_two_runs_are_refused_and_the_difference_named(words: str) -> None:
    first, second = (
        (name, with_header(stats, model_fingerprint="a" * 64)) for name, stats in make_parts()
    )
    changed = with_header(second[1], **CHANGED_HEADERS[words])
    with pytest.raises(ModelError) as refused:
        merge_shards([first, ("part2", changed)])
    assert words in refused.value.message
    assert "part2 and part1 are of different runs" in refused.value.message


def test_a_part_that_is_there_twice_is_refused() -> None:
    first, second = make_parts()
    with pytest.raises(ModelError, match="part1 and again are both shard 1 of 2"):
        merge_shards([first, second, ("again", first[1])])


def test_parts_of_another_cut_are_refused() -> None:
    first, second = make_parts()
    with pytest.raises(ModelError, match="different runs: shard 1 of 2, and shard 2 of 3"):
        merge_shards([first, ("other", with_part(second[1], count=3))])
    with pytest.raises(ModelError, match="--batch-size 1, and 4: the shards"):
        merge_shards([first, ("other", with_part(second[1], batch_size=4))])


def test_a_checkpoint_of_an_interrupted_run_is_no_part() -> None:
    first, second = make_parts()
    with pytest.raises(ModelError, match="do not hold all 2 sequences"):
        merge_shards([first, ("unfinished", with_part(second[1], sequences=()))])
    with pytest.raises(ModelError, match="kept is the checkpoint of an interrupted run"):
        merge_shards([first, ("kept", with_part(second[1], is_checkpoint=True))])


# --- shards of a calibration: together they are the whole, byte for byte, whatever the order -----


FAMILIES = ("mixtral", "gemma3n_text", "qwen3_next", "gpt2")


def test_more_shards_than_batches_are_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject, pytest.raises(UsageError, match="only 7 batches"):
        subject.calibrate(WorkShare(shard=Share(index=1, count=8)))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_merge_to_the_whole_in_any_order(
    family: str, streamed: bool, tmp_path: Path
) -> None:
    zoo.save(family, tmp_path / "model")
    with opened(tmp_path / "model", streamed=streamed) as subject:
        whole = as_bytes(subject.calibrate(), tmp_path)
        for count in (1, 3):
            shards = [Share(index=index, count=count) for index in range(1, count + 1)]
            parts = through_files(
                [subject.calibrate(WorkShare(shard=shard)) for shard in shards], tmp_path
            )
            for order in (parts, parts[::-1], parts[1:] + parts[:1]):
                assert as_bytes(merge_shards(order), tmp_path) == whole
