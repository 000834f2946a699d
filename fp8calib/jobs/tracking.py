"""Log what `verify` and `plan` found to MLflow or Weights & Biases, as these are configured."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8calib.errors import ExportError, UsageError, first_line
from fp8calib.jobs.reporter import Reporter
from fp8calib.results.plan import PlanResult
from fp8calib.results.verify import VerifyResult

PROJECT = "fp8calib"
"""The experiment of MLflow and the project of W&B, where their variables name none."""
_FIGURES = ("ppl", "ppl_ratio", "ppl_ratio_se", "kld_mean", "kld_se", "kld_p99", "top1_agreement")
_PARAMETERS = ("model", "engine", "engine_version", "emulated", "gpu", "dtype", "device", "budget")
_COUNTS = ("tokens", "sequences", "seq_len", "duration_s", "size_bytes")
_NOT_IN_NAMES = re.compile(r"[^\w./ -]+")


def check_tracker(name: str) -> None:
    """Refuse a tracker that is not installed, before anything is run.

    Raises:
        UsageError: naming the extra.
    """
    if find_spec(name) is None:
        hint = f"pip install 'fp8calib[{name}]'"
        raise UsageError(f"--log {name}: {name} is not installed", hint=hint)


def log_and_say(name: str, result: VerifyResult | PlanResult, reporter: Reporter) -> None:
    """Log parameters, figures and the whole result, and say where they are.

    Raises:
        ExportError: the tracker fails; the error carries the result, which may have cost hours.
    """
    kind = "plan" if isinstance(result, PlanResult) else "verify"
    document = result.to_json()
    params = {key: document[key] for key in _PARAMETERS if document.get(key)}
    provenance = document.get("provenance") or {}
    params |= {key: provenance[key] for key in ("model_hash", "data_hash") if key in provenance}
    try:
        place = _TRACKERS[name](kind, params, dict(_list_metrics(document)), document)
    except Exception as error:
        told = ExportError(
            f"--log {name}: {type(error).__name__}: {first_line(error)}",
            hint="what was measured is printed; its configuration may be wrong",
        )
        told.result = result  # type: ignore[attr-defined]
        raise told from error
    reporter.say(f"logged to {place}")


def _list_metrics(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """List the figures: of the run, and of each candidate or point under its name."""
    rows: dict[str, Mapping[str, Any]] = {"": document}
    if "reference" in document:
        rows["reference"] = document["reference"]
    for each in (*document.get("candidates", ()), *document.get("frontier", ())):
        short = Path(each["name"]).name if each["name"].startswith("/") else each["name"]
        name = _NOT_IN_NAMES.sub("", short)
        rows[name if name not in rows else f"{name} {len(rows)}"] = each
    for name, row in rows.items():
        for key in (*_FIGURES, *_COUNTS):
            if isinstance(value := row.get(key), int | float):
                yield f"{name}/{key}".lstrip("/"), float(value)


def _log_to_mlflow(
    kind: str, params: Mapping[str, Any], metrics: Mapping[str, float], document: Mapping[str, Any]
) -> str:
    import mlflow  # noqa: PLC0415

    if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
        mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=f"{kind} {Path(params['model']).name}") as run:
        mlflow.log_params(dict(params))
        mlflow.log_metrics(dict(metrics))
        mlflow.log_dict(dict(document), f"{kind}.json")
        mlflow.set_tag("fp8calib", kind)
    return f"{mlflow.get_tracking_uri()}, run {run.info.run_id}"


def _log_to_wandb(
    kind: str, params: Mapping[str, Any], metrics: Mapping[str, float], document: Mapping[str, Any]
) -> str:
    import wandb  # noqa: PLC0415

    mode: dict[str, Any] = {} if "WANDB_MODE" in os.environ else {"mode": "offline"}
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        **mode,
        job_type=kind,
        config=dict(params),
        settings=wandb.Settings(silent=True),
    )
    with run:
        run.log(dict(metrics))
        artifact = wandb.Artifact(f"fp8calib-{kind}", type="report")
        with artifact.new_file(f"{kind}.json") as file:
            json.dump(document, file)
        run.log_artifact(artifact)
    return str(Path(run.dir).parent)


_TRACKERS: Mapping[
    str, Callable[[str, Mapping[str, Any], Mapping[str, float], Mapping[str, Any]], str]
] = {"mlflow": _log_to_mlflow, "wandb": _log_to_wandb}
