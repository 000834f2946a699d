"""The diagnosis by numbers: planted changes and noise."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from fp8calib.plugins.server.diagnose import (
    UNCHANGED,
    Changes,
    Diagnosis,
    ServerFinding,
    diagnose,
    explain_with_faults,
    needs_faults,
)
from fp8calib.plugins.server.estimates import TopTokens, average_written
from fp8calib.plugins.server.faults import Fault, list_kv_faults
from fp8calib.verification.emulation.candidate import Candidate
from tests.plugins.server import planted

SEQUENCES = 12
LENGTH = 65
TOKENS = SEQUENCES * (LENGTH - 1)


def draw(seed: int, size: float = 1.0) -> torch.Tensor:
    """Draw changes of this root mean square, on average."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, generator=generator).double() * size


def changes(server: torch.Tensor, noise: float = 0.0, **candidates: torch.Tensor) -> Changes:
    lengths = [LENGTH] * SEQUENCES
    return Changes(server=server, candidates=candidates, lengths=lengths, noise=noise)


Effect = tuple[Fault, torch.Tensor]
"""A fault, and what it changes."""


def effect(layer: int, found: torch.Tensor, *, is_lost: bool = False) -> Effect:
    return Fault(emulation=Candidate(), effect="", layer=layer, is_lost=is_lost), found


def lost_in_all(found: torch.Tensor) -> Effect:
    """Give what K or V at 1.0 in all layers changes."""
    return Fault(emulation=Candidate(), effect="", is_lost=True), found


def explain(found: Diagnosis, given: Changes, effects: Mapping[str, Effect]) -> Diagnosis:
    """Try faults of the candidate x."""
    faults = {name: fault for name, (fault, _) in effects.items()}
    changed = {name: each for name, (_, each) in effects.items()}
    return explain_with_faults(found, given, "x", faults, changed)


@pytest.mark.parametrize(
    ("given", "finding", "names"),
    [
        (changes(draw(3, 0.2), a=draw(1), b=draw(2, 2.0)), "unquantized", {UNCHANGED, ""}),
        (changes(draw(3), a=draw(1)), "unlike", None),
        (changes(draw(3, 4.0), a=draw(1)), "unknown", None),
        (changes(draw(1), a=draw(1), b=draw(1)), "equal", {"a", "b"}),
        (changes(draw(1), noise=0.5, a=draw(1)), "noise", None),
        # another candidate changes far more than the noise, and is excluded
        (
            changes(draw(1, 0.1) + draw(3, 0.5), noise=0.5, a=draw(1, 0.1), b=draw(2, 3.0)),
            "equal",
            {"a", UNCHANGED},
        ),
        (changes(draw(1)), "nothing-emulated", None),
    ],
)
def test_what_is_found_is(given: Changes, finding: str, names: set[str] | None) -> None:
    found = diagnose(given)
    assert found.finding == finding
    assert names is None or {found.name, found.other or ""} == names


def test_a_fault_of_all_layers_that_leaves_more_than_roundings_is_not_named() -> None:
    """It explains the server far better than the base, but the sum of two layers does so too."""
    base, one, two = draw(1), draw(2, 3.0), draw(4, 3.0)
    given = changes(base + one + two + draw(5), x=base)
    faults = {str(i): effect(i, base + each * 0.3) for i, each in enumerate((one, two))}
    faults["v"] = lost_in_all(base + (one + two) * 0.5)
    found = explain(diagnose(given), given, faults)
    assert (found.finding, found.layers) == (ServerFinding.OTHER_SCALES, (0, 1))


def test_other_scales_that_do_no_harm_are_found_by_their_roundings() -> None:
    """The server rounds layer 0 with a scale of its own, and the others as x does."""
    roundings = [[draw(10 * layer + kind, 0.5) for kind in range(3)] for layer in range(3)]
    x, at_one = (sum(layer[kind] for layer in roundings) for kind in range(2))
    faults = {
        str(i): effect(i, x - layer[0] + layer[1], is_lost=True)
        for i, layer in enumerate(roundings)
    }
    for is_own in (False, True):
        server = x - roundings[0][0] + roundings[0][2] if is_own else x
        given = changes(server + draw(99, 0.3), x=x, one=at_one)
        found = explain(diagnose(given), given, faults)
        assert found.finding is (ServerFinding.OTHER_SCALES if is_own else ServerFinding.CANDIDATE)
        assert found.layers == ((0,) if is_own else ())


def test_a_fault_is_named_only_beyond_doubt() -> None:
    base, more = draw(1), draw(2, 0.05)
    given = changes(base + more + draw(3, 0.7), x=base)
    found = diagnose(given)
    assert needs_faults(found)
    assert explain(found, given, {"fault": effect(0, base + more)}).name == "x"
    clear = replace(given, server=base + more * 20)
    assert explain(found, clear, {"fault": effect(0, base + more * 20)}).name == "fault"


def test_where_only_k_or_v_has_scales_they_are_not_lost_alone(runner: planted.Runner) -> None:
    """It is then the candidate, or scale 1.0."""
    sites = list(runner.emulate(None).quantizers)
    for role in ("k", "v"):
        values = {site: 3.0 for site in sites if site.role == role}
        candidate = replace(runner.emulate(values), name="x")
        faults = list_kv_faults(candidate, runner.geometry)
        assert not [name for name in faults if "without its" in name]


# --- estimates ------------------------------------------------------------------------------------


VOCABULARY = 12
POSITIONS = 7


@pytest.fixture(scope="module")
def both() -> tuple[torch.Tensor, torch.Tensor]:
    """Give p and q of every token at a few positions, as log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(POSITIONS, VOCABULARY, generator=generator).double() * 2
    q = p + torch.randn(POSITIONS, VOCABULARY, generator=generator).double() * 0.7
    return p.log_softmax(1), q.log_softmax(1)


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Give KL(p || q) of every position."""
    return (p.exp() * (p - q)).sum(1)


def top_tokens(p: torch.Tensor, q: torch.Tensor, num: int, sent: int) -> TopTokens:
    """Give what is known where a server names its `num` most likely tokens, and `sent` came."""
    ids = q.topk(num, 1).indices
    return TopTokens(p=p.gather(1, ids), q=q.gather(1, ids), has_sent=(ids == sent).any(1))


@pytest.mark.parametrize("num", [1, 3, 11])
def test_the_bound_is_below_and_the_corrected_estimate_has_the_right_mean(
    both: tuple[torch.Tensor, torch.Tensor], num: int
) -> None:
    p, q = both
    mean = torch.zeros(POSITIONS).double()
    for sent in range(VOCABULARY):
        top = top_tokens(p, q, num, sent)
        assert (top.merged() <= exact(p, q) + 1e-12).all()
        mean += p[:, sent].exp() * top.corrected(p[:, sent], q[:, sent])
    assert mean == pytest.approx(exact(p, q).numpy(), abs=1e-9)


def test_a_token_that_only_one_server_names_counts_among_the_others() -> None:
    """Of two tokens that q names, p's probability of the second is unknown."""
    p = torch.tensor([[0.25, 0.0]]).log().double()
    q = torch.tensor([[0.5, 0.125]]).log().double()
    top = TopTokens(p=p, q=q, has_sent=torch.tensor([False]))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert top.merged().item() == pytest.approx(expected)


def test_only_written_tokens_count() -> None:
    """Sequences of 4 and 3 tokens, of which 2 were given: tokens 3, 4 and 3 were written."""
    found = average_written(torch.tensor([9.0, 1.0, 2.0, 9.0, 6.0]).double(), [4, 3], 2)
    assert found.value == pytest.approx(3.0)
    residuals = [1 + 2 - 2 * 3.0, 6 - 3.0]
    assert found.se == pytest.approx(math.sqrt(2 * sum(r * r for r in residuals)) / 3)
