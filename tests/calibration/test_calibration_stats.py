"""Statistics on disk: the same bytes for the same values, and nothing damaged is believed."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import PIL
import pytest
import soundfile
import soxr
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8calib.calibration.calibration_stats import (
    RunStats,
    SiteStats,
    load_stats_file,
    merge_shards,
    save_stats,
)
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.stats_header import Skipped, StatsHeader, StatsShard
from fp8calib.calibration.unquantized_tensors import (
    hash_unquantized,
    is_sketch,
    measure_distance,
    sketch_matrix,
)
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.modality import Modality
from fp8calib.data.sequences import Share
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.geometry import Role, Site
from tests import zoo
from tests.doors import WorkShare, as_bytes, opened
from tests.formats.handmade import make_attention, make_geometry

K = Site("model.layers.0.self_attn", Role.K)
UP = Site("model.layers.0.mlp.experts.up_proj", Role.INPUT)
WEIGHT = Site("model.layers.0.mlp.experts.up_proj", Role.WEIGHT)


def make_stats() -> RunStats:
    """Give one site of each kind, every field in use, two tensors equal."""
    header = StatsHeader(
        geometry=make_geometry([make_attention(0)]),
        model_fingerprint="aa",
        data_fingerprint="bb",
        data_sources=("calib.jsonl",),
        num_sequences=2,
        num_tokens=8,
        recipe_name="kv",
        recipe_hash="cc",
        compute_dtype="float32",
        histogram_sequences=8,
        input_histogram_tokens=4,
        skipped=(Skipped(site="lm_head", why="not run"),),
        versions={"torch": "2"},
        modality_tokens={Modality.TEXT: 7, Modality.IMAGE: 1},
    )
    sites = {
        WEIGHT: SiteStats(
            count=0,
            amax=torch.tensor([1.0, 2.0]),
            amax_in=torch.tensor([0.5, 0.25, 0.0]),
            experts=torch.tensor([[1.0], [2.0]]),
        ),
        K: SiteStats(
            count=8,
            amax=torch.tensor([1.0, 2.0]),
            progress=torch.tensor([1.0, 1.0, 2.0, 2.0]),
            histogram=torch.tensor([0, 3, 5]),
        ),
        UP: SiteStats(
            count=8, amax=torch.tensor([4.0, 3.0, 2.0]), expert_counts=torch.tensor([8, 0])
        ),
    }
    return RunStats(header=header, sites=sites)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "stats.safetensors"
    save_stats(make_stats(), found)
    return found


def damage(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and JSON header of a stats file, well-formed as safetensors."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fp8calib"])
    change(tensors, header)
    save_file(tensors, path, metadata={"fp8calib": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, _: t[f"{K}/progress"].__setitem__(1, float("nan")), "its digest does not"),
        (lambda t, _: t.update({f"{K}/progress": torch.ones(4).half()}), "its digest does not"),
        (lambda _, h: h["header"]["modality_tokens"].update(smell=1), "header.modality_tokens"),
        (lambda t, _: t.pop(f"{UP}/amax"), "its digest does not"),
        (lambda _, h: h["header"].update(schema_version=3), "header.schema_version"),
        (lambda _, h: h["header"].pop("geometry"), "header.geometry"),
        (lambda _, h: h["header"].update(surprise=1), "header.surprise"),
        (lambda _, h: h["counts"].update({str(K): -1}), "counts"),
        (lambda _, h: h.update(aliases={f"{K}/amax": "nowhere"}), "its digest does not"),
    ],
)
def test_a_damaged_file_is_refused(path: Path, change: Callable[..., object], told: str) -> None:
    damage(path, change)
    with pytest.raises(ModelError, match=told) as caught:
        load_stats_file(path)
    assert caught.value.message.startswith(f"{path} is damaged")
    assert "calibrate" in caught.value.hint


def test_other_files_and_none_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(1)}, other)
    with pytest.raises(ModelError, match="is not a stats file of this tool"):
        load_stats_file(other)
    other.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        load_stats_file(other)
    with pytest.raises(UsageError, match="no stats file at"):
        load_stats_file(tmp_path / "none.safetensors")


def through_files(parts: list[RunStats], folder: Path) -> list[tuple[str, RunStats]]:
    found = []
    for number, part in enumerate(parts):
        save_stats(part, folder / f"{number}.safetensors")
        loaded = load_stats_file(folder / f"{number}.safetensors", accepts_shard=True)
        found.append((f"file {number}", loaded))
    return found


def make_parts(count: int = 2) -> list[tuple[str, RunStats]]:
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


def with_header(stats: RunStats, **changes: Any) -> RunStats:
    return replace(stats, header=stats.header.model_copy(update=changes))


def with_part(stats: RunStats, **changes: Any) -> RunStats:
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
    with pytest.raises(ModelError, match="2 shards needs each once, found 1, 1, 2"):
        merge_shards([first, second, ("again", first[1])])
    with pytest.raises(ModelError, match="no shards to join"):
        merge_shards([])


def test_parts_of_another_cut_are_refused() -> None:
    first, second = make_parts()
    with pytest.raises(ModelError, match="different runs: shard 1 of 2, and shard 2 of 3"):
        merge_shards([first, ("other", with_part(second[1], count=3))])
    with pytest.raises(ModelError, match="--batch-size 1, and 4: the shards"):
        merge_shards([first, ("other", with_part(second[1], batch_size=4))])


def test_a_checkpoint_of_an_interrupted_run_is_no_part() -> None:
    first, second = make_parts()
    with pytest.raises(ModelError, match="kept is not a finished shard, but the checkpoint of an"):
        merge_shards([first, ("kept", with_part(second[1], is_checkpoint=True))])


# --- shards of a calibration: together they are the whole, byte for byte, whatever the order -----


CASES = [("mixtral", False), ("gpt2", False), ("gemma3n_text", True), ("qwen3_next", True)]
"""Families, and whether they are run layer by layer."""


def test_more_shards_than_batches_are_refused(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    with opened(tmp_path / "model") as subject, pytest.raises(UsageError, match="only 7 batches"):
        subject.calibrate(WorkShare(shard=Share(index=1, count=8)))


@pytest.mark.parametrize(("family", "streamed"), CASES)
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


CONFIG = {"model_type": "llama", "hidden_size": 4}
WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b.weight": torch.ones(4096, dtype=torch.bfloat16),
    "c.bias": torch.zeros(0),
}


def fingerprint(
    folder: Path,
    weights: dict[str, torch.Tensor] = WEIGHTS,
) -> str:
    with save(folder, **weights) as checkpoint:
        return fingerprint_model(CONFIG, checkpoint)


@pytest.mark.parametrize(
    "changed",
    [
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"] + 1},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].reshape(4, 3)},
        {**WEIGHTS, "b.weight": WEIGHTS["b.weight"].to(torch.float16)},
        {**WEIGHTS, "d.weight": torch.ones(1)},
        {name: value for name, value in WEIGHTS.items() if name != "c.bias"},
        {"z.weight" if name == "a.weight" else name: value for name, value in WEIGHTS.items()},
    ],
    ids=["values", "shape", "dtype", "one more", "one less", "a name"],
)
def test_another_model_has_another_fingerprint(
    tmp_path: Path, changed: dict[str, torch.Tensor]
) -> None:
    assert fingerprint(tmp_path / "changed", changed) != fingerprint(tmp_path / "whole")


def test_versions_of_what_reads_media_are_those_that_are_installed() -> None:
    text = versions([Modality.TEXT])
    seen, heard = (versions([kind]) for kind in (Modality.IMAGE, Modality.AUDIO))
    assert text == versions()
    assert heard == {**text, "soundfile": soundfile.__version__, "soxr": soxr.__version__}
    assert seen.pop("pillow") == PIL.__version__
    assert seen.keys() - text.keys() == ({"torchvision"} if find_spec("torchvision") else set())


# --- sketches of linears -------------------------------------------------------------------------


def draw(seed: int, rows: int = 4500, columns: int = 256) -> torch.Tensor:
    """Draw a matrix whose rows have different sizes; it has more rows than are read at once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator) * sizes


def save(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [0.02, 0.1, 0.4, 1.4])
def test_a_distance_is_estimated(tmp_path: Path, seed: int, size: float) -> None:
    """Compared with the Frobenius norm of the difference."""
    base = draw(seed)
    noise = draw(seed + 100)
    other = base + noise * (size * base.norm() / noise.norm())
    expected = float((other - base).norm() / other.norm())
    with save(tmp_path / "x", base=base, other=other) as checkpoint:
        recorded = sketch_matrix(checkpoint, "base")[0]
        assert measure_distance(recorded, checkpoint, "base") == 0
        assert measure_distance(recorded, checkpoint, "other") == pytest.approx(expected, rel=0.4)


def test_the_vectors_never_change(tmp_path: Path) -> None:
    """Files hold sketches: the signs of 32 columns, each the only entry of a row."""
    entry = torch.eye(32)
    with save(tmp_path / "x", a=entry) as checkpoint:
        found = sketch_matrix(checkpoint, "a")[0]
    assert found == f"rows:{RECORDED}"


RECORDED = (
    "gL+AP4C/gD+AP4A/gD+AP4A/gL+Av4C/gL+Av4A/gL+AP4A/gL+Av4C/gL+AP4C/gD+AP4C/gD+AP4C/gL+APw=="
)


@pytest.mark.parametrize("text", ["", "AAAA", "#", "gH+A" * 21 + "gA=="])
def test_a_damaged_sketch_is_refused(tmp_path: Path, text: str) -> None:
    with (
        save(tmp_path / "x", a=torch.eye(32)) as checkpoint,
        pytest.raises(ModelError, match=r"damaged: sketch of a: .*(not 32|adding|ase64|buffer)"),
    ):
        measure_distance(f"rows:{text}", checkpoint, "a")


def test_norms_and_embeddings_are_hashed_and_linears_sketched(tmp_path: Path) -> None:
    """An output layer is neither: some tools quantize it, others do not."""
    model = zoo.save("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        told = hash_unquantized(checkpoint)
    linears = {
        name for name, each in model.named_parameters() if "_proj" in name and each.dim() == 2
    }
    kept = {
        name for name, _ in model.named_parameters() if "norm" in name or "embed_tokens" in name
    }
    assert {name for name, text in told.items() if is_sketch(text)} == linears
    assert told.keys() - linears == kept
