"""What engines do with the weights of a checkpoint folder, in three passes.

1. What the folder stores (`weights/stored.py`), once for engines that open the same files.
2. What an engine's class creates (`weights/linears.py`) under the config (`weights/reader.py`), and
   the tensors that each linear then has to have (`weights/forms.py`).
3. The rule: a stored tensor beside what is created for it (`linear_replay.py`), or beside a
   parameter that is not a linear (`weights/parameters.py`), and what breaks whatever is stored
   (`weights/rules.py`, `weights/blocks.py`).

Of a model in 16 bits, with or without a KV overlay, only names and parameters are compared.
"""

from __future__ import annotations

from dataclasses import replace

from fp8calib.engines.engine import Engine
from fp8calib.engines.facts.classes import find_class_map
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    Finding,
    LinearCount,
    Refusal,
    Unjudged,
    report_refusal,
)
from fp8calib.engines.status import Status
from fp8calib.engines.weights.layers import find_decoder
from fp8calib.engines.weights.parameters import compare_parameters, judge_head
from fp8calib.engines.weights.stored import OpenedWeights
from fp8calib.model.drafters import find_promise, is_drafted


def amend_weights(
    engine: Engine, report: EngineReport, stored: OpenedWeights, tp: int
) -> EngineReport:
    """Add what an engine does with the weights on `tp` ranks to its report on the KV scales."""
    count, found = _list_findings(engine, stored, tp)
    by_status = {status: [each for each in found if each.status is status] for status in Status}
    for refused in by_status[Status.REFUSED]:
        refusal = Refusal(refused.text, fix=refused.fix)
        report = report_refusal(stored.geometry, refusal)
        return report.model_copy(update={"weights": refused.judge()})
    doubts = by_status[Status.UNKNOWN]
    wrong = [*by_status[Status.MISREAD], *by_status[Status.BAD], *by_status[Status.DEFAULTED]]
    certain = [each for each in wrong if not (doubts and each.is_silent)]
    if stored.wrong_values is not None:
        certain.append(stored.wrong_values)
    if certain:
        report = report.model_copy(update={"weights": certain[0].judge()})
        others = dict.fromkeys(each.text for each in certain[1:])
        report = report.add(problems=(f"weights, too: {text}" for text in others))
    elif doubts:
        hint = engine.spell_run_hint(stored.folder.config)
        texts = (f"{each.text}{hint}{each.fix and f'; fix: {each.fix}'}" for each in doubts)
        report = report.add(unknown=(f"weights: {text}" for text in texts))
        # what becomes of the weights if the engine loads them after all
        failing = (
            replace(each, status=Status.MISREAD, why=f"{each.why}: {each.if_loaded}")
            for each in doubts
            if each.if_loaded
        )
        if_loaded = next((each.judge() for each in (*wrong, *failing)), None)
        report = report.model_copy(update={"if_loaded": if_loaded})
    report = report.model_copy(update={"linears": count})
    notes = [each.text for each in by_status[Status.USED]]
    return report.add(
        suspicious=(f"weights: {text}" for text in stored.suspicious),
        problems=(f"weights: {why}" for why in notes),
    )


def _list_findings(
    engine: Engine, stored: OpenedWeights, tp: int
) -> tuple[LinearCount | None, list[Finding]]:
    """List what an engine does with the weights other than loading them as they are."""
    geometry, facts = stored.geometry, engine.facts
    count: LinearCount | None = None
    found: list[Finding] = []
    if not stored.has_old_blocks:
        classes = find_class_map(facts, geometry.architecture) if facts.key else {}
        may_refuse = any(each.state == "refused" for made in classes.values() for each in made)
        if stored.folder.tensors and facts.key:
            found += judge_head(facts, classes, stored)
        if may_refuse or not stored.is_plain:
            from fp8calib.engines.linear_replay import compare_linears  # noqa: PLC0415 -- most of the code

            try:
                count, found = compare_linears(engine, stored, classes, found, tp)
            except Refusal as refusal:
                found = [Finding.of(refusal)]
                if not isinstance(refusal, Unjudged):
                    return None, found
    if stored.folder.tensors:
        found += compare_parameters(facts, stored)
    found += (Finding(status=Status.UNKNOWN, why=why) for why in stored.doubts)
    is_whole = any(len(each.shape) > 1 for each in stored.tensors.values())
    if is_whole and (promise := find_promise(stored.folder.config)):
        decoder, num_layers = find_decoder(geometry), len(geometry.layers)
        if not any(is_drafted(name, num_layers, decoder) for name in stored.tensors):
            why = f"config.json promises a drafter ({promise}), and no tensor of one is stored"
            why = f"{why}: decoding with it is not possible"
            found.append(Finding(status=Status.USED, why=why))
    return count, found
