"""Recipes: YAML files that state what to observe, on which data, and what to write.

The options of a request override them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from fp8calib.calibration.stats_header import Observe
from fp8calib.commands import options as keys
from fp8calib.commands.request import Option, list_options
from fp8calib.data.rows import ReadRow
from fp8calib.data.sources import split_data
from fp8calib.errors import RecipeError, UsageError, cut_list, first_line, join_or
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.model.geometry import Frozen
from fp8calib.numerics.rules import Fallback, Rule, ScaleRules, parse_rule
from fp8calib.numerics.schemes import SCHEMES, find_scheme, name_mixed

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats
    from fp8calib.quantization.settings import PlanSettings

M = TypeVar("M", bound=BaseModel)


def make_field(option: Option, **more: Any) -> Any:
    """Make the field of a recipe's key from the option that overrides it."""
    return Field(
        default=option.key_default,
        ge=option.least,
        le=option.most,
        description=option.about,
        **more,
    )


class Data(Frozen):
    """Which text is run through the model: what recipes and requests say of it."""

    sources: tuple[str, ...] = make_field(keys.DATA)
    text_column: str | None = make_field(keys.TEXT_COLUMN, min_length=1)
    strict_rows: bool = make_field(keys.STRICT_ROWS, strict=True)
    samples: int = make_field(keys.SAMPLES, strict=True)
    seq_len: int | None = make_field(keys.SEQ_LEN, strict=True)
    batch_size: int | None = make_field(keys.BATCH_SIZE, strict=True)
    pack: bool = make_field(keys.PACK, strict=True)
    seed: int = make_field(keys.SEED, strict=True)


def _by_name(find: Callable[[str], object]) -> Callable[[str], str]:
    """Make a validator of a function that finds something by its name, or raises a UsageError."""

    def require(name: str) -> str:
        try:
            find(name)
        except UsageError as error:
            raise ValueError("; ".join(filter(None, (error.message, error.hint)))) from error
        return name

    return require


def _read_rule(value: Any) -> Rule:
    return value if isinstance(value, Rule) else parse_rule(_require_rule(str(value)))


_require_rule = _by_name(parse_rule)
RuleField = Annotated[
    Rule, PlainValidator(_read_rule, json_schema_input_type=str), PlainSerializer(str)
]
SchemeName = Annotated[str, AfterValidator(_by_name(find_scheme))]
FormatName = Annotated[str, AfterValidator(_by_name(find_dialect))]


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

    rule: RuleField = make_field(keys.RULE)
    rules: dict[str, RuleField] = Field(
        default={},
        description="other rules of some K and V, by patterns like those of `ignore` for "
        "`model.layers.3.self_attn.k` and `.v`; the first pattern that matches counts",
    )
    fallback: Fallback | None = make_field(keys.FALLBACK)
    fp8_dtype: Literal["e4m3fn", "e4m3fnuz"] = make_field(keys.FP8_DTYPE)

    @property
    def choice(self) -> ScaleRules:
        """The rules alone."""
        return ScaleRules(rule=self.rule, rules=self.rules, fallback=self.fallback)


class Quantize(Frozen):
    """The FP8 checkpoint to write."""

    @model_validator(mode="before")
    @classmethod
    def _drop_rounding(cls, value: Any) -> Any:
        """Accept recipes of 0.2, which say that weights are rounded to nearest."""
        if isinstance(value, dict) and value.get("rounding") == "nearest":
            return {key: item for key, item in value.items() if key != "rounding"}
        return value

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

    def make_settings(self) -> PlanSettings:
        """Find the schemes by their names."""
        from fp8calib.quantization.settings import make_settings  # most recipes quantize nothing

        return make_settings(
            *(self.scheme, self.layer_schemes, self.ignore),
            plain_caches=self.kv_cache_dtype_skip_layers,
        )


class Recipe(Frozen):
    """What to observe, on which data, how to compute scales, and what to write."""

    name: str = Field(description="name recorded in the statistics file")
    description: str = Field(default="", description="one sentence for the reader")
    observe: Observe = Field(default=Observe(), description="which tensors are observed")
    data: Data = Field(default=Data(), description="which data is run")
    scales: ScaleOptions = Field(default=ScaleOptions(), description="how statistics become scales")
    formats: tuple[FormatName, ...] = make_field(keys.FORMATS)
    tp: tuple[Annotated[int, Field(strict=True, ge=1)], ...] = make_field(keys.TP, min_length=1)
    query_scale: QueryScale = make_field(keys.QUERY_SCALE)
    quantize: Quantize | None = Field(
        default=None, description="the FP8 checkpoint to write; null means none"
    )

    @field_validator("observe", "data", "scales", mode="before")
    @classmethod
    def _accept_empty_section(cls, value: Any) -> Any:
        return {} if value is None else value

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


SECTIONS: dict[str, type[Frozen]] = {
    "observe": Observe,
    "data": Data,
    "scales": ScaleOptions,
    "quantize": Quantize,
}
_PLACES = {
    **{key: f"{name}.{key}" for name, kind in SECTIONS.items() for key in kind.model_fields},
    **{key: key for key in Recipe.model_fields},
}
"""Every key, with its section before it."""


# --- reading --------------------------------------------------------------------------------------


def load_recipe(name_or_path: str) -> Recipe:
    """Load a shipped recipe by name, or a YAML file."""
    shipped = keys.recipe_files()
    path = shipped.get(name_or_path, Path(name_or_path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{name_or_path} is no shipped recipe, and cannot be read: {error}",
            hint=f"shipped recipes: {', '.join(sorted(shipped))}",
        ) from error
    return parse_recipe(text, where=name_or_path)


def parse_recipe(text: str, *, where: str) -> Recipe:
    """Parse the YAML of a recipe; the error lists all faults."""
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 -- a SafeLoader
        recipe = Recipe.model_validate(document)
        recipe.model_dump_json()  # fails at half a surrogate pair
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, item['loc'])) or 'recipe'}: {_explain(item)}"
            for item in error.errors()
        )
        hint = "docs/reference.md explains every key"
        raise RecipeError(f"{where}: {'; '.join(faults)}", hint=hint) from error
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or first_line(error)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(f"{where} is not YAML: {place}{problem}") from error
    return recipe


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


def _explain(item: Any) -> str:
    """Explain in plain words a fault that pydantic found in one value."""
    if item["type"] == "extra_forbidden":
        like = get_close_matches(str(item["loc"][-1]), _PLACES, n=1)
        return "unknown key" + "".join(f": did you mean {_PLACES[key]}?" for key in like)
    if item["type"] == "missing":
        return "this key is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be"):
        must_be = message.removeprefix("Input should be").partition(", unable")[0]
        must_be = must_be.replace("a valid tuple", "a list")
        return f"must be{must_be}, not {item['input']!r:.60}"
    return message


# --- options --------------------------------------------------------------------------------------


def apply_request(made: Recipe, asked: object) -> tuple[Recipe, Iterator[ReadRow] | None]:
    """Apply to a recipe what a request gives; None means not given.

    A field overrides the key that its option names. The field `observe` names all kinds of sites
    that are observed: kv, query, inputs, weights.

    Returns:
        The recipe with the specs of the text; and the rows of a text that is given in memory.
    """
    recipe = made.model_dump()
    options = list_options(type(asked))
    for option in options:
        value = getattr(asked, option.name)
        if not option.key or option.key == keys.DATA.key or value is None:
            continue
        *sections, key = option.key.split(".")
        section = reduce(dict.__getitem__, sections, recipe)
        if isinstance(section[key], tuple):
            value = (value,) if isinstance(value, str | int) else tuple(value)
        section[key] = value
    if (kinds := getattr(asked, "observe", None)) is not None:
        known = [name for name in Observe.model_fields if name != "ignore"]
        if not set(kinds) <= set(known):
            raise UsageError(f"observe {kinds!r}: must be a list of {', '.join(known)}")
        recipe["observe"] |= {name: name in kinds for name in known}
    rows = None
    if (data := getattr(asked, "data", None)) is not None:
        specs, rows = split_data(data, text_column=recipe["data"]["text_column"])
        recipe["data"]["sources"] = tuple(specs)
    return validate(Recipe, recipe, options), rows


def validate(kind: type[M], values: Mapping[str, Any], options: Sequence[Option] = ()) -> M:
    """Make a recipe, or a section of one; a fault is told by the option of its key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        names = {each.key or each.name: each.named for each in options}
        explained = []
        for item in error.errors():  # by the option of the key that holds the wrong value
            keys = [each for each in item["loc"] if isinstance(each, str)]
            name = names.get(".".join(keys), f"--{keys[-1].replace('_', '-')}")
            explained.append(f"{name}: {_explain(item)}")
        raise UsageError("; ".join(explained), hint="see --help") from error


def check_query(recipe: Recipe) -> None:
    """Refuse q scales where no format that is written can hold them."""
    is_stored = any(find_dialect(name).has_query for name in recipe.formats)
    if recipe.query_scale is True and recipe.formats and not is_stored:
        able = join_or([name for name in list_format_names() if find_dialect(name).has_query])
        raise UsageError(
            f"--query-scale yes: {', '.join(recipe.formats)} cannot hold q_scale",
            hint=f"add --format {able}, or leave out --query-scale",
        )


def decide_query(recipe: Recipe, stats: RunStats) -> tuple[bool, list[str]]:
    """Decide whether q scales are written; for `auto`, where q needs them in some layer.

    Gives notes too, of what a user should know about it.
    """
    check_query(recipe)
    unfit = stats.list_unfit_queries()
    if recipe.query_scale is True or not unfit or not recipe.formats:
        return recipe.query_scale is True, []
    layers = cut_list([f"{layer} ({amax:.4g})" for layer, amax in unfit.items()], 6)
    why = f"q clips or becomes zero at scale 1.0 (layer and amax: {layers})"
    if recipe.query_scale is False:
        return False, [f"{why}: use --query-scale yes"]
    storing = [name for name in recipe.formats if find_dialect(name).has_query]
    if not storing:
        return False, [f"{why}, and no format that stores q_scale is written: add kv-overlay"]
    return True, [f"{why}: q_scale is written to {', '.join(storing)}"]
