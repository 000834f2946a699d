"""The bytes of FP8 checkpoints against numpy and ml_dtypes, from models of no known class."""

import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.quantization.plan import CalibratedScales
from fp8calib.quantization.write import find_finished
from tests.formats.foreign import FOLDER, load_tensors
from tests.kit.checkpoints import change_tensors
from tests.quantization.by_hand import (
    LAYER,
    Run,
    Silent,
    Tensors,
    block_amax,
    codes_of,
    encode,
    make_tensors,
    random,
    run,
    save,
    scale_for,
    separate_scales,
    spread,
    to_numpy,
)
from tests.quantization.stacked import STACKED

GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.o_proj",),
    ("mlp.down_proj",),
)
LINEARS = tuple(name for group in GROUPS for name in group)


BLOCKS = {
    "fp8-static": (None, None),
    "fp8-dynamic": (1, None),
    "w8a16": (1, None),
    "fp8-block": (128, 128),
}
"""Rows and columns of a scale, by scheme."""


def check_codes(tensors: Tensors, run: Run, group: tuple[str, ...], *block: int | None) -> None:
    """Compare the codes and scales of weights whose blocks share a scale."""
    found = run.tensors()
    weights = {name: to_numpy(tensors[f"{LAYER}.{name}.weight"]) for name in group}
    scale = scale_for(np.max([block_amax(weight, *block) for weight in weights.values()], 0))
    for name, weight in weights.items():
        stored = found[f"{LAYER}.{name}.weight_scale"]
        assert stored.dtype is torch.float32
        assert np.array_equal(stored.numpy().reshape(scale.shape), scale), name
        codes = codes_of(found[f"{LAYER}.{name}.weight"])
        assert np.array_equal(codes, encode(weight, spread(scale, weight, *block))), name


@pytest.mark.parametrize("scheme", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "shards"), [(torch.bfloat16, 4), (torch.float16, 1), (torch.float32, 1)]
)
def test_codes_and_scales_are_those_of_numpy(
    tmp_path: Path, scheme: str, dtype: torch.dtype, shards: int
) -> None:
    """Members of a group lie in different shards; blocks at the edges are smaller."""
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors().items()}
    source = save(tmp_path / "source", tensors, shards=shards)
    found = run(source, tmp_path / "out", scheme, scales=unit_inputs())
    for group in GROUPS if scheme == "fp8-static" else [(name,) for name in LINEARS]:
        check_codes(tensors, found, group, *BLOCKS[scheme])


def test_scales_of_blocks_may_be_powers_of_two(tmp_path: Path) -> None:
    tensors = make_tensors()
    source = save(tmp_path / "source", tensors)
    found = run(source, tmp_path / "out", "fp8-block", power_of_two=True).tensors()
    for name in LINEARS:
        weight = to_numpy(tensors[f"{LAYER}.{name}.weight"])
        scale = scale_for(block_amax(weight, 128, 128))
        scale = np.array([[2.0 ** math.ceil(math.log2(each)) for each in row] for row in scale])
        assert np.array_equal(found[f"{LAYER}.{name}.weight_scale"].numpy(), scale)
        codes = codes_of(found[f"{LAYER}.{name}.weight"])
        assert np.array_equal(codes, encode(weight, spread(scale, weight, 128, 128))), name


def unit_inputs() -> CalibratedScales:
    """Give an input scale for every linear."""
    inputs = {f"{LAYER}.{name}": torch.tensor(0.25 + i) for i, name in enumerate(LINEARS)}
    return CalibratedScales(inputs=inputs, kv={})


def test_all_else_is_copied_byte_for_byte(tmp_path: Path) -> None:
    tensors = make_tensors() | {"model.ids": torch.arange(7), "model.flag": torch.tensor(True)}
    found = run(save(tmp_path / "source", tensors, shards=3), tmp_path / "out", "fp8-block")
    stored = found.tensors()
    quantized = {f"{LAYER}.{name}.weight" for name in LINEARS}
    for name in tensors.keys() - quantized:
        assert stored[name].dtype is tensors[name].dtype
        assert torch.equal(stored[name], tensors[name]), name
    scales = {name.replace(".weight", ".weight_scale") for name in quantized}
    assert stored.keys() == tensors.keys() | scales


def test_dead_rows_and_weights_get_usable_scales_and_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[f"{LAYER}.mlp.gate_proj.weight"][7] = 0
    tensors[f"{LAYER}.mlp.down_proj.weight"][:] = 0
    found = run(save(tmp_path / "source", tensors), tmp_path / "out", "fp8-dynamic")
    stored = found.tensors()
    gate = np.abs(to_numpy(tensors[f"{LAYER}.mlp.gate_proj.weight"])).max()
    assert stored[f"{LAYER}.mlp.gate_proj.weight_scale"][7].item() == scale_for(gate)
    largest = max(np.abs(to_numpy(tensors[f"{LAYER}.{name}.weight"])).max() for name in LINEARS)
    down = stored[f"{LAYER}.mlp.down_proj.weight_scale"]
    assert set(down.flatten().tolist()) == {float(scale_for(largest))}
    assert not codes_of(stored[f"{LAYER}.mlp.down_proj.weight"]).any()
    listed = {(dead.tensor, dead.count, dead.total) for dead in found.written.all_zero}
    assert listed == {
        (f"{LAYER}.mlp.gate_proj.weight", 1, 300),
        (f"{LAYER}.mlp.down_proj.weight", 200, 200),
    }


def test_a_dead_expert_takes_the_largest_scale_of_its_siblings(tmp_path: Path) -> None:
    """A weight without siblings takes 1."""
    experts = f"{LAYER}.mlp.experts"
    dead = torch.zeros(32, 16, dtype=torch.bfloat16)
    tensors = {
        f"{experts}.0.down_proj.weight": random(32, 16, seed=1),
        f"{experts}.1.down_proj.weight": random(32, 16, seed=2, factor=5.0),
        f"{experts}.2.down_proj.weight": dead,
        f"{experts}.0.up_proj.weight": random(16, 32, seed=3, factor=50.0),
    }
    found = run(save(tmp_path / "source", tensors), tmp_path / "out", "fp8-block").tensors()
    largest = np.abs(to_numpy(tensors[f"{experts}.1.down_proj.weight"])).max()
    assert found[f"{experts}.2.down_proj.weight_scale"].item() == scale_for(largest)
    lone = run(save(tmp_path / "lone", {f"{LAYER}.fc.weight": dead}), tmp_path / "1", "w8a16")
    assert lone.tensors()[f"{LAYER}.fc.weight_scale"].tolist() == [[1.0]] * 32


@pytest.mark.parametrize(
    ("scheme", "name", "place", "value"),
    [
        ("fp8-static", "self_attn.k_proj", (129, 31), math.nan),
        ("fp8-dynamic", "self_attn.k_proj", (129, 31), math.inf),
        ("fp8-block", "self_attn.k_proj", (129, 31), -math.inf),
        ("fp8-dynamic", "input_layernorm", (3,), math.nan),
        ("fp8-dynamic", "mlp.gate", (129, 31), math.nan),
    ],
)
def test_what_is_not_finite_is_named_and_nothing_is_left(
    tmp_path: Path, scheme: str, name: str, place: tuple[int, ...], value: float
) -> None:
    tensors = {**make_tensors(), f"{LAYER}.mlp.gate.weight": random(130, 32, seed=9)}
    tensors[f"{LAYER}.{name}.weight"][place] = value
    source = save(tmp_path / "source", tensors)
    with pytest.raises(ModelError) as raised:
        run(source, tmp_path / "out", scheme, scales=unit_inputs())
    assert f"{LAYER}.{name}.weight holds {value} at {list(place)}" in raised.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_expert_that_is_cut_from_its_stack_in_16_bits_is_read_too(tmp_path: Path) -> None:
    """Where other layers' experts are quantized, those of an ignored one get a tensor each."""
    source = STACKED["llama4_text"].save(
        STACKED["llama4_text"].build("llama4_text"), tmp_path / "s"
    )
    stack = "model.layers.0.feed_forward.experts.down_proj"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[stack][1, 2, 3] = math.nan

    change_tensors(source, spoil)
    with pytest.raises(ModelError, match=rf"{stack} holds nan at \[1, 2, 3\]"):
        run(source, tmp_path / "out", "fp8-dynamic", ignore=["model.layers.0.feed_forward.experts"])


def test_tiny_weights_do_not_divide_by_zero(tmp_path: Path) -> None:
    """Subnormals: the scale stops at the smallest normal number."""
    weight = torch.tensor([[2.0**-140, -(2.0**-145)], [2.0**-130, 0.0]])
    source = save(tmp_path / "source", {f"{LAYER}.fc.weight": weight})
    found = run(source, tmp_path / "out", "w8a16").tensors()
    assert found[f"{LAYER}.fc.weight_scale"].tolist() == [[2.0**-126], [2.0**-126]]
    expected = encode(weight.numpy(), np.float32(2.0**-126))
    assert np.array_equal(codes_of(found[f"{LAYER}.fc.weight"]), expected)
    assert expected[1, 0] > 0


def test_a_disk_too_small_is_told_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "source", make_tensors(), shards=2)
    (source / "tokenizer.json").write_text("{}")
    out = run(source, tmp_path / "out", "w8a16")
    planned = out.plan.size_bytes
    assert planned == sum(path.stat().st_size for path in out.out.iterdir())
    free = type("Usage", (), {"free": planned - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(ExportError, match="are needed"):
        run(source, tmp_path / "other", "w8a16")
    free.free = planned  # type: ignore[attr-defined]
    assert run(source, tmp_path / "other", "w8a16").written.files


# --- the same bytes as llm-compressor and modelopt write of a model, where they divide as we do ---


SAME = {
    "llmcompressor-fp8-static-float32": ("compressed-tensors", "fp8-static"),
    "llmcompressor-fp8-dynamic-float32": ("compressed-tensors", "fp8-dynamic"),
    "llmcompressor-fp8-block-float32": ("compressed-tensors", "fp8-block"),
    "modelopt-fp8-float32": ("modelopt", "fp8-static"),
    "modelopt-fp8-channel-kv": ("modelopt", "fp8-dynamic"),
}
"""By folder: our form and scheme."""


def quantize(theirs: Tensors, out: Path, form: str, scheme: str) -> Tensors:
    """Quantize the model that the tool was given, with its input scales and no shared ones."""
    inputs = {
        name.removesuffix(".input_scale"): value.float().reshape(())
        for name, value in theirs.items()
        if name.endswith(".input_scale")
    }
    scales = CalibratedScales(inputs=inputs, kv={})
    with separate_scales():
        return run(FOLDER / "llama", out, scheme, form, scales=scales).tensors()


@pytest.mark.parametrize("name", SAME)
def test_every_tensor_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    theirs = load_tensors(name)
    ours = quantize(theirs, tmp_path / "out", *SAME[name])
    cache = {key for key in theirs if key.endswith((".k_scale", ".v_scale"))}
    assert ours.keys() == theirs.keys() - cache
    kept = {"model.embed_tokens.weight", "lm_head.weight"}
    for key, tensor in ours.items():
        if key in kept or "norm" in key:  # bfloat16 here, as in the source
            assert torch.equal(tensor.float(), theirs[key].float()), key
            continue
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape), key
        raw = (each.reshape(-1).view(torch.uint8) for each in (tensor, theirs[key]))
        assert torch.equal(*raw), key


SHARDS = 3


class Stopping(Silent):
    """A progress bar that ends the run when a shard and a bit are written."""

    def __init__(self, limit: int, signal_number: int | None) -> None:
        super().__init__()
        self.limit = limit
        self.signal_number = signal_number

    def advance(self, steps: int) -> None:
        """Count, and stop at the limit."""
        super().advance(steps)
        if self.steps > self.limit:
            if self.signal_number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), self.signal_number)


def stop(source: Path, out: Path, signal_number: int | None = None) -> None:
    """Quantize until the second shard is begun."""
    first = run(source, out.with_name("planned"), "w8a16").plan.shards[0]
    run(source, out, "w8a16", progress=Stopping(first.data_bytes, signal_number))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(tmp_path / "source", make_tensors(), shards=SHARDS)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def check_same(first: Run, second: Run) -> None:
    names = sorted(path.name for path in first.out.iterdir())
    assert names == sorted(path.name for path in second.out.iterdir())
    for name in names:
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes(), name


def interrupt(source: Path, out: Path) -> Path:
    """Interrupt a run and give the folder that it leaves."""
    with pytest.raises(KeyboardInterrupt):
        stop(source, out)
    assert not out.exists()
    return out.with_name(f"{out.name}.partial")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, source: Path, is_killed: bool) -> None:
    whole = run(source, tmp_path / "whole", "w8a16")
    partial = tmp_path / "out.partial"
    if is_killed:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=stop, args=(source, tmp_path / "out", signal.SIGKILL))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert any(path.name.endswith(".unfinished") for path in partial.iterdir())
    else:
        interrupt(source, tmp_path / "out")
    first = whole.plan.shards[0].name
    kept = (partial / first).stat().st_ino
    resumed = run(source, tmp_path / "out", "w8a16", resume=True)
    assert resumed.written.resumed == (first,)
    assert (resumed.out / first).stat().st_ino == kept
    check_same(whole, resumed)
    assert not partial.exists()


def test_a_shard_without_its_end_is_written_again(tmp_path: Path, source: Path) -> None:
    partial = interrupt(source, tmp_path / "out")
    first = partial / "model-00001-of-00003.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    resumed = run(source, tmp_path / "out", "w8a16", resume=True)
    assert resumed.written.resumed == ()
    check_same(run(source, tmp_path / "whole", "w8a16"), resumed)


KV = {f"{LAYER}.self_attn.k_scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    "change",
    [
        {"ignore": ("*.o_proj",)},
        {"form": "modelopt", "scheme": "fp8-dynamic"},
        {"scales": CalibratedScales(inputs={}, kv=KV)},
        {},
    ],
    ids=["other patterns", "other form", "other scales", "other weights"],
)
def test_an_interrupted_run_of_something_else_is_not_resumed(
    tmp_path: Path, source: Path, change: dict[str, Any]
) -> None:
    partial = interrupt(source, tmp_path / "out")
    if not change:
        doubled = {name: tensor * 2 for name, tensor in make_tensors().items()}
        save(source, doubled, shards=SHARDS)
    with pytest.raises(UsageError, match="another model or other options"):
        run(source, tmp_path / "out", resume=True, **{"scheme": "w8a16", **change})
    assert partial.exists()


def test_a_finished_output_is_known(tmp_path: Path, source: Path) -> None:
    found = run(source, tmp_path / "out", "w8a16")
    assert find_finished(found.out, found.plan)
    assert not find_finished(tmp_path / "elsewhere", found.plan)
    other = run(source, tmp_path / "other", "fp8-block")
    assert not find_finished(found.out, other.plan)
    rounded = run(source, tmp_path / "rounded", "fp8-block", power_of_two=True)
    assert not find_finished(other.out, rounded.plan)
    mixed, else_mixed = (
        run(source, tmp_path / name, "w8a16", layer_schemes={f"*.{name}": "fp8-dynamic"})
        for name in ("o_proj", "down_proj")
    )
    assert not find_finished(mixed.out, else_mixed.plan)
    (found.out / "config.json").unlink()
    assert not find_finished(found.out, found.plan)
