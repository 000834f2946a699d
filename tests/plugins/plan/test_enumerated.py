"""`plan` against all 65,536 plans of a model with four layers, each run by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.kit.minutes import takes_minutes
from tests.kit.planted import LENGTH, plant
from tests.plugins.plan.test_plan import SIZES, plan, sharpen
from tests.verification.by_hand import cast_rows

GROUPS = {
    "self_attn.q_proj+k_proj+v_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj+up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
PLANTED = [
    *((layer, "mlp.down_proj") for layer in range(4)),
    *((layer, "mlp.gate_proj+up_proj") for layer in range(3)),
    *((layer, "self_attn.q_proj+k_proj+v_proj") for layer in range(3)),
]
"""Ten groups with a large column, whose input is as small."""
SEARCHED = 8
MILD, STRONG = 30_000.0, 200_000.0
"""Strong outliers cost more than a nat together, where losses no longer add up."""


def spoil(model: Any, outlier: float) -> None:
    """Give ten groups one large column that leaves FP8 less room for the others."""
    sharpen(model)
    for layer, group in PLANTED:
        block = model.model.layers[layer]
        linears = [block.get_submodule(name) for name in GROUPS[group]]
        norm = {"mlp.gate_proj+up_proj": block.post_attention_layernorm}
        before = (
            block.mlp.up_proj.weight[:1]
            if group == "mlp.down_proj"
            else norm.get(group, block.input_layernorm).weight[:1]
        )
        before.div_(outlier)
        for linear in linears:
            linear.weight[:, 0].mul_(outlier)


@dataclass(frozen=True)
class Enumerated:
    """All plans of w8a16 or 16 bits, by the bits of their groups, the first group the highest."""

    klds: torch.Tensor
    saved: torch.Tensor
    """Bytes."""

    def best(self, saved: int) -> float:
        """Give the least loss of all plans that save so much."""
        return float(self.klds[self.saved >= saved].min())


def enumerate_plans(folder: Path, rows: torch.Tensor) -> Enumerated:
    """Run all plans layer by layer: what one layer gives is shared by all that go on from it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model.embed_tokens(rows)
        positions = torch.arange(rows.shape[1])[None]
        rotary = model.model.rotary_emb(hidden, positions)
        states, saved = hidden[None], torch.zeros(1, dtype=torch.int64)
        for layer in model.model.layers:
            found, bytes_saved = [], []
            for chosen, own in _list_changes(layer):
                found.append(_run(layer, states, rotary))
                bytes_saved.append(saved + own)
                del chosen
            states = torch.stack(found, 1).flatten(0, 1)
            saved = torch.stack(bytes_saved, 1).flatten()
        reference = _score(model, states[:1])
        klds = [
            (reference.exp() * (reference - _score(model, part))).sum(-1).mean((1, 2))
            for part in states.split(256)
        ]
    return Enumerated(torch.cat(klds).double(), saved)


def _list_changes(layer: Any) -> Iterator[tuple[int, int]]:
    """Change the weights of a layer in all ways; give the bits and the bytes that they save."""
    plain = {name: x.clone() for name, x in layer.state_dict().items()}
    for bits in range(2 ** len(GROUPS)):
        own = 0
        for place, members in enumerate(GROUPS.values()):
            for name in members if bits >> (len(GROUPS) - 1 - place) & 1 else ():
                weight = layer.get_submodule(name).weight
                weight.copy_(cast_rows(weight))
                own += 3 * weight.numel() - 4 * weight.shape[0]  # from fp32 to a byte and scales
        yield bits, own
        layer.load_state_dict(plain)


def _run(layer: Any, states: torch.Tensor, rotary: Any) -> torch.Tensor:
    size = states.shape[1]
    mask = torch.full((states.shape[2],) * 2, -torch.inf).triu(1)[None, None]
    parts = []
    for part in states.split(512):
        flat = part.flatten(0, 1)
        repeated = tuple(each.expand(1, -1, -1) for each in (rotary[0][:1], rotary[1][:1]))
        output = layer(flat, attention_mask=mask, position_embeddings=repeated)
        output = output[0] if isinstance(output, tuple) else output
        parts.append(output.unflatten(0, (-1, size)))
    return torch.cat(parts)


def _score(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Give the log-probabilities of all but the last token: [P, B, S - 1, V]."""
    scores: torch.Tensor = model.lm_head(model.model.norm(states[:, :, :-1])).log_softmax(-1)
    return scores


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return plant(tmp_path_factory.mktemp("spoiled"), partial(spoil, outlier=MILD), **SIZES)


@pytest.fixture(scope="module")
def enumerated(spoiled: tuple[Path, Path]) -> Enumerated:
    model, text = spoiled
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()[:SEARCHED]]
    assert {len(row) for row in rows} == {LENGTH}
    return enumerate_plans(model, torch.tensor(rows))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "plan"


def ask(spoiled: tuple[Path, Path], out: Path, *budget: object) -> Any:
    options = ("--kv-tokens", 0, "--scheme", "w8a16", "--points", 0, "--resume")
    options += ("--no-pack", "--passes", 40)
    outcome = plan(spoiled, out, *budget, *options)
    assert outcome.code in (0, 8, 9), outcome.err
    return outcome.json


@takes_minutes
def test_at_ten_budgets_the_plan_is_within_five_percent_of_the_best_of_all(
    spoiled: tuple[Path, Path], enumerated: Enumerated, out: Path
) -> None:
    assert len(enumerated.klds) == 65_536
    most = int(enumerated.saved.max())
    whole = None
    for tenth in range(1, 11):
        wanted = most * tenth // 10
        if whole is None:
            whole = ask(spoiled, out, "--max-bytes", 0.999)["bytes"]["before"]
        found = ask(spoiled, out, "--max-bytes", f"{(whole - wanted + 0.5) / 2**20:.9f}M")
        saved = whole - found["bytes"]["after"]
        assert saved >= wanted
        assert found["searched_kld"] <= 1.05 * enumerated.best(wanted) + 1e-7, tenth
        assert found["searched_kld"] >= enumerated.best(saved) - 1e-6


def test_ten_planted_groups_are_found(tmp_path: Path) -> None:
    strong = plant(tmp_path, partial(spoil, outlier=STRONG), **SIZES)
    found = ask(strong, tmp_path / "plan", "--max-bytes", 0.8)
    ranked = sorted(found["groups"], key=lambda group: -group["choices"][0]["kld_mean"])
    names = {f"model.layers.{layer}.{group}" for layer, group in PLANTED}
    assert {group["name"] for group in ranked[:10]} == names
