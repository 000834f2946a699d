"""Asks the engines: which replay is whose, for folders and for single files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.sglang import check_sglang, has_kv_method
from fp8calib.engines.replay.sglang_json import check_sglang_json
from fp8calib.engines.replay.tgi import check_tgi
from fp8calib.engines.replay.transformers import check_transformers
from fp8calib.engines.replay.verdicts import (
    CheckReport,
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Status,
    report_alike,
    report_refusal,
)
from fp8calib.engines.replay.vllm import check_vllm
from fp8calib.engines.weights.check import WeightCheck
from fp8calib.errors import UsageError
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.tensor_parallel import check_cuts, check_heads

ENGINES: Mapping[str, Callable[[ScaleFolder, ModelGeometry, int], EngineReport]] = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "tgi": check_tgi,
    "transformers": check_transformers,
}
_NO_JSON = {
    "vllm": "vLLM reads no JSON of scales since 0.7 (--quantization-param-path is gone)",
    "tgi": "TGI reads no JSON of scales",
    "transformers": "transformers reads no JSON of scales",
}
_SPLITTING = ("vllm", "sglang", "tgi")
"""Engines that share the heads out to ranks (vLLM 0.32.0 `config/model.py`, SGLang's models)."""
_NO_LONE_FILE = "no engine reads a file of scales that lies outside the model's folder"


def check_folder(
    folder: ScaleFolder, geometry: ModelGeometry, engines: Sequence[str], tp: int
) -> CheckReport:
    """Say what each engine does with the scales, and the FP8 weights, of a checkpoint folder."""
    misfit = _find_misfit(geometry, tp)
    weights = WeightCheck(folder, geometry, tp)
    return CheckReport(
        engines={
            name: report_refusal(geometry, misfit)
            if misfit is not None and name in _SPLITTING
            else weights.amend(name, ENGINES[name](folder, geometry, tp))
            for name in engines
        }
    )


def check_file(
    path: Path,
    geometry: ModelGeometry,
    engines: Sequence[str],
    tp: int,
    *,
    model: ScaleFolder,
) -> CheckReport:
    """Say what each engine does with a file of scales beside a model.

    Args:
        path: a JSON file, or a lone file of tensors.
        geometry: the shape of the model.
        engines: names of `ENGINES`.
        tp: the number of ranks.
        model: the model's folder.
    """
    reports = {}
    misfit = _find_misfit(geometry, tp)
    for name in engines:
        if misfit is not None and name in _SPLITTING:
            reports[name] = report_refusal(geometry, misfit)
        elif path.suffix != ".json":
            reports[name] = _drop(geometry, _NO_LONE_FILE)
        elif name in _NO_JSON:
            reports[name] = _drop(geometry, _NO_JSON[name])
        else:
            attached = has_kv_method(model)
            reports[name] = check_sglang_json(path, geometry, tp, has_kv_method=attached)
    return CheckReport(engines=reports)


def _find_misfit(geometry: ModelGeometry, tp: int) -> Refusal | None:
    """Say why engines do not start with so many ranks; None where all can be shared out."""
    try:
        check_heads(geometry, tp)
        check_cuts(geometry, tp)
    except UsageError as error:
        return Refusal(f"{error.message}: the engine does not start", fix=error.hint)
    return None


def _drop(geometry: ModelGeometry, why: str) -> EngineReport:
    fix = "write a kv-overlay, which carries the scales in the checkpoint"
    verdict = LoadVerdict(status=Status.DROPPED, value=1.0, why=f"{why}: 1.0", fix=fix)
    return report_alike(geometry, verdict)


_FIX = "load it in the engine and read the scales in its log, or serve a known architecture"


def amend_for_unknown(report: CheckReport, model_type: str) -> CheckReport:
    """Take back every `used`: whether an engine's own model has the place cannot be told.

    What stops any model (no quantization_config, a missing shard, a number that is no scale) stays.
    """
    engines = {name: _amend(name, engine, model_type) for name, engine in report.engines.items()}
    return CheckReport(engines=engines)


def _amend(name: str, report: EngineReport, model_type: str) -> EngineReport:
    why = (
        f"model_type {model_type} is unknown to this tool: whether {name} has a place for the "
        "scale cannot be told"
    )
    layers = tuple(
        LayerVerdict(layer=layer.layer, k=_take_back(layer.k, why), v=_take_back(layer.v, why))
        for layer in report.layers
    )
    problem = f"model_type {model_type} is unknown to this tool: its layers are taken from names"
    return report.model_copy(update={"layers": layers, "problems": (*report.problems, problem)})


def _take_back(verdict: LoadVerdict, why: str) -> LoadVerdict:
    if verdict.status is not Status.USED:
        return verdict
    text = f"{why} ({verdict.why})"
    return LoadVerdict(status=Status.DROPPED, value=None, why=text, fix=_FIX)
