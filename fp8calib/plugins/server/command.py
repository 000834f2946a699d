"""Compare a running server with the emulated candidates."""

from __future__ import annotations

from fp8calib.commands.verify import run as verify
from fp8calib.errors import UsageError
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.plugins.server.ask import ServerCompanion, check_dump
from fp8calib.plugins.server.request import ServerRequest
from fp8calib.plugins.server.result import ServerVerifyResult
from fp8calib.results.run_plan import RunPlan


def run(request: ServerRequest, reporter: Reporter) -> ServerVerifyResult | RunPlan:
    """Verify a model, and name the candidate that explains the answers of a running server.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model, a candidate or the dump cannot be read, or do not belong together.
        DataError: the data cannot be read, or the dump is of another text.
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or infinity.
        ServerError: a server fails.
        ExportError: a file cannot be written.
    """
    if request.reference_server_model and request.reference_server is None:
        raise UsageError(
            "--reference-server-model has no effect without --reference-server",
            hint="add --reference-server URL",
        )
    check_dump(request)
    companion = ServerCompanion(request)
    result = verify(request, reporter, companion)
    if isinstance(result, RunPlan):
        return result
    return ServerVerifyResult(**dict(result), server=companion.result)


server = as_function("server", ServerRequest, run)
