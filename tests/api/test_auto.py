"""`auto`: its decisions on models whose needs were planted, and on figures by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from fp8calib.jobs.auto import decide
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    KvNeed,
    PairedAnswer,
    PairedResult,
    Verdict,
    VerifyReport,
)
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import fail, run, succeed
from tests.kit.minutes import in_minutes, takes_minutes
from tests.kit.reports import make_candidate, make_small

LENGTH = 32
QUICK = ("--seq-len", LENGTH, "--dtype", "float32", "--batch-size", 12)


def plant(folder: Path, change: Callable[[Any], None], **sizes: int) -> tuple[Path, Path]:
    """Write a changed llama, of four layers unless `sizes` says it, and text that it wrote."""
    model: Any = zoo.build("llama", **{"num_hidden_layers": 4, **sizes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        change(model)
        tokens = torch.randint(3, 95, (60, 1), generator=generator)
        for _ in range(LENGTH - 1):
            shares = torch.softmax(model(tokens).logits[:, -1, :95], -1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=generator)], 1)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    rows = [{"input_ids": row.tolist()} for row in tokens]
    return folder / "model", write_rows(folder / "text.jsonl", rows)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give such a model that needs nothing, and its text."""
    return plant(tmp_path_factory.mktemp("plain"), lambda _model: None)


def need_query_scales(model: PreTrainedModel) -> None:
    for layer in model.model.layers[1:]:
        layer.self_attn.q_proj.weight.div_(2048)
        layer.self_attn.k_proj.weight.mul_(2048)


def spoil(layer: Any) -> None:
    """Give the input of down_proj one channel that leaves FP8 no room for the others."""
    layer.mlp.up_proj.weight[0] *= 2e7
    layer.mlp.down_proj.weight[:, 0] /= 2e7
    layer.mlp.down_proj.weight.mul_(20)


def spoil_layer_1(model: PreTrainedModel) -> None:
    model.lm_head.weight.mul_(4)
    spoil(model.model.layers[1])


def spoil_all(model: PreTrainedModel) -> None:
    """Spoil all layers, in a model that no rounding passes unseen."""
    model.lm_head.weight.mul_(60)
    for layer in model.model.layers:
        spoil(layer)


def test_scales_of_q_are_written_where_q_needs_them(tmp_path: Path) -> None:
    model, text = plant(tmp_path, need_query_scales)
    out = tmp_path / "out"
    killed = tmp_path / "out.partial"
    killed.mkdir()
    (killed / "fp8calib-partial.json").write_text('{"tag": "fp8calib auto"}')
    (killed / "stats.safetensors").write_bytes(b"half")
    found = succeed("auto", model, "--data", text, *QUICK, "--out", out, "--json").json
    assert found["passed"] is True
    assert json.loads((out / "report.json").read_text()) == found
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "out", "text.jsonl"]
    answers = {each["question"]: each["answer"] for each in found["decisions"]}
    assert answers["does q need scales?"] == "yes"
    assert answers["does the model need KV scales?"] == "yes"
    few = f"only {found['tokens']} tokens are held out, fewer than 4096: figures are imprecise"
    assert few in found["warnings"]
    written = out / found["written"]["name"]
    assert found["serve"] == f"vllm serve {written} --kv-cache-dtype fp8"
    tensors = {n: t for file in written.glob("*.safetensors") for n, t in load_file(file).items()}
    for layer in range(4):
        for role in "kvq":
            assert f"model.layers.{layer}.self_attn.{role}_scale" in tensors
        assert tensors[f"model.layers.{layer}.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert run("check", written, "--engine", "vllm", "--require-kv").code == 0
    # the last fifth of the sequences was held out: verify gives the same figures on it
    rows = text.read_text().splitlines()[48:]
    (tmp_path / "held-out.jsonl").write_text("\n".join(rows))
    again = succeed(
        *("verify", model, "--scales", written, "--data", tmp_path / "held-out.jsonl", "--json"),
        *QUICK,
    ).json
    for key in ("ppl_ratio", "kld_mean", "top1_agreement", "verdict"):
        assert again["candidates"][0][key] == found["verified"][key]
    assert not any("was used for calibration" in text for text in again["warnings"])


def test_the_one_linear_that_fp8_breaks_stays_unquantized(tmp_path: Path) -> None:
    model, text = plant(tmp_path, spoil_layer_1)
    out = tmp_path / "out"
    printed = succeed("auto", model, "--data", text, *QUICK, "--out", out).out
    report = json.loads((out / "report.json").read_text())
    written = report["written"]
    schemes = {written["scheme"], *written["layer_schemes"].values()}
    assert schemes <= {"fp8-static", "fp8-dynamic"}
    assert written["unquantized"] == ["model.layers.1.mlp.down_proj"]
    (answer,) = [
        each["answer"] for each in report["decisions"] if "stay unquant" in each["question"]
    ]
    assert answer.startswith("model.layers.1.mlp.down_proj; schemes: ")
    (shard,) = (out / written["scheme"]).glob("*.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in load_file(shard).items()}
    for layer in range(4):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            is_fp8 = dtypes[f"model.layers.{layer}.{name}.weight"] == torch.float8_e4m3fn
            assert is_fp8 is ((layer, name) != (1, "mlp.down_proj"))
    assert printed.splitlines()[-1].strip() == report["serve"]


def test_nothing_is_claimed_where_nothing_passes(tmp_path: Path) -> None:
    model, text = plant(tmp_path, spoil_all, hidden_size=64, intermediate_size=96)
    out = tmp_path / "out"
    outcome = run("auto", model, "--data", text, *QUICK, "--mxfp8", "--out", out)
    assert outcome.code == 8
    assert "no checkpoint is written" in outcome.out
    report = json.loads((out / "report.json").read_text())
    assert "mxfp8" in {each["name"] for each in report["candidates"]}
    (which,) = (each for each in report["decisions"] if "which scheme" in each["question"])
    assert "mxfp8: fail" in which["why"]
    assert report["written"] is None
    assert report["closest"].startswith("w8a16: ")
    assert outcome.out.splitlines()[-1] == f"closest: {report['closest']}"
    assert {path.name for path in out.iterdir()} == {"report.json", "stats.safetensors"}


def test_a_checkpoint_that_fails_when_it_is_read_back_is_removed(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = plain
    failing = candidate("kv-overlay", 0.5, Verdict.FAIL)
    monkeypatch.setattr("fp8calib.jobs.auto.measure.Measured.read_back", lambda *_: failing)
    out = tmp_path / "out"
    outcome = run("auto", model, "--data", text, *QUICK, "--gate", "kv", "--out", out)
    assert outcome.code == 8
    assert outcome.out.splitlines()[-1] == "closest: weights in 16 bits, kv-scales: fail (by hand)"
    assert "does the model need KV scales? no: " in outcome.out
    assert "are written" not in outcome.out
    assert {path.name for path in out.iterdir()} == {"report.json", "stats.safetensors"}


def spoil_cache(model: PreTrainedModel) -> None:
    """Let one layer have keys of so different sizes that FP8 loses most with one scale."""
    model.lm_head.weight.mul_(4)
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight[::8] *= 1e5
    attention.q_proj.weight.mul_(0)
    attention.v_proj.weight[0] *= 1e6
    attention.o_proj.weight[:, [0, 8]] /= 1e6


def test_a_cache_that_fails_is_left_in_16_bits_in_the_fewest_layers(tmp_path: Path) -> None:
    model, text = plant(tmp_path, spoil_cache)
    out = tmp_path / "out"
    command = ("auto", model, "--data", text, *QUICK, "--gate", "kv", "--out", out)
    outcome = succeed(*command, "--json")
    found = outcome.json
    assert "step 5 of 5: plan to leave the KV cache" in outcome.err
    assert found["written"]["unquantized_layers"] == [1]
    option = "--kv-cache-dtype-skip-layers 1"
    assert found["serve"] == f"vllm serve {out}/kv-overlay --kv-cache-dtype fp8 {option}"
    assert found["written"]["serve_options"] == option
    assert [each["name"] for each in found["tried"]] == [
        "weights in 16 bits, kv-scales without layers 1"
    ]
    answers = {each["question"]: each["answer"] for each in found["decisions"]}
    question = "which layers keep their KV cache in 16 bits, so that it passes?"
    assert answers[question] == "1"
    assert "which KV scales are written?" not in answers
    succeed("card", out / "kv-overlay", "--base-model", "org/name")
    card = (out / "kv-overlay" / "README.md").read_text()
    assert option in card
    assert "sglang" not in card.partition("```sh")[2].partition("```")[0]


def test_what_fails_as_a_whole_is_followed_by_the_next_best(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part passes alone: the first whole that passes when it is read back is kept."""
    model, text = plain
    read_back = iter([Verdict.WARN, Verdict.CANNOT_TELL, Verdict.PASS])

    def verify(*_: object) -> CandidateResult:
        return candidate("written", 0.5, next(read_back))

    monkeypatch.setattr("fp8calib.jobs.auto.measure.Measured.read_back", verify)
    out = tmp_path / "out"
    found = succeed("auto", model, "--data", text, *QUICK, "--out", out, "--json").json
    assert found["passed"] is True
    assert [each["verdict"] for each in found["tried"]] == ["warn", "cannot-tell", "pass"]
    names = [each["name"] for each in found["tried"]]
    assert len(set(names)) == 3
    assert names[0].endswith("kv-scales")
    assert names[1] == names[0].replace("kv-scales", "KV cache in 16 bits")
    written = {path.name for path in out.iterdir()}
    assert written == {"report.json", "stats.safetensors", found["written"]["name"]}
    assert "tried before, and not passing as a whole" in found["decisions"][-1]["why"]


def test_an_interrupted_run_continues_with_its_statistics(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = plain
    out = tmp_path / "out"
    command = ("auto", model, "--data", text, *QUICK, "--gate", "kv", "--out", out, "--json")
    expected = run(*command).json
    assert expected["written"]["has_kv_scales"]
    assert expected["verified"]["subject"] == str(out / expected["written"]["name"])
    assert expected["provenance"]["command"] == expected["command"] != ""
    unneeded = "They are written all the same: other text may need them."
    assert expected["decisions"][0]["why"].endswith(unneeded)
    finished = succeed(*command, "--resume")
    assert finished.json == expected
    assert f"{out} is finished already" in finished.err
    assert "by another run" in fail(2, *command[:-5], "--gate", "w8a8", *command[-3:], "--resume")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fp8calib.commands.auto._decide", interrupt)
        stopped = run(*command, "--force")
        assert stopped.code == 130
        assert "--resume" in stopped.err
    assert (tmp_path / "out.partial" / "stats.safetensors").exists()
    monkeypatch.setattr("fp8calib.commands.auto.run_calibration", run_no_text)
    again = run(*command, "--force", "--resume").json
    for key in ("decisions", "tried", "written"):
        assert again[key] == expected[key]
    assert not (tmp_path / "out.partial").exists()


def test_the_plan_of_a_run_has_its_steps(plain: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = plain
    out = tmp_path / "out"
    command = ("auto", model, "--data", text, *QUICK, "--out", out, "--dry-run")
    plan = succeed(*command, "--json").json["plan"]
    assert [step.split(":")[0] for step in plan["steps"]] == [f"{n} of 5" for n in range(1, 6)]
    assert plan["steps"][4].startswith("5 of 5: if no scheme with FP8 inputs passes, plan to leave")
    # gradients and three searches over 8 sequences; the written one beside the model and scale 1.0
    left = 8 * 32 * (6 + 3 * 16) + 12 * 32 * (2 + 1)
    run = 48 * 32 + 12 * 32 * (2 * 2 + 5 + 1)
    assert plan["expected_layers_s"] / plan["expected_s"] == pytest.approx(left / run)
    shown = succeed(*command).out
    assert "1 of 5: calibrate on 1,536 tokens" in shown
    assert "more if layers must stay in 16 bits" in shown
    kv = succeed(*command, "--gate", "kv", "--json").json["plan"]
    assert "of the most sensitive layers in 16 bits" in kv["steps"][4]
    assert kv["steps"][1] == "2 of 5: compare 1 candidate on 384 tokens"
    assert plan["steps"][1] == "2 of 5: compare 5 candidates on 384 tokens"
    other = succeed(*command, "--gate", "kv", "--engine", "sglang", "--json").json["plan"]
    assert [step.split(":")[0] for step in other["steps"]] == [f"{n} of 4" for n in range(1, 5)]
    assert other["expected_layers_s"] is None
    assert not out.exists()


@pytest.mark.parametrize("family", ["lfm2", *in_minutes("deepseek_v3")])
def test_the_kv_cache_stays_in_16_bits_where_the_engine_has_no_place_for_scales(
    family: str, tmp_path: Path
) -> None:
    rows = [{"input_ids": [3 + (i * j) % 90 for j in range(1, 33)]} for i in range(60)]
    text = write_rows(tmp_path / "text.jsonl", rows)
    zoo.save(family, tmp_path / "model")
    asked = ("auto", tmp_path / "model", "--data", text, *QUICK, "--engine", "vllm")
    found = succeed(*asked, "--out", tmp_path / "out", "--json").json
    assert found["written"]["scheme"] == "fp8-dynamic"
    assert found["written"]["has_kv_scales"] is False
    assert found["checked"]["vllm"]["ok"] is True
    assert "--kv-cache-dtype" not in found["serve"]
    files = (tmp_path / "out" / "fp8-dynamic").glob("*.safetensors")
    names = {name for file in files for name in load_file(file)}
    assert any(name.endswith("weight_scale") for name in names)
    assert not any(name.endswith(("k_scale", "v_scale")) for name in names)
    (left,) = [each for each in found["decisions"] if "which KV scales" in each["question"]]
    assert left["why"].startswith("the KV cache stays in 16 bits: vllm does not use KV scales")


def run_no_text(*_: object) -> None:
    pytest.fail("text was run")


@pytest.mark.parametrize(
    ("family", "options", "code", "says"),
    [
        ("xglm", (), 8, "vllm cannot load it: vLLM 0.33 does not run xglm"),
        ("gpt2", (), 4, "Conv1D"),
        ("lfm2", ("--gate", "kv"), 8, "no parameters for scales"),
        ("deepseek_v3", ("--gate", "kv"), 8, "multi-head latent attention"),
    ],
)
def test_what_cannot_be_written_is_refused_before_text_is_run(
    family: str,
    options: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM 0.33 refuses KV scales of lfm2, and ignores those of latent attention (DeepSeek)."""
    zoo.save(family, tmp_path / "model")
    text = write_rows(tmp_path / "text.jsonl", [{"input_ids": [3, 4, 5, 6] * 8}] * 8)
    monkeypatch.setattr("fp8calib.commands.auto.run_calibration", run_no_text)
    out = tmp_path / "out"
    asked = ("auto", tmp_path / "model", "--data", text, *QUICK, *options, "--out", out)
    assert says in fail(code, *asked)
    assert not out.exists()


def test_options_that_cannot_be_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (model := tmp_path / "empty").mkdir()
    assert "--gate w4a4" in fail(2, "auto", model, "--gate", "w4a4")
    assert "reference" in fail(2, "auto", model, "--engine", "reference")
    assert "printable" in fail(2, "auto", model, "--out", tmp_path / "a\x01b")
    assert "two sequences" in fail(2, "auto", model, "--samples", 1)
    assert "--mxfp8" in fail(2, "auto", model, "--gate", "kv", "--mxfp8")


def test_schemes_are_ruled_out_for_what_the_statistics_lack(tmp_path: Path) -> None:
    """No hook reaches the inputs of gemma3n's projections outside its decoder layers."""
    zoo.save("gemma3n_text", tmp_path / "gemma3n")
    rows = [{"input_ids": [3 + (i * j) % 90 for j in range(1, 33)]} for i in range(20)]
    text = write_rows(tmp_path / "text.jsonl", rows)
    asked = ("auto", tmp_path / "gemma3n", "--data", text, *QUICK, "--out", tmp_path / "out")
    found = run(*asked, "--json").json
    (scheme,) = [each for each in found["decisions"] if "which scheme" in each["question"]]
    assert "fp8-static: the stats have no input of" in scheme["why"]
    assert "fp8-static: vllm cannot load it" not in scheme["why"]


# --- decisions on figures by hand -----------------------------------------------------------------


def candidate(name: str, kld: float, verdict: Verdict = Verdict.PASS) -> CandidateResult:
    return make_candidate(name, kld_mean=kld, kld_se=None, verdict=verdict, verdict_why="by hand")


def make_report(*candidates: CandidateResult, need: KvNeed | None = None) -> VerifyReport:
    """Make a report; of two candidates, the one with the smaller divergence is surely better."""
    pairs = tuple(
        PairedResult(
            candidate=one.name,
            base=base.name,
            difference=(difference := (one.kld_mean or 0.0) - (base.kld_mean or 0.0)),
            se=0.0001,
            margin=0.0001,
            answer=PairedAnswer.WORSE if difference > 0 else PairedAnswer.BETTER,
        )
        for one in candidates
        for base in candidates
        if one is not base
    )
    return make_small(candidates=candidates, kv=need, comparisons=pairs)


def make_need(answer: str) -> KvNeed:
    return KvNeed(
        answer=answer,  # type: ignore[arg-type]
        sites=(),
        layers=(),
        fp8_kld=0.01,
        fp8_kld_se=0.001,
        added_by_one=None,
        removed=(),
        why="by hand.",
    )


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (
            {"fp8-static": 0.03, "fp8-dynamic": 0.02, "w8a16": 0.01},
            ["fp8-dynamic", "fp8-static", "w8a16"],
        ),
        ({"fp8-static": 0.01, "fp8-dynamic": None, "w8a16": 0.005}, ["fp8-static", "w8a16"]),
        ({"fp8-static": None, "fp8-dynamic": None, "w8a16": 0.01}, ["w8a16"]),
        ({"fp8-static": None, "fp8-dynamic": None, "w8a16": None}, []),
        ({"fp8-block": 0.001, "fp8-dynamic": 0.02, "w8a16": 0.03}, ["fp8-dynamic", "w8a16"]),
    ],
)
def test_schemes_that_pass_are_ranked(
    verdicts: dict[str, float | None], expected: list[str]
) -> None:
    """None is a failure; the engine cannot load fp8-block. A warning is no pass."""
    found = make_report(
        *(
            candidate(name, 9.0, Verdict.FAIL) if kld is None else candidate(name, kld)
            for name, kld in verdicts.items()
        ),
        candidate(SCALE_ONE, 0.0),
    )
    refused = {"fp8-block": "sizes"}
    assert [each.name for each in decide.rank_schemes(found, refused)] == expected
    assert "fp8-block: sizes" in decide.describe_schemes(found, refused)
    alike = make_report(candidate("fp8-dynamic", 0.1, Verdict.NO_DIFFERENCE))
    assert [each.name for each in decide.rank_schemes(alike, {})] == ["fp8-dynamic"]
    warned = make_report(candidate("fp8-dynamic", 0.1, Verdict.WARN))
    assert not decide.rank_schemes(warned, {})
    assert decide.describe_schemes(warned, {}) == "fp8-dynamic: warn (by hand), KLD 0.1000 ± ?"
    assert decide.find_closest(warned, {}) == ("fp8-dynamic: warn (by hand), KLD 0.1000 ± ?", False)


@pytest.mark.parametrize(
    ("paired", "answer", "name", "told"),
    [
        (PairedAnswer.BETTER, "yes", "kv-and-q-scales", "is better"),
        (PairedAnswer.WORSE, "no", "kv-scales", "is worse"),
        (PairedAnswer.NO_DIFFERENCE, "no", "kv-scales", "makes no difference"),
        (
            PairedAnswer.CANNOT_TELL,
            "unknown",
            "kv-and-q-scales",
            "differs by less than so few sequences can tell",
        ),
    ],
)
def test_whether_q_needs_scales_is_told_by_the_paired_difference(
    paired: PairedAnswer, answer: str, name: str, told: str
) -> None:
    report = make_report(candidate("kv-and-q-scales", 0.1), candidate("kv-scales", 0.2))
    first, *others = report.comparisons
    report = report.model_copy(
        update={"comparisons": (first.model_copy(update={"answer": paired}), *others)}
    )
    found = decide.choose_kv(report, {3: 700.0})
    decision = found.decisions[1]
    assert (decision.answer, found.name) == (answer, name)
    assert f"{told} (KLD -0.1000 ± 0.0001) against kv-scales" in decision.why
    assert ("They are preferred" in decision.why) is (answer == "unknown")


def test_every_scheme_is_compared_with_the_one_of_the_smallest_divergence() -> None:
    report = make_report(
        candidate("fp8-static", 0.03), candidate("fp8-dynamic", 0.02), candidate("w8a16", 0.01)
    )
    assert decide.describe_schemes(report, {}).endswith(
        "; against w8a16: fp8-dynamic is worse (KLD +0.0100 ± 0.0001); fp8-static is worse (KLD "
        "+0.0200 ± 0.0001)"
    )


def test_each_scheme_is_tried_with_and_without_an_fp8_cache() -> None:
    ranked = [candidate("fp8-dynamic", 0.1), candidate("w8a16", 0.2)]
    kv = decide.choose_kv(make_report(candidate("kv-scales", 0.1), candidate(SCALE_ONE, 0.2)), {})
    found = list(map(str, decide.list_combinations(ranked, kv, "w8a8")))
    assert found == [
        "fp8-dynamic, kv-scales",
        "fp8-dynamic, KV cache in 16 bits",
        "w8a16, kv-scales",
        "w8a16, KV cache in 16 bits",
    ]
    only = list(map(str, decide.list_combinations([], kv, "kv")))
    assert only == ["weights in 16 bits, kv-scales"]


@pytest.mark.parametrize(
    ("with_q", "without", "expected"),
    [
        (Verdict.WARN, Verdict.PASS, ["kv-and-q-scales", "kv-scales"]),
        (Verdict.PASS, Verdict.FAIL, ["kv-and-q-scales"]),
        (Verdict.FAIL, Verdict.WARN, ["kv-scales"]),
        (Verdict.FAIL, Verdict.CANNOT_TELL, []),
    ],
)
def test_of_the_cache_alone_both_kinds_of_scales_are_tried(
    with_q: Verdict, without: Verdict, expected: list[str]
) -> None:
    found = make_report(
        candidate("kv-scales", 0.2, without),
        candidate("kv-and-q-scales", 0.1, with_q),
        candidate(SCALE_ONE, 0.9),
    )
    tried = decide.list_combinations([], decide.choose_kv(found, {3: 900.0}), "kv")
    assert [each.kv for each in tried] == expected


def test_kv_scales_that_fail_leave_the_cache_in_16_bits() -> None:
    found = make_report(
        candidate("kv-scales", 0.5, Verdict.FAIL), candidate(SCALE_ONE, 0.9, Verdict.FAIL)
    )
    choice = decide.choose_kv(found, {})
    assert choice.name is None
    assert choice.closest.startswith("kv-scales: fail (by hand)")
    unknown = make_report(candidate("kv-scales", 0.5, Verdict.CANNOT_TELL))
    assert decide.choose_kv(unknown, {}).is_unknown


def test_q_gets_scales_unless_they_change_nothing() -> None:
    with_q, without = candidate("kv-and-q-scales", 0.1), candidate("kv-scales", 0.2)
    one = candidate(SCALE_ONE, 0.9)
    assert decide.choose_kv(make_report(without, with_q, one), {3: 900.0}).name == "kv-and-q-scales"
    worse = candidate("kv-and-q-scales", 0.3)
    assert decide.choose_kv(make_report(without, worse, one), {3: 900.0}).name == "kv-scales"
    for answer, told in (("no", "no"), ("yes", "yes"), ("cannot-tell", "unknown")):
        report = make_report(without, one, need=make_need(answer))
        assert decide.choose_kv(report, {}).decisions[0].answer == told


def test_samples_count_the_text_that_is_held_out(plain: tuple[Path, Path], tmp_path: Path) -> None:
    command = ("auto", plain[0], "--gate", "kv", *QUICK, "--out", tmp_path / "out")
    outcome = run(*command, "--samples", 10, "--json")
    assert outcome.json["calibration_tokens"] == 8 * LENGTH
    assert outcome.json["sequences"] == 2
    told = [text for text in outcome.json["warnings"] if "tokens" in text]
    assert [text.partition(": ")[0] for text in told] == [
        f"only {8 * LENGTH} tokens, fewer than 4096",
        f"only {outcome.json['tokens']} tokens are held out, fewer than 4096",
    ]


@takes_minutes
def test_mxfp8_is_compared_where_it_is_asked_for_and_loaded(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """That it is one of the schemes is seen where nothing passes, too."""
    whole_blocks = plant(tmp_path, lambda _: None, hidden_size=64, intermediate_size=96)

    def compare(
        engine: str, *options: object, planted: tuple[Path, Path] = whole_blocks
    ) -> tuple[set[str], str]:
        model, text = planted
        out = tmp_path / f"{engine}-{len(options)}-{len(list(tmp_path.iterdir()))}"
        asked = ("auto", model, "--data", text, *QUICK, "--engine", engine, *options)
        report = run(*asked, "--out", out, "--json").json
        names = {each["name"] for each in report["candidates"]}
        (which,) = (each for each in report["decisions"] if "which scheme" in each["question"])
        return names, which["why"]

    names, why = compare("vllm", "--mxfp8")
    assert "mxfp8" in names
    assert "mxfp8: vllm cannot load it" not in why
    assert "mxfp8" not in compare("vllm")[0]
    names, why = compare("sglang", "--mxfp8")
    assert "mxfp8" not in names
    assert "mxfp8: sglang cannot load it: SGLang 0.5.23 loads no linears in MXFP8" in why
    names, why = compare("vllm", "--mxfp8", planted=plain)
    assert "mxfp8" not in names
    assert "no multiple of 32: MXFP8 has no smaller blocks" in why


def test_type_of_the_cache_is_answered_for_a_gpu(tmp_path: Path) -> None:
    model, text = plant(tmp_path, lambda _model: None, head_dim=64, num_hidden_layers=2)
    asked = ("auto", model, "--data", text, *QUICK, "--gate", "kv", "--gpu", "H100")
    found = run(*asked, "--out", tmp_path / "out", "--json").json
    (answer,) = [each for each in found["decisions"] if "which type" in each["question"]]
    assert answer["question"] == "which type of the KV cache on H100 (sm_90)?"
    names = {each["name"] for each in found["candidates"]}
    assert "int8_per_token_head" in names
    assert "nvfp4_4over6" not in names
    assert answer["answer"] in {*names, "unknown"}
    assert found["gpu"] == "H100"


def test_nvfp4_is_compared_with_the_scales_that_are_measured(
    tmp_path: Path,
) -> None:
    model, text = plant(tmp_path, lambda _model: None, head_dim=128, num_hidden_layers=2)
    asked = ("auto", model, "--data", text, *QUICK, "--gate", "kv", "--gpu", "b200")
    found = run(*asked, "--out", tmp_path / "out", "--json").json
    klds = {each["name"]: each["kld_mean"] for each in found["candidates"]}
    assert {"nvfp4", "nvfp4 with kv-scales", "nvfp4_4over6 with kv-scales"} <= set(klds)
    assert klds["nvfp4"] != klds["nvfp4 with kv-scales"]


def test_schemes_that_a_gpu_does_not_run_are_ruled_out(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    model, text = plain
    asked = ("auto", model, "--data", text, *QUICK, "--gpu", "a100", "--out", tmp_path / "out")
    found = run(*asked, "--json").json
    (scheme,) = [each for each in found["decisions"] if "which scheme" in each["question"]]
    assert "leaves inputs in 16 bits on A100 (sm_80), which has no fp8" in scheme["why"]
    assert scheme["answer"] in {"w8a16", "none"}
