"""Recipes: what to observe, on which data, and what to write. YAML, unknown keys refused."""

from __future__ import annotations

import hashlib
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from fp8calib.errors import RecipeError, UsageError
from fp8calib.fp8.schemes import SCHEMES
from fp8calib.scales.compute import Fallback
from fp8calib.scales.rules import AMAX, KNOWN_RULES, Rule, parse_rule

DEFAULT_RECIPE = "kv"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Observe(_Section):
    """Which sites to observe."""

    kv: bool = Field(default=True, description="K and V per head, where the cache stores them")
    query: bool = Field(default=True, description="q per head, as attention receives it")
    inputs: bool = Field(default=True, description="inputs of linears and experts per channel")
    weights: bool = Field(default=True, description="weights per output and input channel")
    ignore: tuple[str, ...] = Field(
        default=(),
        description="modules to leave out: an exact path, a glob, or re: and a regular expression; "
        "one that matches no module is an error",
    )

    @model_validator(mode="after")
    def _observes_something(self) -> Self:
        if not (self.kv or self.query or self.inputs or self.weights):
            msg = "nothing is observed: set one of kv, query, inputs, weights"
            raise ValueError(msg)
        return self

    @property
    def needs_forward(self) -> bool:
        """Whether a forward pass is needed at all."""
        return self.kv or self.query or self.inputs


class Data(_Section):
    """Which data to run."""

    sources: tuple[str, ...] = Field(
        default=(), description="data specs as on the command line; empty means builtin"
    )
    samples: int = Field(default=512, ge=1, description="sequences to run")
    seq_len: int | None = Field(
        default=None, ge=2, description="tokens per sequence; null means min(2048, the model's)"
    )
    batch_size: int = Field(default=1, ge=1, description="sequences per forward pass")
    pack: bool = Field(default=True, description="join rows and cut them; false keeps rows whole")
    seed: int = Field(default=0, description="orders the mixing of weighted specs, nothing else")


def _read_rule(value: Any) -> Rule:
    if isinstance(value, Rule):
        return value
    try:
        return parse_rule(str(value))
    except UsageError as error:
        raise ValueError(error.message) from error


RuleField = Annotated[Rule, PlainValidator(_read_rule), PlainSerializer(str)]


class ScaleOptions(_Section):
    """How statistics become scales."""

    rule: RuleField = Field(
        default=AMAX, description=f"for activations; weights take amax; one of: {KNOWN_RULES}"
    )
    fallback: Fallback | None = Field(
        default=None,
        description="for tensors of zeros and experts never reached: layer-max (the default), one, "
        "refuse",
    )
    fp8_dtype: Literal["e4m3fn", "e4m3fnuz"] = Field(
        default="e4m3fn", description="the format scales are computed for"
    )


class Recipe(_Section):
    """What to observe, with which data, which rule makes scales, which formats to write."""

    name: str = Field(description="what the stats file calls the recipe")
    description: str = Field(default="", description="one sentence for people")
    observe: Observe = Field(default=Observe(), description="which sites to observe")
    data: Data = Field(default=Data(), description="which data to run")
    scales: ScaleOptions = Field(default=ScaleOptions(), description="how statistics become scales")
    formats: tuple[str, ...] = Field(
        default=("kv-overlay",), description="what to write beside stats and report"
    )
    tp: tuple[int, ...] = Field(
        default=(1,), description="tensor-parallel degrees of the JSON formats"
    )
    query_scale: bool = Field(default=False, description="write q_scale into overlays")
    quantize: str | None = Field(
        default=None,
        description="write an FP8 checkpoint of this scheme too, in a folder of its name; one of: "
        f"{', '.join(SCHEMES)}",
    )

    @field_validator("quantize")
    @classmethod
    def _is_scheme(cls, name: str | None) -> str | None:
        if name is not None and name not in SCHEMES:
            msg = f"must be one of {', '.join(SCHEMES)}, not {name!r:.60}"
            raise ValueError(msg)
        return name

    @model_validator(mode="after")
    def _observes_static_inputs(self) -> Self:
        is_static = self.quantize is not None and SCHEMES[self.quantize].has_static_inputs
        if is_static and not self.observe.inputs:
            msg = f"quantize: {self.quantize} needs observe.inputs, for its input scales"
            raise ValueError(msg)
        return self

    @property
    def observation_hash(self) -> str:
        """Hash of what decides the statistics: the `observe` section (the data has its own)."""
        return hashlib.sha256(self.observe.model_dump_json().encode()).hexdigest()


def load_recipe(name_or_path: str) -> Recipe:
    """Load a shipped recipe by name, or a YAML file.

    Raises:
        RecipeError: unknown name, unreadable file, or what is wrong in it, all at once.
    """
    return parse_recipe(read_recipe(name_or_path), where=name_or_path)


def read_recipe(name_or_path: str) -> str:
    """Read the text of a recipe, by name or path."""
    shipped = recipe_files()
    if name_or_path in shipped:
        return shipped[name_or_path].read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        raise RecipeError(
            f"no recipe called {name_or_path}, and no file of that name",
            hint=f"shipped recipes: {', '.join(sorted(shipped))}",
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text: {error}") from error


def parse_recipe(text: str, *, where: str) -> Recipe:
    """Parse a recipe's YAML; every error of the file is told at once."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not YAML: {_locate(error)}") from error
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML that can be read: {error}") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{where} holds no mapping", hint="see `fp8calib recipes kv`")
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'recipe'}: {explain_value(item)}"
            for item in error.errors()
        ]
        raise RecipeError(
            f"{where}: " + "; ".join(lines), hint="`fp8calib recipes kv` explains every key"
        ) from error
    return recipe


def _locate(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it holds characters that YAML does not allow"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def explain_value(item: Any) -> str:
    """Say in our words what pydantic found wrong with one value."""
    if item["type"] == "extra_forbidden":
        return "unknown key"
    message = str(item["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be"):
        must_be = message.removeprefix("Input should be").partition(", unable")[0]
        return f"must be{must_be}, not {item['input']!r:.60}"
    return message


def match_modules(patterns: tuple[str, ...], modules: list[str]) -> frozenset[str]:
    """Find the modules that patterns name.

    Raises:
        RecipeError: a pattern matches nothing, or is no regular expression.
    """
    matched: set[str] = set()
    for pattern in patterns:
        found = [module for module in modules if _matches(pattern, module)]
        if not found:
            raise RecipeError(
                f"observe.ignore: {pattern!r} matches no module of the model",
                hint=f"modules look like {modules[0]}",
            )
        matched.update(found)
    return frozenset(matched)


def _matches(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(module, pattern)
    try:
        return re.fullmatch(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise RecipeError(
            f"observe.ignore: {pattern!r} is no regular expression: {error}"
        ) from error


# A wheel carries them inside the package (setup.py puts them there); a clone at its top.
_IN_PACKAGE = Path(__file__).parent / "recipes"
_IN_CLONE = Path(__file__).parents[1] / "recipes"


def recipe_files() -> dict[str, Path]:
    """Return the built-in recipes, name -> YAML file, in the order of their names."""
    folder = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CLONE
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
