"""`calibrate --rule auto`: hold back text on which `verification.rule_choice` chooses the rules."""

from __future__ import annotations

from dataclasses import replace

from fp8calib.data.sequences import DataPlan, split_plan
from fp8calib.dialects.registry import find_dialect
from fp8calib.errors import DataError, UsageError
from fp8calib.geometry.sites import KV_ROLES, Site
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.text import HELD_OUT
from fp8calib.jobs.verification.job import VerifyOptions
from fp8calib.jobs.verification.memory import choose_verification_mode
from fp8calib.jobs.verification.options import resolve_options
from fp8calib.jobs.verification.request import list_searched
from fp8calib.jobs.verification.run_job import (
    LEAST_FOR_AUTO,
    open_verify_job,
    run_verify_job,
)
from fp8calib.numerics.rules import AUTO, PER_HEAD, parse_rule
from fp8calib.recipe import Recipe
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.requests.verify import VerifyRequest
from fp8calib.scales.site_rules import SiteRules
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.verification.report import RuleChoiceResult
from fp8calib.verification.rule_choice import describe_search, split_text


def check_auto(
    recipe: Recipe, request: CalibrateRequest, num_processes: int, *, has_engine: bool
) -> None:
    """Refuse `--rule auto` where rules cannot be chosen, or are not those of K and V alone.

    Raises:
        UsageError: naming the option.
    """
    if recipe.scales.rule != AUTO:
        return
    linears = [name for name in recipe.formats if find_dialect(name).has_linears]
    refused = {
        "nothing is written without --out": request.out is None,
        "a shard (--shard) has not all statistics": request.shard is not None,
        "an engine that runs the text loses nothing here": has_engine,
        "it runs in one process": num_processes > 1,
        f"recipe {recipe.name} scales inputs of linears too": recipe.quantize is not None,
        f"{', '.join(linears)} scales inputs of linears too": bool(linears),
        f"recipe {recipe.name} does not observe K and V": not recipe.observe.kv,
    }
    for why, is_refused in refused.items():
        if is_refused:
            hint = "use another --rule, or see what verify --rules auto chooses"
            raise UsageError(f"--rule auto: {why}", hint=hint)


def hold_out(job: ResumableJob) -> ResumableJob:
    """Hold out the last part of the text of a job whose rules are chosen.

    Raises:
        DataError: it is too short.
    """
    if job.recipe.scales.rule != AUTO or job.plan is None:
        return job
    plan, held_out = split_plan(job.plan, HELD_OUT)
    if len(held_out.sequences) < LEAST_FOR_AUTO:
        raise DataError(
            f"--rule auto: {len(job.plan.sequences)} sequences are too few: a fifth is held out, "
            "of which one half chooses and the other judges",
            hint="use more text, or a shorter --seq-len",
        )
    return replace(job, plan=plan, held_out=held_out)


def plan_search(job: ResumableJob) -> dict[str, str]:
    """Describe for a plan what choosing costs at most."""
    if job.held_out is None:
        return {}
    num_options = len(list_searched(_make_options(job, ())))
    texts = split_text(job.held_out)
    return {"rule_search": describe_search(job.prepared.geometry, num_options, *texts)}


def choose_site_rules(
    job: ResumableJob, stats: CalibrationStats
) -> tuple[RuleChoiceResult, SiteRules]:
    """Choose the rule of each K and V on the text that is held out.

    Raises:
        UsageError: that text is too short.
        CalibrationError: a forward pass failed.
    """
    held_out: DataPlan | None = job.held_out
    assert held_out is not None  # noqa: S101 -- the caller knows
    verification = open_verify_job(job, _make_options(job, (stats,)), held_out)
    mode = choose_verification_mode(verification)
    choice = run_verify_job(verification, mode, job.reporter).report.rule_choice
    assert choice is not None  # noqa: S101 -- asked for
    return choice, read_rules(choice, stats)


def read_rules(choice: RuleChoiceResult, stats: CalibrationStats) -> SiteRules:
    """Read the rules of a choice."""
    sites = (Site(a.module, role) for _, a in stats.geometry.attentions() for role in KV_ROLES)
    named = {site: choice.rules.get(str(site), choice.default) for site in sites}
    return SiteRules(
        sites={site: parse_rule(name) for site, name in named.items() if name != PER_HEAD},
        by_head=frozenset(site for site, name in named.items() if name == PER_HEAD),
    )


def _make_options(job: ResumableJob, scales: tuple[CalibrationStats, ...]) -> VerifyOptions:
    request = VerifyRequest(
        job.name,
        scales,
        rules=[str(AUTO)],
        fp8_dtype=job.recipe.scales.fp8_dtype,
        batch_size=job.recipe.data.batch_size,
    )
    by_head = all(find_dialect(name).per_head for name in job.recipe.formats)
    return replace(resolve_options(request), by_head=by_head)
