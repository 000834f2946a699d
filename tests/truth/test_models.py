"""Models that are more than a text decoder, less than one, or none that is understood."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Model

from fp8calib.errors import CalibrationError, ModelError
from tests import zoo
from tests.doors import make_plan, refuse_source, run_calibration
from tests.zoo import draw


def test_a_checkpoint_of_the_bare_decoder_names_its_scales_as_its_own_keys(tmp_path: Path) -> None:
    model = zoo.build("gpt2")
    GPT2Model(model.config).save_pretrained(tmp_path / "model")
    prepared, _ = run_calibration(tmp_path / "model", make_plan(draw([20])))
    modules = [attention.checkpoint_module for _, attention in prepared.geometry.attentions()]
    assert modules == ["h.0.attn", "h.1.attn"]


def test_shards_make_no_difference(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "one")
    zoo.save("mixtral", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    plan = make_plan(draw([20, 20]))
    (_, one), (_, many) = (run_calibration(tmp_path / name, plan) for name in ("one", "many"))
    assert one.header == many.header
    for site, expected in one.sites.items():
        assert torch.equal(many.sites[site].amax, expected.amax)


def test_a_model_without_attention_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mamba", vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="MambaForCausalLM: none of its 2 layers has a KV cache"):
        run_calibration(tmp_path / "model", make_plan(draw([20])))


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_what_is_no_decoder_is_refused_by_name(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, architectures=[f"{family.title()}Model"])
    config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "empty")
    _write_one_tensor(tmp_path)
    with pytest.raises(ModelError, match=f"{family.title()}Model .* is not a decoder-only"):
        refuse_source(tmp_path)


def _write_one_tensor(folder: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_broken_activation_names_layer_and_sample(
    value: float, batch_size: int, tmp_path: Path
) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = value
    model.save_pretrained(tmp_path / "model")
    sequences = [torch.where(row == 77, 76, row) for row in draw([20] * 8)]
    sequences[5][11] = 77
    with pytest.raises(CalibrationError, match=r"model\.layers\.0\.self_attn\S* at sample 5"):
        run_calibration(
            tmp_path / "model", make_plan(sequences), batch_size=batch_size, weights=False
        )


def test_a_broken_weight_names_tensor_and_index(tmp_path: Path) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds nan at \[3, 5\]"):
        run_calibration(tmp_path / "model", make_plan(draw([20])))


@pytest.mark.parametrize(
    ("told", "count"), [({"num_nextn_predict_layers": 1}, 1), ({"num_nextn_predict_layers": 0}, 0)]
)
def test_draft_layers_are_counted_and_not_calibrated(
    tmp_path: Path, told: dict[str, int], count: int
) -> None:
    zoo.save("deepseek_v3", tmp_path / "m", **told)
    prepared, stats = run_calibration(tmp_path / "m", make_plan(draw([20])), weights=False)
    assert prepared.geometry.num_draft_layers == count
    last = len(prepared.geometry.layers)
    assert not any(f".{last}." in site.module for site in stats.sites)
