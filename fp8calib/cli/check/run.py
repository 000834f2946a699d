"""Run `fp8calib check`: replay each engine, print the verdicts."""

from __future__ import annotations

from fp8calib.api.check import check
from fp8calib.cli.check.show import show_check_report
from fp8calib.cli.console import prints_json
from fp8calib.cli.setup import quiet_libraries
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.requests.check import CheckRequest


def run_check(settings: CheckRequest) -> int:
    """Check, print the verdicts, and return the exit code: 8 unless every engine is ok."""
    quiet_libraries()
    report = check(
        settings.path,
        engine=settings.engine,
        tp=settings.tp,
        model=settings.model,
        require_kv=settings.require_kv,
        allow_suspicious=settings.allow_suspicious,
        stats=settings.stats,
        run=settings.run,
        engine_python=settings.engine_python,
    )
    show_check_report(report, str(settings.path), as_json=prints_json())
    if report.cannot_judge:
        return CANNOT_TELL
    return 0 if report.ok else VerificationError.exit_code
