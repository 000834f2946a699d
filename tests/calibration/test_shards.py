"""Shards of a calibration: together they are the whole, byte for byte, whatever the order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.calibration.calibration_stats import CalibrationStats, load_stats, save_stats
from fp8calib.calibration.merge import merge_shards
from fp8calib.data.shares import Share
from fp8calib.errors import UsageError
from tests import zoo
from tests.calibration.running import WorkShare, as_bytes, opened

FAMILIES = ("llama", "mixtral", "gemma3n_text", "qwen3_next", "gpt2")


def through_files(
    parts: list[CalibrationStats], folder: Path
) -> list[tuple[str, CalibrationStats]]:
    found = []
    for number, part in enumerate(parts):
        save_stats(part, folder / f"{number}.safetensors")
        loaded = load_stats(folder / f"{number}.safetensors", accepts_shard=True)
        found.append((f"file {number}", loaded))
    return found


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


def test_a_shard_runs_its_sequences_and_reads_its_weights(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject:
        parts = [subject.calibrate(WorkShare(shard=Share(index=i, count=2))) for i in (1, 2)]
    # 13 sequences in twos: seven batches, three for the first shard
    assert [part.shard.sequences for part in parts if part.shard] == [((0, 6),), ((6, 13),)]
    weights = [
        {str(site) for site in part.sites if str(site).endswith(".weight")} for part in parts
    ]
    assert not weights[0] & weights[1]
    assert [len(names) for names in weights] == [7, 7]
    tokens = [part.sites[site].count for part in parts for site in [min(part.sites)]]
    assert sum(tokens) == parts[0].header.num_tokens


def test_more_shards_than_batches_are_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject, pytest.raises(UsageError, match="only 7 batches"):
        subject.calibrate(WorkShare(shard=Share(index=1, count=8)))
