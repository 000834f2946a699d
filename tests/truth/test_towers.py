"""Towers: inputs of their linears and q, k and v of their attention, against hooks of torch."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_utils import AttentionInterface

from fp8calib.calibration import make_header
from fp8calib.geometry.sites import Role, Site
from fp8calib.model.load import load_model, open_source
from fp8calib.model.topology.find import find_text_decoder
from fp8calib.recipe import Observe, Recipe
from fp8calib.run.resume import journal
from fp8calib.run.resume.work_share import WorkShare
from fp8calib.run.streaming import layer_journal
from fp8calib.stats.calibration_stats import load_stats
from tests.cli.program import fail, succeed
from tests.cli.program import run as run_command
from tests.kit.multimodal import (
    build_multimodal,
    draw_image,
    encode,
    parametrize,
    save_multimodal,
)
from tests.run import running
from tests.run.running import as_bytes, opened
from tests.run.test_resume import Stopping, interrupt
from tests.truth.test_media import plan_of, rows_of

_KINDS = ["llava", "idefics3", "gemma3", "qwen2_audio", "qwen2_5_vl", "qwen3_vl", "internvl"]
_TOWERS = Recipe(name="towers", observe=Observe(towers=True))


def calibrate(folder: Path, plan: Any, *, streamed: bool) -> Any:
    with patch.object(running, "RECIPE", _TOWERS), opened(folder, streamed=streamed) as subject:
        return subject.calibrate(plan=plan, batch_size=1, recipe=_TOWERS)


@parametrize(_KINDS)
def test_towers_are_observed_as_they_run(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path)
    plan = plan_of(name, tmp_path)
    stats = calibrate(tmp_path, plan, streamed=False)
    source = open_source(str(tmp_path))
    model = load_model(source, dtype=torch.float32, device="cpu", device_map=None)
    inputs, attention = run(model, name)
    assert inputs
    for module, amax in inputs.items():
        found = stats.sites[Site(module, Role.INPUT)]
        assert found.amax.tolist() == pytest.approx(amax.tolist(), rel=1e-6), module
        assert found.modalities is None
    for (module, role), amax in attention.items():
        assert stats.sites[Site(module, role)].amax.tolist() == pytest.approx(amax.tolist())
    assert {linear.module for linear in stats.header.towers} >= inputs.keys()


def run(
    model: Any, name: str
) -> tuple[dict[str, torch.Tensor], dict[tuple[str, Role], torch.Tensor]]:
    """Run the rows with media, and keep the largest magnitudes in towers."""
    _, processor = build_multimodal(name)
    decoder = find_text_decoder(model)[0]
    paths = {
        module: path
        for path, module in model.named_modules()
        if not path.startswith(decoder) and path != "lm_head"
    }
    inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    seen: dict[tuple[str, Role], list[torch.Tensor]] = defaultdict(list)
    for module, path in paths.items():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, path=path: inputs[path].append(
                    args[0].abs().reshape(-1, args[0].shape[-1]).amax(0)
                )
            )
    original = AttentionInterface.get_interface

    def look_up(self: Any, key: str, default: Any) -> Any:
        function = original(self, key, default)

        def attend(module: nn.Module, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            if module in paths:
                for role, x in zip((Role.Q, Role.K, Role.V), (q, k, v), strict=True):
                    seen[paths[module], role].append(x.abs().amax((0, 2, 3)))
            return function(module, q, k, v, *args, **kwargs)

        return attend

    with patch.object(AttentionInterface, "get_interface", look_up), torch.no_grad():
        for row in rows_of(name):
            if any(part["type"] != "text" for part in row[0]["content"]):
                model(**encode(processor, row))
    join = lambda parts: torch.stack(parts).amax(0)  # noqa: E731
    return (
        {path: join(parts) for path, parts in inputs.items()},
        {key: join(parts) for key, parts in seen.items()},
    )


@parametrize(_KINDS)
def test_streamed_towers_are_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    save_multimodal(name, tmp_path / "model")
    plan = plan_of(name, tmp_path / "model")
    one, other = (
        as_bytes(calibrate(tmp_path / "model", plan, streamed=streamed), tmp_path)
        for streamed in (False, True)
    )
    assert one == other


def test_a_quantized_tower_has_the_scales_of_its_statistics(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path / "model")
    plan = plan_of("llava", tmp_path / "model")
    stats = calibrate(tmp_path / "model", plan, streamed=False)
    as_bytes(stats, tmp_path)
    arguments = ("quantize", tmp_path / "model", "--scheme", "fp8-static", "--stats")
    plain = (*arguments, tmp_path / "as_bytes.safetensors", "--out")
    succeed(*plain, tmp_path / "towers", "--towers")
    succeed(*plain, tmp_path / "text")
    with safe_open(tmp_path / "towers" / "model.safetensors", "pt") as file:
        names = {n for n in file.keys() if "vision" in n and n.endswith("q_proj.weight")}  # noqa: SIM118
        assert names
        for name in names:
            assert file.get_tensor(name).dtype is torch.float8_e4m3fn
            site = Site(f"model.{name.removesuffix('.weight')}", Role.INPUT)
            scale = file.get_tensor(name.replace(".weight", ".input_scale"))
            assert float(scale) == pytest.approx(float(stats.sites[site].amax.max()) / 448)
    with safe_open(tmp_path / "text" / "model.safetensors", "pt") as file:
        assert all(file.get_tensor(name).dtype is torch.float32 for name in names)


def test_static_inputs_of_towers_need_their_statistics(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path / "model")
    with opened(tmp_path / "model") as subject:
        as_bytes(subject.calibrate(plan=plan_of("llava", tmp_path / "model")), tmp_path)
    stats = ("--stats", tmp_path / "as_bytes.safetensors", "--towers", "--scheme", "fp8-static")
    message = fail(7, "quantize", tmp_path / "model", *stats, "--out", tmp_path / "q")
    assert "--towers, on rows with media" in message


def test_towers_that_no_row_runs_are_not_observed(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words without an image"}')
    asked = ("--data", tmp_path / "rows.jsonl", "--towers", "--out", tmp_path / "out")
    succeed("calibrate", tmp_path / "model", *asked)
    skipped = load_stats(tmp_path / "out").header.skipped
    whys = {each.why for each in skipped if "vision_tower" in each.site}
    assert whys == {"no row runs this part of the tower: its input is not observed"}
    stats = ("--stats", tmp_path / "out", "--towers", "--scheme", "fp8-static")
    message = fail(7, "quantize", tmp_path / "model", *stats, "--out", tmp_path / "q")
    assert "in a tower with --towers and rows that run it" in message


def test_a_model_without_towers_has_none_to_observe(tmp_path: Path) -> None:
    from tests import zoo  # noqa: PLC0415
    from tests.cli.conftest import write_rows  # noqa: PLC0415

    zoo.save("llama", tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}] * 4)
    data = ("--data", tmp_path / "rows.jsonl", "--towers", "--out", tmp_path / "out")
    message = fail(4, "calibrate", tmp_path / "model", *data)
    assert "has no tower of vision or audio" in message
    plain = ("--scheme", "fp8-dynamic", "--towers", "--out", tmp_path / "out")
    message = fail(2, "quantize", tmp_path / "model", *plain)
    assert "--towers: no linear of a tower or projector is left to quantize" in message


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_goes_on_counts_its_towers_once(
    steps: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (journal, "LONGEST_INTERVAL_S"),
        (journal, "_WORTH_SAVING_S"),
        (layer_journal, "_SHORTEST_INTERVAL_S"),
        (layer_journal, "_INTERVAL_PER_COST"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    save_multimodal("llava", tmp_path / "model")
    plan = plan_of("llava", tmp_path / "model")
    recipe = Recipe(name="towers", observe=Observe(towers=True, weights=False))
    monkeypatch.setattr(running, "RECIPE", recipe)
    with opened(tmp_path / "model", streamed=streamed) as subject:

        def go_on() -> WorkShare:
            (tmp_path / "kept").mkdir(exist_ok=True)
            header = make_header(subject.prepared, plan, subject.source, subject.checkpoint, recipe)
            kept = journal.Journal(
                tmp_path / "kept",
                header,
                plan.text.hashes,
                shard=None,
                batch_size=1,
                warn=print,
            )
            kept.load()
            return WorkShare(journal=kept)

        options: dict[str, Any] = {"plan": plan, "batch_size": 1, "recipe": recipe}
        whole = as_bytes(subject.calibrate(**options), tmp_path)
        with pytest.raises(KeyboardInterrupt):
            subject.calibrate(go_on(), progress=Stopping(steps, interrupt), **options)
        assert as_bytes(subject.calibrate(go_on(), **options), tmp_path) == whole


def test_a_shard_of_text_merges_with_one_of_images(tmp_path: Path) -> None:
    """The towers that no row of the first shard reached are observed in the second."""
    save_multimodal("llava", tmp_path / "model")
    rows = [{"text": "some words that go on and on for a while"}] * 4
    rows += [{"text": "what is <image>", "images": [{"bytes": picture(seed)}]} for seed in range(4)]
    pd = pytest.importorskip("pyarrow")
    table = pd.Table.from_pylist([{"images": None, **row} for row in rows])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    run = ("calibrate", tmp_path / "model", "--data", tmp_path / "rows.parquet", "--no-pack")
    run = (*run, "--samples", "8", "--seq-len", "128", "--dtype", "float32", "--towers", "--out")
    succeed(*run, tmp_path / "whole")
    for part in ("1/2", "2/2"):
        succeed(*run, tmp_path / part[0], "--shard", part)
    parts = [tmp_path / name / "stats.safetensors" for name in "12"]
    succeed("export", *parts, "--out", tmp_path / "joined")
    whole = (tmp_path / "whole" / "stats.safetensors").read_bytes()
    assert (tmp_path / "joined" / "stats.safetensors").read_bytes() == whole


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    draw_image(seed).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["vision_tower", "multi_modal_projector"])
@pytest.mark.parametrize("towers", [True, False])
def test_a_wrong_scale_of_a_tower_is_found(name: str, towers: bool, tmp_path: Path) -> None:
    """By statistics of towers, and without them by the other layers, as where there are none."""
    save_multimodal("llava", tmp_path / "model")
    plan = plan_of("llava", tmp_path / "model")
    stats = calibrate(tmp_path / "model", plan, streamed=False)
    as_bytes(stats, tmp_path)
    out = tmp_path / "q"
    saved = ("--stats", tmp_path / "as_bytes.safetensors")
    succeed(
        "quantize", tmp_path / "model", "--scheme", "fp8-static", *saved, "--towers", "--out", out
    )
    tensors = load_file(out / "model.safetensors")
    scale = next(key for key in sorted(tensors) if name in key and key.endswith(".input_scale"))
    tensors[scale] *= 448 if towers else 1e5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    if not towers:
        with opened(tmp_path / "model") as subject:
            as_bytes(subject.calibrate(plan=plan), tmp_path)
    outcome = run_command("check", out, "--engine", "vllm", *saved, "--json")
    assert outcome.code == 8, outcome.out
    assert scale in outcome.out
