"""Recipes: YAML files that state what to observe, on which data, and what to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from fp8calib.calibration.observe import Observe
from fp8calib.commands import options as keys
from fp8calib.commands.option import Option
from fp8calib.commands.options import recipe_files
from fp8calib.errors import RecipeError, UsageError, shorten, suggest
from fp8calib.formats.registry import list_format_names
from fp8calib.model.shapes import Frozen
from fp8calib.numerics.rules import Fallback, Rule, ScaleRules, parse_rule
from fp8calib.numerics.schemes import SCHEMES, name_mixed


def _key(option: Option, **more: Any) -> Any:
    """Make the field of a key from the option that overrides it."""
    return Field(
        default=option.default, ge=option.least, le=option.most, description=option.about, **more
    )


class Data(Frozen):
    """Which data is run through the model."""

    sources: tuple[str, ...] = _key(keys.DATA)
    text_column: str | None = _key(keys.TEXT_COLUMN, min_length=1)
    strict_rows: bool = _key(keys.STRICT_ROWS, strict=True)
    samples: int = _key(keys.SAMPLES, strict=True)
    seq_len: int | None = _key(keys.SEQ_LEN, strict=True)
    batch_size: int | None = _key(keys.BATCH_SIZE, strict=True)
    pack: bool = _key(keys.PACK, strict=True)
    seed: int = _key(keys.SEED, strict=True)


def _read_rule(value: Any) -> Rule:
    if isinstance(value, Rule):
        return value
    try:
        return parse_rule(str(value))
    except UsageError as error:
        raise ValueError(error.message) from error


RuleField = Annotated[
    Rule, PlainValidator(_read_rule, json_schema_input_type=str), PlainSerializer(str)
]


def _read_query_scale(value: Any) -> Any:
    if value not in (True, False, "auto", "yes", "no"):
        raise ValueError("must be auto, yes or no")
    return value == "yes" if value in ("yes", "no") else value


_QueryInput = Literal["auto", "yes", "no"] | bool
QueryScale = Annotated[
    Literal["auto"] | bool,
    BeforeValidator(_read_query_scale, json_schema_input_type=_QueryInput),
]


class ScaleOptions(Frozen):
    """How statistics become scales."""

    rule: RuleField = _key(keys.RULE)
    rules: dict[str, RuleField] = Field(
        default={},
        description="other rules of some K and V, by patterns like those of `ignore` for "
        "`model.layers.3.self_attn.k` and `.v`; the first pattern that matches counts",
    )
    fallback: Fallback | None = _key(keys.FALLBACK)
    fp8_dtype: Literal["e4m3fn", "e4m3fnuz"] = _key(keys.FP8_DTYPE)

    @property
    def choice(self) -> ScaleRules:
        """The rules alone."""
        return ScaleRules(rule=self.rule, rules=self.rules, fallback=self.fallback)


def _require_scheme(name: str) -> str:
    if name not in SCHEMES:
        raise ValueError(f"must be one of {', '.join(SCHEMES)}, not {name!r:.60}")
    return name


SchemeName = Annotated[str, AfterValidator(_require_scheme)]


class Quantize(Frozen):
    """The FP8 checkpoint to write."""

    @model_validator(mode="before")
    @classmethod
    def _drop_rounding(cls, value: Any) -> Any:
        """Accept recipes of 0.2, which say that weights are rounded to nearest."""
        if not isinstance(value, dict) or "rounding" not in value:
            return value
        if value["rounding"] != "nearest":
            raise ValueError("rounding is no key any more: `fp8calib gptq` rounds by GPTQ")
        return {key: item for key, item in value.items() if key != "rounding"}

    scheme: SchemeName = Field(
        description="also write an FP8 checkpoint of this scheme, in a folder named after it; "
        f"one of: {', '.join(SCHEMES)}; `quantize: NAME` is short for it"
    )
    layer_schemes: dict[str, SchemeName] = Field(
        default={},
        description="other schemes of some linears, by patterns like those of `ignore`; the first "
        "pattern that matches counts; the folder is then named SCHEME-mixed",
    )
    ignore: tuple[str, ...] = Field(
        default=(), description="modules to leave unquantized, as for quantize --ignore"
    )
    kv_cache_dtype_skip_layers: tuple[int, ...] = Field(
        default=(), description="layers whose KV cache is served in 16 bits"
    )

    @property
    def folder(self) -> str:
        """Name the folder that the checkpoint is written to."""
        return name_mixed(self.scheme, is_mixed=bool(self.layer_schemes))


class Recipe(Frozen):
    """What to observe, on which data, how to compute scales, and what to write."""

    name: str = Field(description="name recorded in the statistics file")
    description: str = Field(default="", description="one sentence for the reader")
    observe: Observe = Field(default=Observe(), description="which tensors are observed")
    data: Data = Field(default=Data(), description="which data is run")
    scales: ScaleOptions = Field(default=ScaleOptions(), description="how statistics become scales")
    formats: tuple[str, ...] = _key(keys.FORMATS)
    tp: tuple[Annotated[int, Field(strict=True)], ...] = _key(
        keys.TP, json_schema_extra={"minItems": 1}
    )
    query_scale: QueryScale = _key(keys.QUERY_SCALE)
    quantize: Quantize | None = Field(
        default=None, description="the FP8 checkpoint to write; null means none"
    )

    @field_validator("observe", "data", "scales", mode="before")
    @classmethod
    def _accept_empty_section(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("tp")
    @classmethod
    def _has_a_degree(cls, degrees: tuple[int, ...]) -> tuple[int, ...]:
        if not degrees:
            raise ValueError("must have one degree or more")
        if min(degrees) < 1:
            raise ValueError(f"{min(degrees)}: a degree is a whole number from 1 up")
        return degrees

    @field_validator("quantize", mode="before", json_schema_input_type=str | Quantize | None)
    @classmethod
    def _accept_scheme(cls, value: Any) -> Any:
        return {"scheme": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _observes_static_inputs(self) -> Self:
        if self.quantize is None or self.observe.inputs:
            return self
        names = (self.quantize.scheme, *self.quantize.layer_schemes.values())
        for name in names:
            if SCHEMES[name].has_static_inputs:
                raise ValueError(f"quantize: {name} needs observe.inputs, for its input scales")
        return self


def load_recipe(name_or_path: str) -> Recipe:
    """Load a shipped recipe by name, or a YAML file.

    Raises:
        RecipeError: there is no such recipe, or it is invalid; the message lists all faults.
    """
    shipped = recipe_files()
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise RecipeError(
            f"{name_or_path} is neither a shipped recipe nor a file",
            hint=f"shipped recipes: {', '.join(sorted(shipped))}",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text: {error}") from error
    recipe, known = parse_recipe(text, where=name_or_path), list_format_names()
    for name in recipe.formats:
        if name not in known:
            raise RecipeError(
                f"{name_or_path}: formats: unknown format {shorten(name)}",
                hint=suggest(name, known, what="formats"),
            )
    return recipe


def parse_recipe(text: str, *, where: str) -> Recipe:
    """Parse the YAML of a recipe.

    Raises:
        RecipeError: the recipe is invalid; the message lists all faults.
    """
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 -- a SafeLoader
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not YAML: {_locate(error)}") from error
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{where} cannot be read as YAML: {error}") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{where} is not a mapping of keys", hint=f"see {_EXPLAINED}")
    hint = f"{_EXPLAINED} explains every key"
    for key in document:
        tool = next((name for end, name in _FOREIGN_KEYS.items() if str(key).endswith(end)), "")
        if tool:
            raise RecipeError(
                f"{where}: {key}: this is a recipe of {tool}",
                hint=f"start from one of {', '.join(recipe_files())}; {hint}",
            )
    try:
        recipe = Recipe.model_validate(document)
        recipe.model_dump_json()
    except PydanticSerializationError as error:  # half a surrogate pair
        raise RecipeError(f"{where}: cannot be written as UTF-8: {error}", hint=hint) from error
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'recipe'}: {explain_value(item)}"
            for item in error.errors()
        ]
        raise RecipeError(f"{where}: " + "; ".join(lines), hint=hint) from error
    return recipe


_EXPLAINED = "docs/reference.md"
_FOREIGN_KEYS = {
    "_stage": "llm-compressor",
    "modifiers": "llm-compressor",
    "Modifier": "llm-compressor",
    "quant_cfg": "ModelOpt",
    "quantize_config": "AutoFP8",
}
"""Endings of the top-level keys of other tools' recipes, with the tool."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses repeated keys; PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:str":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r:.60} occurs twice",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _locate(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it contains characters that YAML does not allow"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def explain_value(item: Any) -> str:
    """Explain in plain words a fault that pydantic found in one value."""
    if item["type"] == "extra_forbidden":
        return f"unknown key{_suggest(item['loc'])}"
    if item["type"] == "missing":
        return "this key is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be"):
        must_be = message.removeprefix("Input should be").partition(", unable")[0]
        must_be = must_be.replace("a valid tuple", "a list")
        return f"must be{must_be}, not {item['input']!r:.60}"
    return message


def _suggest(location: Sequence[object]) -> str:
    """Suggest a known key for an unknown one, from the same section or another one."""
    name = str(location[-1])
    here: Any = Recipe
    for key in location[:-1]:
        field = here.model_fields.get(str(key))
        here = find_section(field.annotation) if field else None
        if here is None:
            return ""
    places = dict(_list_places())
    if name in places:
        place = f"under `{places[name]}:`" if places[name] else "at the top level"
        return f": it belongs {place}"
    if like := get_close_matches(name, here.model_fields, n=1):
        return f": did you mean {like[0]}?"
    if like := get_close_matches(name, places, n=1):
        return f": did you mean {'.'.join(filter(None, (places[like[0]], like[0])))}?"
    return ""


def _list_places() -> Iterator[tuple[str, str]]:
    """List every key with its section (empty at the top level), keys of the top level last."""
    for name, field in Recipe.model_fields.items():
        if (section := find_section(field.annotation)) is not None:
            yield from ((key, name) for key in section.model_fields)
    yield from ((name, "") for name in Recipe.model_fields)


def find_section(annotation: Any) -> type[Frozen] | None:
    """Find the section that a field of a recipe holds; None for a plain value."""
    kinds = (annotation, *get_args(annotation))  # of `Section | None`
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Frozen)), None)
