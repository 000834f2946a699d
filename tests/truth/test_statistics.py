"""Statistics of every architecture against a plain forward whose tensors were kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.calibration_stats import SiteStats
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.reductions import (
    observe_expert_down,
    observe_expert_input,
    observe_input,
    reduce_tokens,
)
from fp8calib.model.geometry import Role, Site
from fp8calib.numerics.positions import NUM_RANGES
from tests import zoo
from tests.doors import (
    SEQ_LEN,
    Observe,
    make_plan,
    opened,
    run_calibration,
    short_positions,
    split_positions,
)
from tests.kit.minutes import HAS_MINUTES
from tests.truth import brute_force
from tests.zoo import draw

NUM_SEQUENCES = 5
FAMILIES = sorted(zoo.CONFIGS)
MOE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
BYPASS_THE_REGISTRY = ("bloom", "falcon", "gptj", "mpt", "xglm")
KEEP_EXPERTS_TO_THEMSELVES = ("llama4_text",)
PADDED = (*BYPASS_THE_REGISTRY, *zoo.MIXED, "bamba", "jamba", "kimi_linear", "lfm2", "llama4_text")
"""Those that look at the mask in ways of their own; the others run padded in minutes."""


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
    if case.family in zoo.ZOO or not (HAS_MINUTES or case.family in PADDED):
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


_SITE = Site("site", Role.INPUT)
_HEADS, _WIDTH, _EXPERTS, _CHOSEN = 2, 4, 5, 2


def record(view: BatchView, site: Site, seen: SiteStats) -> SiteStats:
    recorder = Recorder(view.first + view.shape[0])
    recorder.begin_batch(view)
    recorder.record(site, seen)
    recorder.end_batch()
    return recorder.stats()[site]


@pytest.mark.parametrize("lengths", [(600, 600, 600), (600, 9, 513)])
def test_each_sequence_of_a_batch_has_its_own_amax(lengths: tuple[int, ...]) -> None:
    """In a run of six sequences, of which the batch has those from the third on."""
    rng = np.random.default_rng(1)
    view = BatchView(shape=(3, 600), lengths=lengths, first=2)
    x = torch.from_numpy(rng.standard_normal((3, 600, 6), np.float32))
    index = torch.from_numpy(rng.integers(0, _EXPERTS, (3 * 600, 1)))
    order = torch.sort(index.flatten()).indices
    heads = x.view(3, 600, _HEADS, 3).transpose(1, 2)
    by_sequence = [float(x[i, :length].abs().max()) for i, length in enumerate(lengths)]
    counted = [x[i, :length].abs() for i, length in enumerate(lengths)]
    first = max(float(rows[:512].max()) for rows in counted)
    second = max(float(rows[512:].max()) for rows in counted if len(rows) > 512)
    routed = torch.cat([torch.full((600,), length) for length in lengths])
    is_counted = torch.arange(600).repeat(3) < routed
    for seen in (
        reduce_tokens(view, heads, _HEADS, 1),
        observe_input(view, _SITE, torch.stack([x, x / 2])),
        observe_expert_input(view, _SITE, x.flatten(0, 1), index, _EXPERTS),
        observe_expert_down(view, x.flatten(0, 1)[order], index, _EXPERTS, 2),
    ):
        found = record(view, _SITE, seen)
        assert found.sequences is not None
        assert found.positions is not None
        assert found.sequences.tolist() == pytest.approx([0, 0, *by_sequence])
        assert found.positions[:3].tolist() == pytest.approx([first, second, 0])
        assert float(found.amax.max()) == pytest.approx(max(by_sequence))
        assert found.count == sum(lengths)
        if found.expert_counts is not None:
            counts = torch.bincount(index.flatten()[is_counted], minlength=_EXPERTS)
            assert found.expert_counts.tolist() == counts.tolist()


def test_nan_is_found_in_the_batches_since_the_last_look() -> None:
    recorder = Recorder(4)

    def observe(first: int, value: float) -> tuple[Site, int] | None:
        view = BatchView(shape=(2, 3), lengths=(3, 3), first=first)
        x = torch.ones(2, 3, 4)
        x[1, 2, 0] = value
        recorder.begin_batch(view)
        recorder.record(_SITE, observe_input(view, _SITE, x))
        recorder.end_batch()
        return recorder.find_nonfinite()

    assert observe(0, 1.0) is None
    assert observe(2, 1.0) is None
    assert observe(0, float("nan")) == (_SITE, 1)
    assert observe(2, float("inf")) == (_SITE, 3)


RANGES = [(0, 4), (4, 8), (8, 16), (16, 32)]
"""What a first range of four positions makes of 20."""
LENGTHS = {1: [20, 20, 20], 3: [20, 3, 9, 17, 5, 20]}
"""By batch size: in batches of 3 the sequences are padded."""


@pytest.fixture
def _short_ranges() -> Iterator[None]:
    with short_positions(4):
        yield


def check(stats: Any, site: Site, sequences: Sequence[np.ndarray]) -> None:
    """Compare a site with what every sequence showed there: [S, anything] each."""
    found = stats.sites[site].positions
    assert found is not None, site
    parts = [[x[first:stop] for x in sequences] for first, stop in RANGES]
    expected = [max((float(np.abs(x).max()) for x in xs if x.size), default=0.0) for xs in parts]
    expected += [0.0] * (NUM_RANGES - len(RANGES))
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=1e-7, err_msg=str(site))


def rows_of(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Lay [1, H, S, D] out as [S, H, D]."""
    return [x[0].transpose(1, 0, 2) for x in tensors]


@pytest.mark.usefixtures("_short_ranges")
@pytest.mark.parametrize("batch_size", LENGTHS)
@pytest.mark.parametrize("family", zoo.KINDS)
def test_every_range_holds_the_maximum_of_its_tokens(
    family: str, batch_size: int, tmp_path: Path
) -> None:
    model = zoo.save(family, tmp_path)
    sequences = draw(LENGTHS[batch_size])
    plan = make_plan(sequences, packed=False)
    prepared, stats = run_calibration(tmp_path, plan, batch_size=batch_size, weights=False)
    truth = brute_force.run(model, sequences)
    attentions = list(prepared.geometry.attentions())
    for place, (layer, attention) in enumerate(attentions):
        if attention.producer is None:
            keys, values = zip(*truth.kv[layer.index], strict=True)
            check(stats, attention.site(Role.K), rows_of(keys))
            check(stats, attention.site(Role.V), rows_of(values))
        if attention.site(Role.Q) in stats.sites:
            check(stats, attention.site(Role.Q), rows_of([q[place] for q in truth.queries]))
    modules = dict(model.named_modules())
    for path, routed in truth.routed.items():
        check(
            stats,
            Site(f"{path}.gate_proj", Role.INPUT),
            [hidden.reshape(-1, hidden.shape[-1]).numpy() for hidden, _ in routed],
        )
        found = stats.sites[Site(f"{path}.down_proj", Role.INPUT)].positions
        for number, (first, stop) in enumerate(RANGES):
            part = [
                (hidden.reshape(-1, hidden.shape[-1])[first:stop], index[first:stop])
                for hidden, index in routed
            ]
            down = brute_force.run_experts(modules[path], part).down.values()
            expected = max(float(np.abs(rows).max()) for rows in down)
            assert float(found[number]) == pytest.approx(expected, rel=1e-5)
    inputs = [
        site.module
        for site, seen in stats.sites.items()
        if site.role is Role.INPUT and seen.expert_counts is None
    ]
    assert inputs
    for name in inputs:
        check(stats, Site(name, Role.INPUT), truth.inputs[name])


def test_ranges_double_and_the_last_has_no_end() -> None:
    assert split_positions(1) == [(0, 1)]
    assert split_positions(512) == [(0, 512)]
    assert split_positions(513) == [(0, 512), (512, 513)]
    assert split_positions(3000) == [(0, 512), (512, 1024), (1024, 2048), (2048, 3000)]
    assert split_positions(10**7)[-1] == (2**19, 10**7)
    assert len(split_positions(10**7)) == NUM_RANGES
