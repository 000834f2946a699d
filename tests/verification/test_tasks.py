"""Tasks of lm-evaluation-harness against loops by hand, with and without emulation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8calib.engines.numerics import Numerics
from fp8calib.errors import DataError, Fp8CalibError, UsageError
from fp8calib.fp8.formats import E4M3FN
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import emulate_kv, make_unscaled_table
from fp8calib.verification.report import TaskResult
from fp8calib.verification.tasks.lm_eval import (
    Score,
    TaskOutcome,
    add_bos,
    compare_scores,
    read_scores,
    run_tasks,
)
from fp8calib.verification.tasks.task_files import open_tasks
from tests import zoo
from tests.verification.by_hand import HandCache, Subject, cast, opened
from tests.verification.harness_tasks import (
    BOS,
    CONTINUATION,
    GENERATION,
    MULTIPLE_CHOICE,
    Forward,
    choose_by_hand,
    draw_rows,
    forward_plainly,
    make_tokenizer,
    score_by_hand,
    write_by_hand,
    write_task,
)

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'fp8calib[eval]'",
)
HARSH = 2.0**-11
"""A scale at which most of K and V clip."""
ROWS = draw_rows(40)


class Steps:
    """A progress that counts."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps = 0

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        unit: str = "steps",
        layers: int = 0,  # noqa: ARG002
        batches: int = 0,  # noqa: ARG002
    ) -> None:
        """Write down a stage."""
        self.stages.append(f"{name}, {total} {unit}")

    def advance(self, steps: int) -> None:
        """Count."""
        self.steps += steps


@pytest.fixture(autouse=True)
def _own_data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the harness' data library writes out of the user's folders."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Give a model whose attention has a say in what it answers."""
    model = zoo.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 4
            layer.self_attn.o_proj.weight *= 20
    with opened(model, tmp_path_factory.mktemp("llama")) as found:
        yield found


def make_candidate(subject: Subject, scale: float = HARSH) -> Candidate:
    """Make a candidate that quantizes K and V with one scale."""
    plain = Numerics(name="plain")
    sites = emulate_kv(make_unscaled_table(subject.geometry, E4M3FN), plain)
    quantizer = Quantizer(fmt=E4M3FN, scale=torch.tensor(scale))
    emulation = Emulation(quantizers=dict.fromkeys(sites, quantizer))
    return Candidate(name="harsh", description="", emulation=emulation)


def forward_by_hand(subject: Subject) -> Forward:
    """Call the model with a cache that torch's own casts quantize."""
    change = partial(cast, scale=HARSH)
    layers = range(subject.model.config.num_hidden_layers)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        cache = HandCache(subject.model.config, dict.fromkeys(layers, (change, change)))
        logits: torch.Tensor = subject.model(tokens, past_key_values=cache).logits
        return logits

    return forward


def run(
    subject: Subject,
    *paths: Path,
    limit: int | None = None,
    batch_size: int = 1,
    candidate: Candidate | None = None,
    tokenizer: Any = None,
    progress: Steps | None = None,
) -> TaskOutcome:
    """Run tasks on the model and on one candidate."""
    return run_tasks(
        subject,  # type: ignore[arg-type]  # has all that is used
        [candidate or make_candidate(subject)],
        open_tasks([str(path) for path in paths], limit=limit),
        tokenizer or make_tokenizer(),
        batch_size=batch_size,
        progress=progress or Steps(),
    )


def mean_and_error(right: list[bool]) -> tuple[float, float]:
    """Give the share of right answers and its standard error."""
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / (len(right) - 1))


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 3])
def test_accuracies_are_those_of_a_loop_by_hand(
    llama: Subject, tmp_path: Path, batch_size: int
) -> None:
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS)
    reference = choose_by_hand(forward_plainly(llama.model), ROWS)
    quantized = choose_by_hand(forward_by_hand(llama), ROWS)
    assert reference["acc"] != quantized["acc"]
    found = run(llama, task, batch_size=batch_size)
    assert [(row.candidate, row.task, row.metric) for row in found.rows] == [
        ("harsh", "choose", "acc"),
        ("harsh", "choose", "acc_norm"),
    ]
    for row in found.rows:
        before, before_se = mean_and_error(reference[row.metric])
        after, after_se = mean_and_error(quantized[row.metric])
        numbers = (row.reference, row.reference_se, row.value, row.value_se)
        assert numbers == pytest.approx((before, before_se, after, after_se), abs=1e-12)
        assert row.recovery_percent == pytest.approx(100 * after / before)
        assert row.num_documents == len(ROWS)


@needs_harness
def test_a_limit_asks_the_first_documents(llama: Subject, tmp_path: Path) -> None:
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS)
    reference = choose_by_hand(forward_plainly(llama.model), ROWS[:9])
    steps = Steps()
    found = run(llama, task, limit=9, progress=steps)
    assert found.setup.limit == 9
    assert [row.num_documents for row in found.rows] == [9, 9]
    assert found.rows[0].reference == sum(reference["acc"]) / 9
    assert steps.stages == ["tasks on the reference, None texts", "tasks on harsh, None texts"]
    assert steps.steps > 2 * 9


@needs_harness
def test_generated_texts_are_those_written_by_hand(llama: Subject, tmp_path: Path) -> None:
    """Half of the targets are what the plain model writes, a few what the quantized one does."""
    rows = [dict(row) for row in ROWS[:12]]
    plain = [write_by_hand(forward_plainly(llama.model), row["question"], 4) for row in rows]
    quantized = [write_by_hand(forward_by_hand(llama), row["question"], 4) for row in rows]
    for place, row in enumerate(rows):
        row["target"] = (quantized if place % 4 == 0 else plain)[place] if place % 2 == 0 else "x"
    targets = [row["target"] for row in rows]
    expected = [
        sum(text == target for text, target in zip(texts, targets, strict=True)) / len(rows)
        for texts in (plain, quantized)
    ]
    assert expected[0] != expected[1]
    (row,) = run(llama, write_task(tmp_path, GENERATION, rows), batch_size=2).rows
    assert (row.task, row.metric) == ("write", "exact_match")
    assert [row.reference, row.value] == pytest.approx(expected)


@needs_harness
def test_perplexity_stands_beside_the_reference_and_has_no_recovery(
    llama: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = run(llama, write_task(tmp_path, CONTINUATION, ROWS)).rows
    for found, forward in (
        (row.reference, forward_plainly(llama.model)),
        (row.value, forward_by_hand(llama)),
    ):
        scores = [score_by_hand(forward, r["question"], r["choices"][0]) for r in ROWS]
        assert found == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)
    assert row.recovery_percent is None
    assert row.reference_se is not None
    assert row.reference_se > 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@needs_harness
def test_every_candidate_sees_the_same_few_shots(llama: Subject, tmp_path: Path) -> None:
    config = {**MULTIPLE_CHOICE, "num_fewshot": 2, "fewshot_split": "test"}
    nothing = Candidate(name="as it is", description="", emulation=Emulation())
    for row in run(llama, write_task(tmp_path, config, ROWS), candidate=nothing).rows:
        assert (row.value, row.value_se) == (row.reference, row.reference_se)


@needs_harness
def test_random_states_stay_as_they_were(llama: Subject, tmp_path: Path) -> None:
    """Those of numpy and torch; loading a task draws from `random` before it is seeded."""

    def describe() -> str:
        return repr((np.random.get_state(), torch.get_rng_state().tolist()))

    before = describe()
    run(llama, write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:3]))
    assert describe() == before


@needs_harness
def test_the_model_sees_one_bos_before_every_text(llama: Subject, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.encode("w03")[0] != BOS
    seen: list[torch.Tensor] = []
    embedding = llama.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
    found = run(llama, write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:5]), tokenizer=tokenizer)
    hook.remove()
    assert (found.setup.add_bos_token, found.setup.bos_token) == (True, "<s>")
    assert found.warnings == ()
    for tokens in seen:
        assert (tokens[:, 0] == BOS).all()
        assert (tokens[:, 1:] != BOS).all()


def test_a_bos_that_is_there_already_is_not_put_twice() -> None:
    tokenizer = make_tokenizer()
    assert add_bos(tokenizer)
    assert add_bos(tokenizer)
    assert tokenizer.encode("w5")[:2] != [BOS, BOS]


@needs_harness
def test_a_tokenizer_without_bos_is_left_alone(llama: Subject, tmp_path: Path) -> None:
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:5])
    found = run(llama, task, tokenizer=make_tokenizer(bos=None))
    assert (found.setup.add_bos_token, found.setup.bos_token) == (False, None)


@needs_harness
def test_data_files_are_found_beside_the_task_and_else_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_task(tmp_path / "tasks", MULTIPLE_CHOICE, ROWS[:3])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    beside = open_tasks(["../tasks/choose.yaml"], limit=None)
    assert len(beside.loaded["tasks"]["choose"].eval_docs) == 3
    (tmp_path / "elsewhere" / "rows.jsonl").write_bytes(
        (task.parent / "rows.jsonl").read_bytes().splitlines(keepends=True)[0]
    )
    (task.parent / "rows.jsonl").unlink()
    here = open_tasks(["../tasks/choose.yaml"], limit=None)
    assert len(here.loaded["tasks"]["choose"].eval_docs) == 1


@needs_harness
@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("task: [unclosed", UsageError, "cannot load it: "),
        ("- a\n- list\n", UsageError, "cannot load it: ValueError: Expected YAML dict"),
        ("dataset_path: json\n", UsageError, "cannot load it: ValueError: Unknown config shape"),
        ("task: a\noutput_type: sing\n", UsageError, "invalid output_type 'sing'"),
    ],
)
def test_a_file_that_is_no_task_is_refused(
    tmp_path: Path, text: str, error: type[Fp8CalibError], words: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        open_tasks([str(path)], limit=None)
    assert str(path) in caught.value.message
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@needs_harness
def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(UsageError, match=r"no\.yaml: no such file"):
        open_tasks([str(missing)], limit=None)
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:3])
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        open_tasks([str(task)], limit=None)


@needs_harness
def test_a_task_that_runs_what_the_model_writes_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path, {**GENERATION, "unsafe_code": True}, ROWS[:3])
    with pytest.raises(UsageError, match="runs code that the model writes"):
        open_tasks([str(task)], limit=None)


@needs_harness
def test_a_task_asked_for_twice_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:3])
    with pytest.raises(UsageError, match="choose is given twice"):
        open_tasks([str(task), str(task)], limit=None)


@needs_harness
def test_an_unknown_name_is_answered_with_near_matches(tmp_path: Path) -> None:
    task = write_task(tmp_path, MULTIPLE_CHOICE, ROWS[:3])
    with pytest.raises(UsageError, match="--tasks helaswag: unknown task") as caught:
        open_tasks([str(task), "helaswag"], limit=None)
    assert "hellaswag" in caught.value.hint


def test_metrics_keep_their_filter_and_drop_what_is_no_number() -> None:
    results = {
        "results": {
            "sums": {
                "alias": "sums",
                "sample_len": 7,
                "exact_match,strict": 0.5,
                "exact_match_stderr,strict": 0.1,
                "exact_match,none": 0.25,
                "exact_match_stderr,none": "N/A",
                "words,none": math.nan,
                "text,none": "yes",
            }
        },
        "higher_is_better": {"sums": {"exact_match": True}},
    }
    assert read_scores(results) == {
        ("sums", "exact_match,strict"): Score(
            value=0.5, se=0.1, is_more_better=True, num_documents=7
        ),
        ("sums", "exact_match"): Score(value=0.25, se=None, is_more_better=True, num_documents=7),
    }


@pytest.mark.parametrize(
    ("reference", "value", "is_more_better", "recovery"),
    [
        (0.8, 0.6, True, 75.0),
        (0.5, 0.6, True, 120.0),
        (0.0, 0.6, True, None),
        (-0.5, 0.6, True, None),
        (8.0, 9.0, False, None),
        (0.8, 0.6, None, None),
    ],
)
def test_recovery_is_for_metrics_of_which_more_is_better(
    reference: float, value: float, is_more_better: bool | None, recovery: float | None
) -> None:
    def score(number: float) -> Score:
        return Score(value=number, se=0.1, is_more_better=is_more_better, num_documents=3)

    key = ("task", "metric")
    (row,) = compare_scores("x", {key: score(reference)}, {key: score(value)})
    assert row.recovery_percent == pytest.approx(recovery)
    assert row == TaskResult(
        candidate="x",
        task="task",
        metric="metric",
        reference=reference,
        reference_se=0.1,
        value=value,
        value_se=0.1,
        recovery_percent=row.recovery_percent,
        num_documents=3,
    )
