"""Statistics of every architecture against a plain forward whose tensors were kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from tests import zoo
from tests.doors import SEQ_LEN, Observe, Role, Site, make_plan, opened, run_calibration
from tests.truth import brute_force
from tests.zoo import draw

NUM_SEQUENCES = 5
FAMILIES = sorted(zoo.CONFIGS)
MOE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
BYPASS_THE_REGISTRY = ("bloom", "falcon", "gptj", "mpt", "xglm")
KEEP_EXPERTS_TO_THEMSELVES = ("llama4_text",)


@dataclass
class Case:
    """One calibrated model and the truth about it."""

    family: str
    folder: Path
    model: Any
    prepared: Any
    stats: Any
    truth: brute_force.Capture

    def seen(self, module: str, role: Role) -> Any:
        """Give the statistics of a site."""
        return self.stats.sites[Site(module, role)]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    folder = tmp_path_factory.mktemp("zoo") / family
    model = zoo.save(family, folder)
    sequences = draw([SEQ_LEN] * NUM_SEQUENCES)
    prepared, stats = run_calibration(folder, make_plan(sequences))
    return Case(family, folder, model, prepared, stats, brute_force.run(model, sequences))


def test_k_and_v_are_what_the_cache_was_given(case: Case) -> None:
    seen_layers = set()
    for layer, attention in case.prepared.geometry.attentions():
        if attention.producer is not None:
            assert layer.index not in case.truth.kv
            continue
        seen_layers.add(layer.index)
        keys, values = zip(*case.truth.kv[layer.index], strict=True)
        sizes = attention.num_kv_heads, attention.k_head_dim, attention.v_head_dim
        if case.family != "falcon":  # its cache holds each KV head several times
            assert (keys[0].shape[1], keys[0].shape[3], values[0].shape[3]) == sizes
        for role, tensors in ((Role.K, keys), (Role.V, values)):
            expected = brute_force.head_amax(list(tensors), attention.num_kv_heads)
            found = case.seen(attention.module, role)
            np.testing.assert_allclose(found.amax.numpy(), expected, rtol=1e-6)
            assert found.count == SEQ_LEN * NUM_SEQUENCES
    assert seen_layers == set(case.truth.kv)


def test_every_linear_of_the_decoder_layers_saw_its_input(case: Case) -> None:
    experts = list(case.truth.routed)
    linears = {
        name
        for name in case.truth.inputs
        if name != "lm_head" and name.startswith(_layers_path(case)) and name not in experts
    }
    observed = {
        site.module
        for site, found in case.stats.sites.items()
        if site.role is Role.INPUT and found.expert_counts is None
    }
    assert observed == linears
    tolerance = 1e-6 if case.family in zoo.ZOO else 1e-5
    for name in linears:
        expected = brute_force.channel_amax(case.truth.inputs[name])
        found = case.seen(name, Role.INPUT).amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-6, err_msg=name)


def _layers_path(case: Case) -> str:
    return case.prepared.geometry.layers[0].module.rpartition(".")[0] + "."


def test_q_is_what_attention_received(case: Case) -> None:
    attentions = [attention for _, attention in case.prepared.geometry.attentions()]
    if case.family in BYPASS_THE_REGISTRY:
        skipped = {item.site for item in case.stats.header.skipped}
        assert {str(attention.site(Role.Q)) for attention in attentions} <= skipped
        return
    for place, attention in enumerate(attentions):
        per_sequence = [queries[place] for queries in case.truth.queries]
        expected = brute_force.head_amax(per_sequence, attention.num_heads)
        found = case.seen(attention.module, Role.Q).amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_experts_saw_the_tokens_routed_to_them(case: Case) -> None:
    assert case.family not in zoo.ZOO or bool(case.truth.routed) == (case.family in MOE)
    modules = dict(case.prepared.model.named_modules())
    skipped = {item.site for item in case.stats.header.skipped}
    for path, routed in case.truth.routed.items():
        is_skipped = case.family in KEEP_EXPERTS_TO_THEMSELVES
        assert (f"{path}.weight" in skipped) is is_skipped
        assert (Site(f"{path}.down_proj", Role.INPUT) not in case.stats.sites) is is_skipped
        if case.family not in zoo.ZOO:
            continue
        truth = brute_force.run_experts(modules[path], routed)
        for name, tensors in (("gate_proj", truth.first), ("down_proj", truth.down)):
            found = case.seen(f"{path}.{name}", Role.INPUT)
            _compare_experts(found, tensors)
        same = case.seen(f"{path}.up_proj", Role.INPUT)
        assert torch.equal(same.experts, case.seen(f"{path}.gate_proj", Role.INPUT).experts)


def _compare_experts(found: Any, tensors: dict[int, np.ndarray]) -> None:
    num_experts, num_blocks = found.experts.shape
    for expert in range(num_experts):
        rows = tensors.get(expert)
        count = 0 if rows is None else len(rows)
        assert int(found.expert_counts[expert]) == count
        expected = (
            np.zeros(num_blocks)
            if rows is None
            else np.abs(rows).max(0).reshape(num_blocks, -1).max(1)
        )
        np.testing.assert_allclose(found.experts[expert].numpy(), expected, rtol=1e-5, atol=1e-7)
    everything = np.abs(np.concatenate(list(tensors.values()))).max(0)
    np.testing.assert_allclose(found.amax.numpy(), everything, rtol=1e-5, atol=1e-7)


def test_weights_are_those_of_the_model_in_memory(case: Case) -> None:
    parameters = {name: p.detach().numpy() for name, p in case.model.named_parameters()}
    for _, linear in case.prepared.geometry.linears():
        if linear.num_experts:
            continue
        weight = np.abs(parameters[linear.weight_name])
        if isinstance(case.model.get_submodule(linear.module), Conv1D):
            weight = weight.T
        found = case.seen(linear.module, Role.WEIGHT)
        np.testing.assert_array_equal(found.amax.numpy(), weight.max(1), err_msg=linear.module)
        np.testing.assert_array_equal(found.amax_in.numpy(), weight.max(0), err_msg=linear.module)


def test_a_padded_batch_gives_what_the_rows_give_alone(case: Case) -> None:
    """In the models of the zoo padding has a huge embedding (`architectures/test_forward.py`)."""
    if case.family in zoo.ZOO:
        return
    plan = make_plan(draw([7, 20, 13, 3, 20], seed=9), packed=False)
    with opened(case.folder) as subject:
        alone = subject.calibrate(plan=plan, batch_size=1, observe=Observe(weights=False))
        padded = subject.calibrate(plan=plan, batch_size=3, observe=Observe(weights=False))
    assert alone.sites.keys() == padded.sites.keys()
    for site, expected in alone.sites.items():
        found = padded.sites[site]
        assert found.count == expected.count, site
        torch.testing.assert_close(found.amax, expected.amax, rtol=1e-5, atol=1e-5, msg=str(site))
        if expected.expert_counts is not None:
            assert torch.equal(found.expert_counts, expected.expert_counts)
            torch.testing.assert_close(found.experts, expected.experts, rtol=1e-5, atol=1e-6)
        if expected.histogram is not None:
            assert int(found.histogram.sum()) > 0


def test_nothing_stays_on_the_model_and_its_output_is_untouched(case: Case) -> None:
    model = case.prepared.model
    tokens = draw([SEQ_LEN], seed=3)[0].unsqueeze(0)
    with torch.no_grad():
        before = case.model(tokens).logits
        after = model(tokens).logits
    assert torch.equal(before, after)
    for name, module in model.named_modules():
        assert not module._forward_pre_hooks, name
        assert not module._forward_hooks, name
        assert "_apply_gate" not in vars(module), name
