"""Models that are more than a text decoder, less than one, or none that is understood."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Model, PreTrainedModel

from fp8calib.errors import CalibrationError, ModelError
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.doors import Role, Site, find_longest, make_plan, opened, refuse_source, run_calibration
from tests.truth import brute_force
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


ROWS = draw([7, 20, 13, 12, 20, 9, 18, 4, 17, 6])
"""On both sides of 12 tokens, in batches of 3."""
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 3.0, 5.0, 7.0],
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 12},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 4.0, "factor": 4.0},
        "max_position_embeddings": 12,
    },
}


def run_alone(model: PreTrainedModel) -> list[brute_force.Capture]:
    """Run every row in a copy of the model that has seen no other."""
    return [brute_force.run(deepcopy(model), [row]) for row in ROWS]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_row_is_what_it_is_alone(family: str, streamed: bool, tmp_path: Path) -> None:
    alone = run_alone(zoo.save(family, tmp_path / "m", **MODELS[family]))
    plan = make_plan(ROWS, packed=False)
    with opened(tmp_path / "m", streamed=streamed) as subject:
        plan = replace(plan, longest_padded=find_longest(subject.source.config)[1])
        stats = subject.calibrate(plan=plan, batch_size=3)
    for layer, attention in stats.geometry.attentions():
        keys = [key for capture in alone for key, _ in capture.kv[layer.index]]
        expected = brute_force.head_amax(keys, attention.num_kv_heads)
        found = stats.sites[attention.site(Role.K)].amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for _, linear in stats.geometry.linears():
        inputs = [rows for capture in alone for rows in capture.inputs[linear.module]]
        seen = stats.sites[Site(linear.module, Role.INPUT)].amax.numpy()
        np.testing.assert_allclose(seen, brute_force.channel_amax(inputs), rtol=1e-5, atol=1e-6)


def test_commands_do_not_pad_short_rows_to_long_ones(tmp_path: Path) -> None:
    """What `verify --no-pack` scores is what the model gives to each row alone."""
    model = zoo.save("phi3", tmp_path / "m", **MODELS["phi3"])
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row.tolist()} for row in ROWS])
    options = ("--data", data, "--no-pack", "--batch-size", 3, "--dtype", "float32")
    succeed("verify", tmp_path / "m", *options, "--dump", tmp_path / "dump.safetensors")
    found = load_file(tmp_path / "dump.safetensors")["reference"]
    with torch.no_grad():
        scored = [model(row[None]).logits[0, :-1].log_softmax(-1) for row in ROWS]
    pairs = zip(scored, ROWS, strict=True)
    expected = torch.cat([each.gather(1, row[1:, None])[:, 0] for each, row in pairs])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
