"""`fp8calib.calibrate`: the bytes of the command line, and a model in memory left as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

import fp8calib
from fp8calib.calibration.calibration_stats import save_stats
from fp8calib.plugins.gptq import gptq
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.kit.apart import run_code
from tests.kit.checkpoints import load_folder
from tests.kit.pictures import assert_unchanged, take

LENGTH = 16
pytestmark = pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")


def token_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 120, (20,), generator=generator) for _ in range(6)]


def stats_bytes(stats: fp8calib.CalibrationStats, folder: Path) -> bytes:
    save_stats(stats, folder / "made.safetensors")
    return (folder / "made.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3"])
def test_a_model_in_memory_gives_the_bytes_of_the_command_line(family: str, tmp_path: Path) -> None:
    model = zoo.save(family, tmp_path / "model")
    rows = token_rows()
    spec = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row.tolist()} for row in rows])
    out = tmp_path / "out"
    succeed(
        *("calibrate", tmp_path / "model", "--data", spec, "--seq-len", LENGTH),
        *("--dtype", "float32", "--out", out, "--format", "kv-scales"),
    )
    written = fp8calib.load_stats(out)
    found = fp8calib.calibrate(model, spec, seq_len=LENGTH).stats
    assert stats_bytes(found, tmp_path) == (out / "stats.safetensors").read_bytes()
    by_rows = fp8calib.calibrate(model, rows, seq_len=LENGTH).stats
    assert by_rows.header.data_sources == ("in memory",)
    assert by_rows.header.data_fingerprint == written.header.data_fingerprint
    expected = load_file(out / "kv_scales.safetensors")
    for scales in (found.kv_scales(), by_rows.kv_scales(), written.kv_scales()):
        assert scales.keys() == expected.keys()
        assert all(torch.equal(scales[name], expected[name]) for name in expected)


@pytest.mark.parametrize("run", ["calibrate", "verify", "quantize", "gptq"])
def test_a_model_in_memory_is_left_as_it_was(run: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = zoo.build("llama", rope_parameters=rope, max_position_embeddings=24)
    model(torch.randint(3, 100, (1, 40)))  # the rotary embedding has grown with the length
    model.train()
    model.model.layers[0].eval()  # the flags of modules may differ
    before = take(model)
    rows = token_rows()
    random_state = torch.get_rng_state()
    if run == "calibrate":
        fp8calib.calibrate(model, rows, seq_len=LENGTH)
    elif run == "verify":
        stats = fp8calib.calibrate(model, rows, seq_len=LENGTH).stats
        report = fp8calib.verify(model, stats, rows, seq_len=LENGTH)
        assert [each.name for each in report.candidates] == ["statistics", "scale-1.0"]
        report = fp8calib.verify(model, data=rows, seq_len=LENGTH, scheme="fp8-dynamic")
        assert report.candidates[0].kld_mean > 0  # weights were replaced for a while
    elif run == "quantize":
        fp8calib.quantize(model, "fp8-dynamic", tmp_path / "fp8", allow_unservable=True)
    else:
        out = tmp_path / "fp8"
        gptq(model, "fp8-dynamic", out, data=rows, seq_len=LENGTH, allow_unservable=True)
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_inference_mode_of_the_caller_changes_nothing(tmp_path: Path) -> None:
    model = zoo.build("llama")
    result = fp8calib.calibrate(model, token_rows(), seq_len=LENGTH)
    expected = stats_bytes(result.stats, tmp_path)
    with torch.inference_mode():
        found = fp8calib.calibrate(model, token_rows(), seq_len=LENGTH).stats
        fp8calib.verify(model, found, token_rows(), seq_len=LENGTH, scheme="fp8-dynamic")
        assert torch.is_inference_mode_enabled()
        unchangeable = zoo.build("llama")
    assert stats_bytes(found, tmp_path) == expected
    with pytest.raises(fp8calib.UsageError, match=r"embed_tokens.* made in torch.inference_mode"):
        fp8calib.verify(unchangeable, [], token_rows(), seq_len=LENGTH, scheme="fp8-dynamic")


class LoRALinear(torch.nn.Linear):
    """An adapter that somebody wrote, as a subclass."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.lora_a = torch.nn.Linear(size, 2)


class Wrapped(torch.nn.Module):
    """An adapter as PEFT has it."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (weight_norm, "its weight is computed from parametrizations"),
        (
            lambda module: prune.l1_unstructured(module, "weight", 0.5),
            "its weight is computed from weight_orig",
        ),
        (lambda module: LoRALinear(module.in_features), "beside weight and bias it has lora_a"),
        (Wrapped, "Wrapped is an adapter"),
    ],
)
def test_a_linear_with_more_than_its_weight_is_refused(
    change: Callable[[Any], Any], message: str
) -> None:
    model = zoo.build("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = change(attention.q_proj)
    with pytest.raises(fp8calib.ModelError, match=rf"layers\.1\.self_attn\.q_proj: {message}"):
        fp8calib.calibrate(model, token_rows(), seq_len=LENGTH)


def test_scales_are_complete_or_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: partly\nobserve: {ignore: ['*.layers.1.self_attn*']}\n")
    model = zoo.build("llama")
    stats = fp8calib.calibrate(model, token_rows(), seq_len=LENGTH, recipe=str(recipe)).stats
    with pytest.raises(fp8calib.ExportError, match=r"layers\.1\.self_attn"):
        stats.kv_scales()
    whole = fp8calib.calibrate(zoo.build("llama"), token_rows(), seq_len=LENGTH).stats
    for options, message in [
        ({"granularity": "channel"}, "granularity 'channel'"),
        ({"tp": 0}, "0"),
        ({"tp": 3}, "3"),
        ({"rule": "median"}, "median"),
        ({"fp8_dtype": "e5m2"}, "^--fp8-dtype: must be"),
    ]:
        with pytest.raises(fp8calib.UsageError, match=message):
            whole.kv_scales(**options)  # type: ignore[arg-type]


def test_texts_are_rows_of_text(model: Path, tmp_path: Path) -> None:
    texts = [f"w{i} w{i + 1} w{2 * i}" for i in range(20)]
    spec = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    options: dict[str, Any] = {"seq_len": LENGTH, "dtype": "float32"}
    expected = fp8calib.calibrate(model, spec, **options).stats
    found = fp8calib.calibrate(model, iter(texts), **options).stats
    assert found.header.data_fingerprint == expected.header.data_fingerprint
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    live = fp8calib.calibrate(
        loaded, texts, seq_len=LENGTH, tokenizer=AutoTokenizer.from_pretrained(model)
    )
    assert live.stats.header.data_fingerprint == expected.header.data_fingerprint
    several = fp8calib.calibrate(model, [spec, spec], **options).stats
    assert several.header.data_sources == ("rows.jsonl", "rows.jsonl")


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[3, 4, "w1"]], fp8calib.DataError, "a row must be a JSON object, found a list"),
        ([np.ones(4)], fp8calib.DataError, "a row must be a JSON object, found a list"),
        (["builtin"], fp8calib.UsageError, "a list of strings is a list of texts"),
        ([torch.ones(2, 3, dtype=torch.int64)], fp8calib.DataError, "found a list"),
        ([torch.ones(4)], fp8calib.DataError, "found a list"),
        ([torch.tensor([5, 500])], fp8calib.DataError, "embedding has rows 0 to 127"),
        ([], fp8calib.DataError, "no sequence of two tokens in 0 rows"),
        ([{"words": 1}], fp8calib.DataError, "no usable field"),
        ({"text": "w1 w2"}, fp8calib.DataError, "it is dict, not rows"),
        (b"w1 w2", fp8calib.DataError, "it is bytes, not rows"),
        (5, fp8calib.DataError, "it is int, not rows"),
        ([Path("a.jsonl"), torch.ones(4)], fp8calib.DataError, "a.jsonl: no such file or folder"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    rows: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fp8calib.calibrate(zoo.build("llama"), rows, seq_len=LENGTH)


def test_a_model_in_memory_runs_in_its_own_dtype() -> None:
    model = zoo.build("llama").to(torch.bfloat16)
    stats = fp8calib.calibrate(model, token_rows(), seq_len=LENGTH).stats
    assert stats.header.compute_dtype == "bfloat16"
    assert stats.geometry.checkpoint_dtype == "bfloat16"
    report = fp8calib.verify(model.double(), data=token_rows(), seq_len=LENGTH)
    assert report.dtype == "float64"
    for name in ("device", "dtype", "memory"):
        value: Any = 3.0 if name == "memory" else "cpu"
        with pytest.raises(fp8calib.UsageError, match=f"{name}: the model is in memory"):
            fp8calib.calibrate(model, token_rows(), **{name: value})


def test_models_whose_weights_are_not_here_are_refused() -> None:
    def refuse(model: PreTrainedModel, message: str) -> None:
        with pytest.raises(fp8calib.ModelError, match=message):
            fp8calib.calibrate(model, token_rows(), seq_len=LENGTH)

    model = zoo.build("llama")
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True).to_dict()
    refuse(model, "quantized")
    model = zoo.build("llama")
    model.model.layers[1].mlp.to("meta")
    refuse(model, r"layers\.1\.mlp.*offloaded")
    model = zoo.build("llama")
    model._hf_peft_config_loaded = True
    refuse(model, "adapters")
    model = zoo.build("llama")
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(48, 32, dtype=torch.int8), requires_grad=False
    )
    refuse(model, "int8")
    model = zoo.build("llama")
    model.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 does
    refuse(model, r"layers\.0\.mlp\.up_proj\.weight is sharded")
    wrapped: Any = torch.nn.parallel.DataParallel(zoo.build("llama"))
    with pytest.raises(fp8calib.UsageError, match="DataParallel is neither a path nor"):
        fp8calib.calibrate(wrapped, token_rows(), seq_len=LENGTH)


def test_every_public_name_is_there_and_is_listed() -> None:
    code = "import fp8calib; assert set(fp8calib.__all__) <= set(dir(fp8calib))"
    assert run_code(code) == ("", "")
    assert all(hasattr(fp8calib, name) for name in fp8calib.__all__)
    assert not hasattr(fp8calib, "calibration_of_nothing")


def test_scales_per_rank_and_per_head_follow_from_the_heads(tmp_path: Path) -> None:
    model = zoo.build("llama", num_key_value_heads=4)
    stats = fp8calib.calibrate(model, token_rows(), seq_len=LENGTH).stats
    heads = stats.kv_scales(granularity="head")
    ranks = stats.kv_scales(tp=2)
    whole = stats.kv_scales()
    assert heads.keys() == ranks.keys() == whole.keys()
    for name, by_head in heads.items():
        assert by_head.shape == (4, 1, 1)
        assert torch.equal(ranks[name], by_head.reshape(2, 2).amax(1))
        assert torch.equal(whole[name], by_head.max())
    doubled = stats.kv_scales(rule="headroom:2", fp8_dtype="e4m3fnuz")
    name = next(iter(whole))
    assert float(doubled[name]) == pytest.approx(float(whole[name]) * 2 * 448 / 240)
    assert any(each.endswith("q_scale") for each in stats.kv_scales(query=True))
    model.save_pretrained(tmp_path / "model")
    fp8calib.export(stats, tmp_path / "out", formats="kv-overlay-head", model=tmp_path / "model")
    written = load_folder(tmp_path / "out" / "kv-overlay-head")
    stored = {name: tensor for name, tensor in written.items() if name in heads}
    assert stored.keys() == heads.keys()
    assert all(torch.equal(stored[each], heads[each]) for each in heads)
