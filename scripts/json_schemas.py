"""The JSON schemas of what `--json` prints and of recipes, made from types.

`tests/docs/test_schemas.py` compares them with real output, and writes docs/schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from fp8calib.results.auto import AutoReport
from fp8calib.checkpoint.json_files import SCHEMA_VERSION
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.recipe import Recipe
from fp8calib.results.extract_kv_scales import ExtractResult
from fp8calib.results.merge import MergeResult
from fp8calib.scales.rules import AMAX
from fp8calib.verification.report import VerifyReport
from scripts import json_outputs as outputs

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OUTPUTS: Mapping[str, Any] = {
    "calibrate": outputs.CalibrateOutput,
    "card": outputs.CardOutput,
    "engine-env": outputs.EngineEnvOutput,
    "error": outputs.ErrorOutput,
    "export": outputs.ExportOutput,
    "plan": outputs.PlanOutput,
    "quantize": outputs.QuantizeOutput,
    "recipes": outputs.RecipeListOutput | outputs.RecipeOutput,
    "show": outputs.ShowStatsOutput | outputs.ShowScalesOutput,
}
"""The types of outputs, by the names of the schemas."""
RESULTS: Mapping[str, Any] = {
    "auto": AutoReport,
    "extract-kv-scales": ExtractResult,
    "merge": MergeResult,
}
"""The types of results that are printed as they are."""
_EVERY_OUTPUT: Mapping[str, Any] = {
    "schema_version": {"const": SCHEMA_VERSION},
    "passed": {"type": "boolean"},
}
"""What `Output` has, for types of the program, which lack it."""


def make_schemas() -> dict[str, dict[str, Any]]:
    """Make every schema, by the name of its file."""
    schemas = {name: _describe(name, kind) for name, kind in OUTPUTS.items()}
    schemas["verify"] = _describe_verify()
    schemas["check"] = _describe_check()
    for name, kind in RESULTS.items():
        schemas[name] = _add(_describe(name, kind), {})
    schemas["recipe"] = _describe_recipe()
    return schemas


def _describe(name: str, kind: Any) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    return {"$schema": DIALECT, "title": f"fp8calib {name}", **_open(schema)}


def _describe_recipe() -> dict[str, Any]:
    """Describe the YAML of a recipe: the only schema that refuses keys that are not known."""
    schema = Recipe.model_json_schema()
    schema["$defs"]["ScaleOptions"]["properties"]["rule"]["default"] = str(AMAX)
    return {"$schema": DIALECT, **schema}


def _describe_verify() -> dict[str, Any]:
    """Describe the report of `verify`, with what the command adds and leaves out."""
    schema = _describe("verify", VerifyReport)
    del schema["properties"]["histograms"], schema["$defs"]["HistogramResult"]
    added = {"next": {"type": "string"}, "advice": {"type": "string"}}
    return _add(schema, added, left_out="histograms")


def _describe_check() -> dict[str, Any]:
    """Describe the report of every engine, with what `check` adds."""
    report = _describe("check", EngineReport)
    definitions = report.pop("$defs")
    added = {
        "ok": {"type": "boolean"},
        "engine": {"type": "string"},
        "version": {"type": "string"},
        "status": {"enum": ["unknown", None]},
    }
    definitions["EngineReport"] = _add(report, added, is_output=False)
    return {
        "$schema": DIALECT,
        "title": "fp8calib check",
        "type": "object",
        "required": [*_EVERY_OUTPUT, "ok", "engines"],
        "properties": {
            **_EVERY_OUTPUT,
            "ok": {"type": "boolean"},
            "engines": {
                "type": "object",
                "additionalProperties": {"$ref": "#/$defs/EngineReport"},
            },
        },
        "$defs": definitions,
    }


def _add(
    schema: dict[str, Any],
    properties: Mapping[str, Any],
    *,
    left_out: str = "",
    is_output: bool = True,
) -> dict[str, Any]:
    """Add required properties to the schema of an object."""
    first = _EVERY_OUTPUT if is_output else {}
    schema["properties"] = {**first, **properties, **schema["properties"]}
    required = [name for name in schema.get("required", ()) if name != left_out]
    schema["required"] = [*first, *properties, *required]
    return schema


def _open(schema: Any) -> Any:
    """Accept keys that are not known: later versions may add some."""
    if isinstance(schema, dict):
        return {
            key: _open(value)
            for key, value in schema.items()
            if not (key == "additionalProperties" and value is False)
        }
    return [_open(each) for each in schema] if isinstance(schema, list) else schema
