"""Calibrating changes nothing a model computes, whatever happens on the way."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaModel
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface

import fp8calib
from fp8calib.errors import CalibrationError
from tests import zoo
from tests.architectures import families
from tests.doors import Role, make_plan, observe_cache, run_calibration
from tests.kit.minutes import in_minutes
from tests.truth import brute_force
from tests.truth.test_statistics import MOE
from tests.zoo import draw

PAD_ID = 0
KINDS = ("llama", "deepseek_v3", "gemma3n_text", "gpt_oss", "mixtral", "opt", "phi3", "qwen3_next")
"""Rotary, latent, shared KV, sinks, experts, learned positions, fused and linear attention."""


def spy_on_decoders(seen: list[torch.Tensor]) -> Any:
    """Keep the last hidden state of every model's forward while the patch holds."""
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = original(module, *args, **kwargs)
        if hasattr(output, "last_hidden_state"):
            seen.append(output.last_hidden_state.clone())
        return output

    return patch.object(nn.Module, "__call__", call)


class _Renamed(LlamaModel):
    """A decoder as in transformers 5.24, which renamed the argument of the cache."""

    def forward(self, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        assert "past_key_values" not in others
        output = super().forward(input_ids, past_key_values=cache, **others)
        output.cache = output.past_key_values
        return output


def test_the_cache_goes_where_the_decoder_takes_it() -> None:
    rows = [{"input_ids": sequence.tolist()} for sequence in draw([20, 20])]
    model = zoo.build("llama")
    expected = fp8calib.calibrate(model, rows).stats.sites
    model.model.__class__ = _Renamed
    found = fp8calib.calibrate(model, rows).stats.sites
    assert {site: each.amax.tolist() for site, each in found.items()} == {
        site: each.amax.tolist() for site, each in expected.items()
    }


@pytest.mark.parametrize("family", zoo.KINDS)
def test_a_calibrated_forward_gives_the_hidden_states_of_a_plain_one(
    family: str, tmp_path: Path
) -> None:
    """Bit for bit; sparse models, whose experts may run by another kernel, to 1e-5."""
    model = zoo.save(family, tmp_path / "model")
    sequences = draw([20, 20])
    plain: list[torch.Tensor] = []
    calibrated: list[torch.Tensor] = []
    with torch.no_grad(), spy_on_decoders(plain):
        for sequence in sequences:
            model(sequence.unsqueeze(0))
    with spy_on_decoders(calibrated):
        run_calibration(tmp_path / "model", make_plan(sequences))
    assert len(plain) == len(calibrated) == 2
    for expected, found in zip(plain, calibrated, strict=True):
        tolerance = 1e-5 if family in MOE else 0.0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", [*KINDS, *in_minutes(*sorted(zoo.ZOO.keys() - KINDS))])
def test_what_stands_on_padding_is_never_counted(family: str, tmp_path: Path) -> None:
    """The padding token alone has a huge embedding, so that anything of it would show."""
    model = zoo.build(family)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding) and len(module.weight) == model.config.vocab_size:
                module.weight[PAD_ID] *= 1e4
    model.save_pretrained(tmp_path / "model")
    plan = make_plan(draw([7, 20, 13, 3, 20, 9, 20, 4, 11, 6], seed=9), packed=False)
    _, alone = run_calibration(tmp_path / "model", plan)
    _, padded = run_calibration(tmp_path / "model", plan, batch_size=3)
    for site, expected in alone.sites.items():
        found = padded.sites[site]
        torch.testing.assert_close(found.amax, expected.amax, rtol=1e-5, atol=1e-5, msg=str(site))
        assert found.count == expected.count
        if expected.histogram is not None and "experts" not in site.module:
            assert found.histogram is not None
            assert int(found.histogram.sum()) == int(expected.histogram.sum()), site
            assert int(found.histogram.nonzero().max()) <= int(expected.histogram.nonzero().max())
        if expected.experts is not None and expected.expert_counts is not None:
            torch.testing.assert_close(found.experts, expected.experts, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.expert_counts, expected.expert_counts)


BIDIRECTIONAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma": ({"use_bidirectional_attention": True}, {}),
    "gemma2": ({"use_bidirectional_attention": True}, {}),
    "gemma3_text": ({"use_bidirectional_attention": True}, {"sliding_window": 5}),
    "gemma4_text": ({"use_bidirectional_attention": "all"}, {"sliding_window": 5}),
    "llama": ({"is_causal": False}, {}),
}
"""Changes of a config that ask for attention to later tokens, and what else they change: Gemma 3
and 4 halve the window of 8."""


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", sorted(BIDIRECTIONAL))
def test_no_token_sees_a_later_one_whatever_the_config_says(
    family: str, batch_size: int, tmp_path: Path
) -> None:
    """K and V equal those of the same weights under a config that does not ask for it."""
    asked, effect = BIDIRECTIONAL[family]
    common = families.FAMILIES.get(family) or zoo.ZOO[family]
    families.save(family, {**common, **asked}, tmp_path / "model")
    causal = families.build(family, {**common, **effect})
    rows = draw([20, 7, 20, 20, 13], seed=9)
    truth = brute_force.run(causal, rows)
    plan = make_plan(rows, packed=False)
    prepared, stats = run_calibration(tmp_path / "model", plan, batch_size=batch_size)
    for layer, attention in prepared.geometry.attentions():
        keys, values = zip(*truth.kv[layer.index], strict=True)
        for role, tensors in ((Role.K, keys), (Role.V, values)):
            expected = brute_force.head_amax(list(tensors), attention.num_kv_heads)
            found = stats.sites[attention.site(role)].amax.numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "gpt2"])
def test_nothing_stays_behind_when_an_activation_is_broken(family: str, tmp_path: Path) -> None:
    """An error in the middle of a run leaves no hook, no attribute and no wrapped lookup."""
    model = zoo.build(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("inf")
    model.save_pretrained(tmp_path / "model")
    seen: list[nn.Module] = []
    before = AttentionInterface.get_interface, ExpertsInterface.get_interface
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return original(module, *args, **kwargs)

    sequences = draw([20, 20])
    sequences[1][3] = 77
    with (
        patch.object(nn.Module, "__call__", call),
        pytest.raises(CalibrationError, match=r"layers\.0|h\.0"),
    ):
        run_calibration(tmp_path / "model", make_plan(sequences), weights=False)
    assert (AttentionInterface.get_interface, ExpertsInterface.get_interface) == before
    modules = set(seen)
    assert len(modules) > 10
    for module in modules:
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "_apply_gate" not in vars(module)


def test_nothing_stays_behind_when_the_experts_fail(tmp_path: Path) -> None:
    """The gate of an experts module is given back when the kernel around it raises."""
    zoo.save("mixtral", tmp_path / "model")
    seen: list[nn.Module] = []

    def fail(module: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        assert "_apply_gate" in vars(module)
        seen.append(module)
        msg = "the kernel failed"
        raise RuntimeError(msg)

    kernels = ExpertsInterface._global_mapping
    with patch.dict(kernels, {"grouped_mm": fail}), pytest.raises(Exception, match="kernel failed"):
        run_calibration(tmp_path / "model", make_plan(draw([20])))
    assert seen
    assert all("_apply_gate" not in vars(module) for module in seen)


@pytest.mark.parametrize(
    ("key", "value"),
    [((1, 4, 5, 24), (1, 4, 5, 16)), ((1, 3, 5, 16), (1, 3, 5, 8)), ((1, 2, 5, 8), (1, 2, 5, 8))],
)
def test_a_cache_of_other_shapes_than_the_topology_says_is_refused(
    key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    """Expanded latents, a wrong number of heads and wrong head sizes would give wrong scales."""
    with pytest.raises(CalibrationError, match=r"layer 0 caches \d KV heads of sizes"):
        observe_cache(zoo.build("llama").config, torch.zeros(key), torch.zeros(value))
