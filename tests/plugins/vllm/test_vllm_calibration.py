"""vllm calibrate, with the answers that vLLM's workers gave."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fp8calib
from fp8calib.calibration.calibration_stats import COUNTS, SiteStats
from fp8calib.calibration.stats_header import Observe
from fp8calib.data.sequences import Batch
from fp8calib.errors import CalibrationError, UsageError
from fp8calib.model.geometry import Attention, Role, Site
from fp8calib.plugins import vllm as plugin
from fp8calib.plugins.vllm.commands.calibrate import parse_engine_options
from fp8calib.plugins.vllm.engine import EngineSettings
from fp8calib.plugins.vllm.modules import Matched, Rank, join_observed
from tests.plugins.vllm.recorded import read_golden
from tests.plugins.vllm.vllm_cases import CASES, GOLDENS, SEQ_LEN, make_rows

OPTIONS: dict[str, Any] = {
    "data": make_rows(),
    "seq_len": SEQ_LEN,
    "pack": False,
    "dtype": "float32",
    "out": None,
}
TOLERANCE = 1e-5
"""Relative, of magnitudes in float32 (measured: at most 2e-6)."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the vLLM that answers as recorded, of a llama unless a test says it."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("fake_vllm")))
    import vllm  # noqa: PLC0415

    vllm.LLM.asked.clear()
    vllm.LLM.answers = read_golden(GOLDENS / "llama.json")
    yield vllm.LLM
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the model of a case, made once."""
    root, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def make(name: str) -> Path:
        family = CASES[name].family
        if family not in made:
            made[family] = CASES[name].save_model(root / family)
        return made[family]

    return make


@pytest.mark.parametrize("name", CASES)
def test_what_the_ranks_saw_is_what_transformers_computes(
    vllm: Any, model_of: Callable[[str], Path], name: str
) -> None:
    vllm.answers = read_golden(GOLDENS / f"{name}.json")
    own = fp8calib.calibrate(model_of(name), **OPTIONS).stats

    found = plugin.calibrate(model_of(name), **OPTIONS, **CASES[name].arguments).stats

    missing = {site for site in own.sites if site not in found.sites}
    assert {site.module.rpartition(".")[2] for site in missing} <= {"down_proj"}
    assert all("experts" in site.module for site in missing)
    assert found.sites.keys() <= own.sites.keys()
    for site, stats in found.sites.items():
        assert stats.count == own.sites[site].count, site
        assert stats.tensors.keys() == own.sites[site].tensors.keys(), site
        for statistic, tensor in stats.tensors.items():
            expected = own.sites[site].tensors[statistic]
            assert tensor.shape == expected.shape, (site, statistic)
            if statistic in COUNTS:
                assert int(tensor.sum()) == int(expected.sum()), (site, statistic)
            else:
                torch.testing.assert_close(tensor, expected, rtol=TOLERANCE, atol=0.0)


def test_a_recipe_that_needs_them_is_refused_before_text_is_run(
    vllm: Any, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    vllm.answers = read_golden(GOLDENS / "mixtral-tp2.json")
    options = {**OPTIONS, "out": tmp_path / "out"}

    with pytest.raises(CalibrationError, match=r"down_proj.input: vLLM computes it inside"):
        plugin.calibrate(model_of("mixtral-tp2"), **options, recipe="w8a8-static")

    assert vllm.asked[-1].prompts == []


def test_every_sequence_is_run_once_in_order_a_step_each_with_a_16_bit_cache(
    vllm: Any, model_of: Callable[[str], Path]
) -> None:
    options = {**OPTIONS, "engine_option": {"gpu_memory_utilization": 0.5}}

    found = plugin.calibrate(model_of("llama"), **options).stats

    asked, rows = vllm.asked[-1], [row["input_ids"] for row in make_rows()]
    assert asked.prompts == rows
    expected = [each for name, args in asked.calls if name == "fp8calib_expect" for each in args[0]]
    assert [(first, length) for first, length, *_ in expected] == [
        (index, len(row)) for index, row in enumerate(rows)
    ]
    assert asked.arguments["max_num_batched_tokens"] > SEQ_LEN
    wanted = {
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "language_model_only": True,
        "max_num_seqs": 1,
        "gpu_memory_utilization": 0.5,
    }
    assert wanted.items() <= asked.arguments.items()
    other = fp8calib.calibrate(model_of("llama"), **OPTIONS).stats
    assert found.header.explain_other(other.header) == (
        "different engine (vllm 0.32.0, tensor parallel 1, pipeline parallel 1, and transformers)"
    )


def test_a_drafter_drafts_one_token_and_is_named(
    vllm: Any, model_of: Callable[[str], Path]
) -> None:
    drafter = {"method": "mtp", "num_speculative_tokens": 3}
    options = {**OPTIONS, "engine_option": {"speculative_config": drafter}}

    found = plugin.calibrate(model_of("llama"), **options).stats

    asked = vllm.asked[-1]
    assert asked.arguments["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert found.header.engine.endswith(", drafter mtp")
    (of_model, of_drafter), *_ = (args for name, args in asked.calls if "describe" in name)
    assert of_drafter == of_model  # the layers for multi-token prediction are in it


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, "quantized cache"),
        ({"load_format": "dummy"}, "random weights"),
        ({"limit_mm_per_prompt": {"image": 0}}, "text alone is run"),
        ({"speculative_config": "eagle"}, "write {method: ..., model: ...}"),
        ({"gpu_memory_utilisation": 0.5}, "no such argument"),
    ],
)
def test_options_that_would_falsify_the_statistics_are_refused(
    vllm: Any, model_of: Callable[[str], Path], option: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        plugin.calibrate(model_of("llama"), **OPTIONS, engine_option=option)
    assert vllm.asked == []


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (b'"faults":"[]"', b'"faults":"[1]"', r"did not run the text as it is \(rank 0 of 1"),
        (b'"[[0, 1], ', b'"[', r"vLLM ran sequences 1 to 8 of 0 to 8 \(rank 0 of 1"),
        (b'"nonfinite":""', b'"nonfinite":"x"', r"NaN or inf in x of vLLM"),
        (b'.k\\": 387', b'.k\\": 386', r"vLLM showed 386 tokens at model.layers.0.self_attn.k"),
    ],
)
def test_what_the_engine_did_not_run_as_planned_is_an_error(
    vllm: Any, model_of: Callable[[str], Path], before: bytes, after: bytes, text: str
) -> None:

    def change(answer: bytes) -> bytes:
        size = int.from_bytes(answer[:8], "little")
        header = answer[8 : 8 + size]
        assert before in header
        changed = header.replace(before, after)
        return len(changed).to_bytes(8, "little") + changed + answer[8 + size :]

    collected = vllm.answers["fp8calib_collect"]
    vllm.answers["fp8calib_collect"] = [change(each) for each in collected]
    with pytest.raises(CalibrationError, match=text):
        plugin.calibrate(model_of("llama"), **OPTIONS)


@pytest.mark.parametrize(
    ("error", "text", "resumes"),
    [
        (
            ValueError("The prompt is too long"),
            "refuses a row of samples 0 to 0: .*too long",
            False,
        ),
        (RuntimeError("cancelled"), "vLLM stopped: RuntimeError: cancelled", True),
    ],
)
def test_an_engine_that_stops_is_named_and_whether_to_resume(
    vllm: Any,
    model_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: Exception,
    text: str,
    resumes: bool,
) -> None:
    monkeypatch.setattr(vllm, "generate", Mock(side_effect=error))
    with pytest.raises(CalibrationError, match=text) as raised:
        plugin.calibrate(model_of("llama"), **{**OPTIONS, "out": tmp_path / "out"})
    assert ("resume" in raised.value.hint) is resumes


def test_a_signal_ends_the_start_of_vllm(
    vllm: Any, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "sent", [signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it behind &
    try:
        with pytest.raises(KeyboardInterrupt):
            plugin.calibrate(model_of("llama"), **OPTIONS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not vllm.asked


def test_rows_with_media_are_refused() -> None:
    media: Any = object()
    batch = Batch(first=0, input_ids=torch.zeros(1, 4).long(), lengths=(4,), media=media)
    run: Any = None
    with pytest.raises(UsageError, match="the data has images or audio"):
        EngineSettings(dtype="float32").observe(run, [batch], None)


def test_q_is_what_the_model_multiplied_before_attention() -> None:
    attention = Attention(
        module="layers.0.attn",
        checkpoint_module="layers.0.attn",
        kind="heads",
        num_heads=2,
        num_kv_heads=2,
        k_head_dim=4,
        v_head_dim=4,
        query_divisor=0.5,
    )
    name = "model.layers.0.attn"
    matched = Matched(linears={}, attentions={name: attention}, unseen={})
    ranks = [
        Rank(
            version="0.32.0",
            tp=(rank, 2),
            pp=(0, 1),
            modules={name: {"kind": "heads", "num_heads": 1, "num_kv_heads": 1}},
            loads={},
            problem="",
        )
        for rank in range(2)
    ]
    found = [
        {Site(name, Role.Q): SiteStats(count=3, amax=torch.tensor([float(rank + 1)]))}
        for rank in range(2)
    ]

    joined = join_observed(matched, Observe(kv=True, query=True), ranks, found)

    assert joined[attention.site(Role.Q)].amax.tolist() == [0.5, 1.0]


def test_engine_options_are_read_as_yaml() -> None:
    texts = ["gpu_memory_utilization=0.8", "enable-expert-parallel=true", "hf_overrides={a: 1}"]
    assert parse_engine_options(texts) == {
        "gpu_memory_utilization": 0.8,
        "enable_expert_parallel": True,
        "hf_overrides": {"a": 1},
    }
    for text in ("seed", "=1", "a={"):
        with pytest.raises(UsageError, match="--engine-option"):
            parse_engine_options([text])
