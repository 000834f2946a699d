"""The JSON schemas of what `--json` prints and of recipes, which the documentation site has."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

from fp8calib.commands import SCHEMA_VERSION, find_module, spell_commands
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.result import ErrorResult, RunPlan
from fp8calib.numerics.rules import AMAX

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_EVERY_OUTPUT = {"schema_version": {"const": SCHEMA_VERSION}, "passed": {"type": "boolean"}}
"""What is printed with every result."""


def make_schemas() -> dict[str, dict[str, Any]]:
    """Make every schema, by the name of its file."""
    results = {typed: _find_result(name) for typed, name in spell_commands().items()}
    results = {typed.replace(" ", "-"): kind for typed, kind in results.items()}
    kinds = {**results, "run-plan": RunPlan, "error": ErrorResult}
    schemas = {name: _describe(name, kind) for name, kind in kinds.items()}
    return schemas | {"recipe": _describe_recipe()}


def _find_result(command: str) -> Any:
    """Find what the `run` of a command gives, but for the plan of --dry-run."""
    module: Any = find_module(command)
    kind = get_type_hints(module.run)["return"]
    others = (RunPlan, type(None))
    return reduce(or_, (each for each in get_args(kind) or (kind,) if each not in others))


def _describe(name: str, kind: Any) -> dict[str, Any]:
    schema = _open(TypeAdapter(kind).json_schema(mode="serialization"))
    if "anyOf" in schema:  # of several results, each is a definition
        for each in schema["anyOf"]:
            _add_common(schema["$defs"][each["$ref"].rpartition("/")[2]])
    else:
        _add_common(schema)
    return {"$schema": DIALECT, **schema, "title": f"fp8calib {name}"}


def _add_common(schema: dict[str, Any]) -> None:
    schema["properties"] = {**_EVERY_OUTPUT, **schema["properties"]}
    schema["required"] = [*_EVERY_OUTPUT, *schema.get("required", ())]


def _describe_recipe() -> dict[str, Any]:
    """Describe the YAML of a recipe: the only schema that refuses keys that are not known."""
    schema = Recipe.model_json_schema()
    schema["$defs"]["ScaleOptions"]["properties"]["rule"]["default"] = str(AMAX)
    return {"$schema": DIALECT, **schema}


def _open(schema: Any) -> Any:
    """Accept keys that are not known: later versions may add some."""
    if isinstance(schema, dict):
        return {
            key: _open(value)
            for key, value in schema.items()
            if not (key == "additionalProperties" and value is False)
        }
    return [_open(each) for each in schema] if isinstance(schema, list) else schema
