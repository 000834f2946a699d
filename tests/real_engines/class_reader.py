"""What the model classes of an engine create, read from their source; nothing is imported.

The constructors are followed from the class that a config names, with what is known of their
arguments: the quantization config, prefixes, and classes. Both branches of an `if` are followed. A
linear whose config is sometimes given is `maybe`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import PurePosixPath

from tests.real_engines.package import Package

LINEARS = ("ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear", "GateLinear")
_EXPERTS = (
    *("FusedMoE", "FusedMoEFactory", "SharedFusedMoE", "get_moe_impl_class", "EPMoE", "DeepEPMoE"),
)
_HEADS = ("ParallelLMHead",)
_EMBEDDINGS = ("VocabParallelEmbedding",)
_ATTENTION = ("RadixAttention",)
_PLAIN = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv2dLayer", "Conv3dLayer", "Embedding")
_LISTS = ("ModuleList", "ModuleDict", "Sequential")
_PREFIXES = ("maybe_prefix", "add_prefix")
_FACTORIES = ("make_layers", "make_pp_layers", "make_layers_non_pp")
_LIST_NODES = (ast.List, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.DictComp)
_OTHER_METHODS = re.compile(r"!= '(modelopt_fp4|gguf|awq|bitsandbytes)'")
"""A test that is true for all methods with FP8 weights."""
_NO_FP8_METHOD = re.compile(r"== '(modelslim|modelopt_fp4|gguf|awq|bitsandbytes)'")
"""A test that is false for all of them."""
_IGNORE = re.compile(r"\bquant_config\.ignore\b")
"""A test of what the list of a config names."""
_DEEPEST = 14


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the engine, or a call of it that some arguments are known of."""

    module: str
    name: str
    given: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """A function that makes a layer: its parameters, and its body."""

    arguments: Sequence[str]
    body: ast.expr | ast.FunctionDef
    scope: Scope


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization config that an argument is."""

    state: str
    """config, none, maybe, or listed: the config unless its list names a part."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prefix."""

    value: str


@dataclass(frozen=True, slots=True)
class Either:
    """One of several values."""

    values: tuple[object, ...]


EXPERTS = object()
"""What `get_moe_impl_class` gives."""
CONFIG, NONE, MAYBE, LISTED = map(Quantization, ("config", "none", "maybe", "listed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLinear:
    """A linear that a class creates."""

    path: str
    """Of the module, by attributes."""
    prefix: str
    """Under which it asks the config."""
    kind: str
    """linear, experts, head, embedding, attention or other."""
    state: str
    owner: str
    """The class that creates it."""
    module: str
    """That of this class."""


@dataclass(slots=True, kw_only=True)
class Scope:
    """What names mean in a method."""

    module: str
    owner: str = ""
    path: str = ""
    names: dict[str, object] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    depth: int = 0
    returned: list[object] = field(default_factory=list)

    def enter(self, module: str) -> Scope:
        """Give what names mean in a function of a module that is called here."""
        return replace(self, module=module, names={}, depth=self.depth + 1, returned=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the package."""

    tree: ast.Module
    classes: Mapping[str, ast.ClassDef]
    functions: Mapping[str, ast.FunctionDef]
    imports: Mapping[str, tuple[str, str]]
    """The module and the name there, by the name here."""


class ClassReader:
    """Reads the classes of a package.

    Args:
        package: the engine's.
        folders: of the package whose classes are followed.
    """

    def __init__(self, package: Package, folders: Sequence[str]) -> None:
        self._package = package
        self._files = {
            ".".join(PurePosixPath(file).with_suffix("").parts).removesuffix(".__init__"): file
            for file in package.files
            if file.endswith(".py") and file.startswith(tuple(folders))
        }
        self.found: list[ReadLinear] = []
        self.open = cache(self._open)

    def _open(self, name: str) -> Module:
        """Parse a module; one that is not followed is empty."""
        file = self._files.get(name)
        is_package = file is not None and file.endswith("/__init__.py")
        tree = ast.parse(self._package.read_file(file)) if file is not None else ast.Module([], [])
        return Module(
            tree=tree,
            classes={each.name: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)},
            functions={each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)},
            imports=dict(
                sorted(
                    _list_imports(name, tree, is_package=is_package), key=_is_for_amd, reverse=True
                )
            ),
        )

    def list_modules(self, folder: str) -> list[str]:
        """List the modules in a folder of the package."""
        return [name for name, file in self._files.items() if file.startswith(folder)]

    def read(self, module: str, name: str) -> list[ReadLinear]:
        """List what a class creates."""
        self.found = []
        if (start := self.resolve(module, name)) is not None:
            with suppress(RecursionError):  # what was found until then counts
                self._create(start, [], {"quant_config": CONFIG}, "", Text(""), 0)
        return list(dict.fromkeys(self.found))

    def resolve(self, module: str, name: str, depth: int = 0) -> Class | None:
        """Find a class by a name in a module."""
        if name in self.open(module).classes:
            return Class(module, name)
        source = self.open(module).imports.get(name)
        if source is None or depth > _DEEPEST:
            found = [each for each in self._constants(module) if each[0] == name]
            return self.resolve(module, found[0][1], depth + 1) if found else None
        return self.resolve(*source, depth + 1)

    def _constants(self, module: str) -> Iterator[tuple[str, str]]:
        """List other names of classes in a module."""
        for node in self.open(module).tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id != node.value.id:
                        yield target.id, node.value.id

    def list_bases(self, start: Class) -> list[Class]:
        """List a class and those that it inherits from, in order."""
        bases = [start]
        for node in self.open(start.module).classes[start.name].bases:
            if isinstance(node, ast.Name | ast.Attribute):
                found = self.resolve(start.module, _name(node))
                if found is not None and found != start:
                    bases += [each for each in self.list_bases(found) if each not in bases]
        return bases

    def find_method(self, owner: Class, name: str) -> tuple[Class, ast.FunctionDef] | None:
        """Find a method in a class or its bases."""
        return self._find_method(self.list_bases(owner), name)

    def _find_method(
        self, owners: Sequence[Class], name: str
    ) -> tuple[Class, ast.FunctionDef] | None:
        for each in owners:
            for node in self.open(each.module).classes[each.name].body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return each, node
        return None

    def list_assigned(self, owner: Class, name: str) -> Iterator[ast.expr]:
        """List what is assigned to a name or attribute anywhere in a class or its bases."""
        for each in self.list_bases(owner):
            for node in ast.walk(self.open(each.module).classes[each.name]):
                if (value := _find_assigned(node, name)) is not None:
                    yield value

    def find_literal(self, owner: Class, value: ast.expr) -> ast.expr:
        """Follow a value to where it is written out, in a class or a module."""
        for _ in range(_DEEPEST):
            if isinstance(value, ast.Attribute):
                found = self._value(value.value, Scope(module=owner.module))
                if not isinstance(found, Class):
                    return value
                owner = found
                value = next(self.list_assigned(found, value.attr), value)
            elif isinstance(value, ast.Name):
                tree = self.open(owner.module).tree
                assigned = (each for each in tree.body if isinstance(each, ast.Assign))
                named = (each.value for each in assigned if _name(each.targets[0]) == value.id)
                value = next(named, ast.Constant(None))
            else:
                return value
        return value

    def _create(
        self,
        made: Class,
        positional: Sequence[object],
        named: Mapping[str, object],
        path: str,
        prefix: object,
        depth: int,
    ) -> None:
        """Follow the constructor of a class that becomes a module at a path."""
        found = self.find_method(made, "__init__")
        if found is None or depth > _DEEPEST:
            return
        owner, method = found
        scope = Scope(module=owner.module, owner=made.name, path=path, depth=depth)
        scope.attributes |= {"self": made, "": owner}
        names = self._bind(method, positional, {**made.given, **named}, scope)
        names.setdefault("prefix", prefix)
        scope.names |= names
        self._run(method.body, scope)

    def _bind(
        self,
        method: ast.FunctionDef,
        positional: Sequence[object],
        named: Mapping[str, object],
        scope: Scope,
    ) -> dict[str, object]:
        arguments = method.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        bound: dict[str, object] = {}
        defaults = arguments.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=False):
            bound[name] = self._value(default, scope)
        for each, default_ in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default_ is not None:
                bound[each.arg] = self._value(default_, scope)
        bound |= dict(zip(names, positional, strict=False))
        known = {*names, *(each.arg for each in arguments.kwonlyargs)}
        bound |= {name: value for name, value in named.items() if name in known}
        if arguments.kwarg is not None:
            bound |= {f"**{name}": value for name, value in named.items() if name not in known}
        for name, value in bound.items():
            if name == "quant_config" and value is None:
                bound[name] = NONE
        return bound

    def _run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Follow statements."""
        for node in body:
            if isinstance(node, ast.Assign):
                self._assign(node.targets, node.value, scope)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign([node.target], node.value, scope)
            elif isinstance(node, ast.If):
                self._branch(node, scope)
            elif isinstance(node, ast.For | ast.While | ast.With):
                if isinstance(node, ast.For):
                    _name_numbers(node.target, scope)
                self._run(node.body, scope)
            elif isinstance(node, ast.Try):
                for part in (node.body, node.orelse, node.finalbody):
                    self._run(part, scope)
            elif isinstance(node, ast.Expr):
                self._value(node.value, scope)
            elif isinstance(node, ast.Return) and node.value is not None:
                scope.returned.append(self._value(node.value, scope))
            elif isinstance(node, ast.FunctionDef):
                arguments = [each.arg for each in node.args.args]
                scope.names[node.name] = Layers(arguments, node, scope)

    def _branch(self, node: ast.If, scope: Scope) -> None:
        """Follow both branches; a name that they give two values has either."""
        before, own = dict(scope.names), dict(scope.attributes)
        self._run(node.body, scope)
        first, first_own = scope.names, scope.attributes
        scope.names, scope.attributes = dict(before), own
        self._run(node.orelse, scope)
        scope.names = _join(first, scope.names)
        scope.attributes = _join(first_own, scope.attributes)
        if _IGNORE.search(ast.unparse(node.test)):
            for name, value in scope.names.items():
                if before.get(name) in (CONFIG, LISTED) and value == MAYBE:
                    scope.names[name] = LISTED

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, scope: Scope) -> None:
        target = targets[0]
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=False):
                self._assign([each], part, scope)
            return
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        owned = [each for each in names if _is_own(each)]
        layers = [each for each in owned if "layer" in _name(each) and "_layer" not in _name(each)]
        attribute = _name((layers or owned)[0]) if owned else ""
        found = self._value(value, scope, attribute)
        for each in targets:
            if isinstance(each, ast.Name):
                scope.names[each.id] = found
            elif _is_own(each):
                scope.attributes[_name(each)] = found

    def _value(  # noqa: PLR0911, PLR0912 -- a case for each kind of expression
        self, node: ast.expr, scope: Scope, attribute: str = ""
    ) -> object:
        """Follow an expression; what it creates becomes an attribute of the module."""
        if isinstance(node, ast.Constant):
            return Text(node.value) if isinstance(node.value, str) else node.value
        if isinstance(node, ast.Name):
            if node.id in scope.names:
                return scope.names[node.id]
            return self._constant(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.IfExp) and _OTHER_METHODS.search(ast.unparse(node.test)):
            return self._value(node.body, scope, attribute)
        if isinstance(node, ast.IfExp) and _NO_FP8_METHOD.search(ast.unparse(node.test)):
            return self._value(node.orelse, scope, attribute)
        if isinstance(node, ast.IfExp):
            parts = [self._value(each, scope, attribute) for each in (node.body, node.orelse)]
            return _either(*parts)
        if isinstance(node, ast.BoolOp):
            values = [self._value(each, scope, attribute) for each in node.values]
            if isinstance(node.op, ast.Or) and values[-1] == CONFIG:
                return CONFIG if set(values) <= {None, NONE, CONFIG} else MAYBE
            return _either(*values)
        if isinstance(node, ast.JoinedStr):
            return Text("".join(self._spell(each, scope) for each in node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [self._value(each, scope) for each in (node.left, node.right)]
            if all(isinstance(each, Text) for each in parts):
                return Text("".join(each.value for each in parts if isinstance(each, Text)))
            return None
        if isinstance(node, ast.Lambda):
            return Layers([each.arg for each in node.args.args], node.body, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope, attribute)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            _name_numbers(node.generators[0].target, scope)
            made = node.value if isinstance(node, ast.DictComp) else node.elt
            return self._value(made, scope, f"{attribute}.*")
        if isinstance(node, ast.List | ast.Tuple):
            for number, each in enumerate(node.elts):
                self._value(each, scope, f"{attribute}.{number}" if attribute else "")
            return None
        if isinstance(node, ast.Dict):
            values = [self._value(each, scope, f"{attribute}.*") for each in node.values]
            return _either(*values) if values else None
        if isinstance(node, ast.Subscript):
            return self._value(node.value, scope)
        return None

    def _constant(self, name: str, scope: Scope) -> object:
        """Follow a class or a table of classes by its name in the module."""
        if (found := self.resolve(scope.module, name)) is not None:
            return found
        for item in self.open(scope.module).tree.body:
            if isinstance(value := _find_assigned(item, name), ast.Dict):
                return self._value(value, scope)
        return None

    def _attribute(self, node: ast.Attribute, scope: Scope) -> object:
        if _is_own(node):
            if node.attr in scope.attributes:
                return scope.attributes[node.attr]
            owner = scope.attributes.get("self")
            if isinstance(owner, Class):
                for value in self.list_assigned(owner, node.attr):
                    if isinstance(value, ast.Name):
                        return self._constant(value.id, replace(scope, module=owner.module))
                    if isinstance(value, ast.Attribute) and not _is_own(value):
                        return self._attribute(value, scope)
        if isinstance(node.value, ast.Name):
            source = self.open(scope.module).imports.get(node.value.id)
            if source is not None and (module := ".".join(source)) in self._files:
                return self.resolve(module, node.attr)
        return CONFIG if node.attr == "quant_config" else None

    def _spell(self, node: ast.expr, scope: Scope) -> str:
        value = self._value(node.value if isinstance(node, ast.FormattedValue) else node, scope)
        return value.value if isinstance(value, Text) else "*"

    def _call(  # noqa: PLR0911, PLR0912 -- a case for each kind of call
        self, node: ast.Call, scope: Scope, attribute: str
    ) -> object:
        name = _name(node.func)
        if isinstance(node.func, ast.Call):
            name = _name(node.func.func)
            if name == "super":
                name = ""
        named = {each.arg: each.value for each in node.keywords if each.arg is not None}
        if name in _PREFIXES:
            return self._add_prefix(node, scope)
        if name in ("cast", "getattr", "str") and node.args:
            return self._value(node.args[-1] if name == "cast" else node.args[0], scope, attribute)
        if name in _FACTORIES:
            return self._make_layers(node, named, scope, attribute)
        if name in _LISTS:
            for number, each in enumerate(node.args):
                is_list = isinstance(each, _LIST_NODES)
                end = "" if is_list else f".{number}"
                self._value(each, scope, f"{attribute}{end}")
            return None
        if name == "append" and isinstance(node.func, ast.Attribute) and _is_own(node.func.value):
            for each in node.args:
                self._value(each, scope, f"{_name(node.func.value)}.*")
            return None
        if name == "replace" and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            texts = [self._spell(each, scope) for each in (node.func.value, *node.args[:2])]
            return Text(texts[0].replace(texts[1], texts[2]))
        if name == "partial" and node.args:
            made = self._value(node.args[0], scope)
            given = {key: self._value(each, scope) for key, each in named.items()}
            return Class(made.module, made.name, given) if isinstance(made, Class) else None
        if name == "Parameter" and attribute == "weight":
            self._add("other", NONE, scope.path, scope.path, scope)
            return None
        kind = _find_kind(name)
        bound = scope.names.get(name) if isinstance(node.func, ast.Name) else None
        if kind == "experts" and not attribute:
            return EXPERTS
        if bound is EXPERTS:
            kind = "experts"
        made = self.resolve(scope.module, name) if not kind and bound is None else None
        if made is not None and self._is_linear(made):
            kind = "linear"
        if kind:
            self._note(kind, node, named, scope, attribute)
            return None
        return self._call_known(node, named, scope, attribute)

    def _is_linear(self, made: Class) -> bool:
        """Tell whether a class is a linear of the engine with more to it."""
        for each in self.list_bases(made):
            bases = self.open(each.module).classes[each.name].bases
            if any(_find_kind(_name(base)) == "linear" for base in bases):
                return True
        return False

    def _call_known(
        self, node: ast.Call, named: Mapping[str, ast.expr], scope: Scope, attribute: str
    ) -> object:
        """Follow a call of a method, a function or a class of the engine."""
        positional = [self._value(each, scope) for each in node.args]
        given = {name: self._value(each, scope) for name, each in named.items()}
        for each in node.keywords:
            if each.arg is None:  # **kwargs
                given |= {
                    name.removeprefix("**"): value
                    for name, value in scope.names.items()
                    if name.startswith("**")
                }
        function = node.func
        owner = scope.attributes.get("self")
        if isinstance(function, ast.Attribute) and isinstance(owner, Class):
            inner = function.value
            if isinstance(inner, ast.Call) and _name(inner.func) == "super":
                return self._call_super(function.attr, positional, given, scope)
            if _is_own(function):
                found = self.find_method(owner, function.attr)
                if found is not None:
                    return self._enter(found, positional, given, scope, attribute)
        made = self._value(function, scope)
        for each in made.values if isinstance(made, Either) else (made,):
            if isinstance(each, Layers):
                names = dict(zip(each.arguments, positional, strict=False)) | given
                self._make(each, names, scope, attribute)
            elif isinstance(each, Class):
                path = ".".join(filter(None, (scope.path, attribute)))
                for one in _choose_prefixes(given) if attribute else ():
                    self._create(each, positional, one, path, None, scope.depth + 1)
        if isinstance(function, ast.Name) and made is None:
            target = self._find_function(scope.module, function.id)
            if target is not None and scope.depth < _DEEPEST:
                module, method = target
                inner = scope.enter(module)
                inner.names |= self._bind(method, positional, given, inner)
                return self._return(method, inner, attribute)
        return made if isinstance(made, Class) and not attribute else None

    def _find_function(self, module: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        for _ in range(_DEEPEST):
            if name in self.open(module).functions:
                return module, self.open(module).functions[name]
            source = self.open(module).imports.get(name)
            if source is None:
                return None
            module, name = source
        return None

    def _call_super(
        self, method: str, positional: Sequence[object], given: Mapping[str, object], scope: Scope
    ) -> object:
        here, owner = scope.attributes.get(""), scope.attributes["self"]
        assert isinstance(owner, Class)
        order = self.list_bases(owner)
        after = order[order.index(here) + 1 :] if here in order else order[1:]
        found = self._find_method(after, method)
        return None if found is None else self._enter(found, positional, given, scope, "")

    def _enter(
        self,
        found: tuple[Class, ast.FunctionDef],
        positional: Sequence[object],
        given: Mapping[str, object],
        scope: Scope,
        attribute: str,
    ) -> object:
        """Follow another method of the same object."""
        owner, method = found
        if scope.depth > _DEEPEST:
            return None
        inner = scope.enter(owner.module)
        here = scope.attributes.get("")
        scope.attributes[""] = owner
        inner.names |= self._bind(method, positional, given, inner)
        value = self._return(method, inner, attribute)
        scope.attributes |= inner.attributes
        scope.attributes[""] = here
        return value

    def _return(self, method: ast.FunctionDef, scope: Scope, attribute: str) -> object:
        """Follow a method that makes what becomes an attribute."""
        self._run(method.body, scope)
        for node in ast.walk(method) if attribute else ():
            if isinstance(node, ast.Return) and node.value is not None:
                scope.returned.append(self._value(node.value, scope, attribute))
        returned = scope.returned
        is_quantization = any(isinstance(each, Quantization) for each in returned)
        if is_quantization:
            returned = [NONE if each is None else each for each in returned]
        return _either(*returned) if returned else None

    def _make_layers(
        self, node: ast.Call, named: Mapping[str, ast.expr], scope: Scope, attribute: str
    ) -> None:
        made = named.get("layer_fn") or (node.args[1] if len(node.args) > 1 else None)
        prefix = named.get("prefix") or (node.args[2] if len(node.args) > 2 else None)
        text = self._spell(prefix, scope) if prefix is not None else "layers"
        function = self._value(made, scope) if made is not None else None
        values = function.values if isinstance(function, Either) else (function,)
        for each in values:
            if isinstance(each, Layers):
                names: dict[str, object] = dict.fromkeys(each.arguments, Text("*"))
                names["prefix"] = Text(f"{text}.*")
                if "prefix" not in each.arguments and len(each.arguments) == 1:
                    names[each.arguments[0]] = Text(f"{text}.*")
                self._make(each, names, scope, f"{attribute}.*")

    def _make(
        self, made: Layers, names: Mapping[str, object], scope: Scope, attribute: str
    ) -> None:
        inner = replace(made.scope, path=scope.path, depth=scope.depth, returned=[])
        inner.names = {**made.scope.names, **names}
        if isinstance(made.body, ast.FunctionDef):
            self._return(made.body, inner, attribute)
        else:
            self._value(made.body, inner, attribute)

    def _add_prefix(self, node: ast.Call, scope: Scope) -> Text:
        first, second = (self._spell(each, scope) for each in node.args[:2])
        name, prefix = (second, first) if _name(node.func) == "maybe_prefix" else (first, second)
        return Text(f"{prefix}.{name}" if prefix else name)

    def _note(
        self,
        kind: str,
        node: ast.Call,
        named: Mapping[str, ast.expr],
        scope: Scope,
        attribute: str,
    ) -> None:
        """Note a linear."""
        if not attribute:
            return
        state = NONE
        positional = [self._value(each, scope) for each in node.args]
        given = named.get("quant_config")
        value = self._value(given, scope) if given is not None else None
        for each in positional if given is None else (value,):
            if isinstance(each, Quantization):
                state = each
        if given is not None and value is not None and not isinstance(value, Quantization):
            state = MAYBE
        path = ".".join(filter(None, (scope.path, attribute)))
        prefix = self._spell(named["prefix"], scope) if "prefix" in named else path
        self._add(kind, state, path, prefix, scope)

    def _add(self, kind: str, state: Quantization, path: str, prefix: str, scope: Scope) -> None:
        place = {"path": path, "prefix": prefix, "owner": scope.owner, "module": scope.module}
        self.found.append(ReadLinear(kind=kind, state=state.state, **place))


def _find_kind(name: str) -> str:
    kinds = {_HEADS: "head", _EMBEDDINGS: "embedding", _EXPERTS: "experts", _PLAIN: "other"}
    kinds[_ATTENTION] = "attention"
    known = next((kind for names, kind in kinds.items() if name in names), "")
    return known or ("linear" if name in LINEARS or name.endswith("ParallelLinear") else "")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _find_assigned(node: ast.AST, name: str) -> ast.expr | None:
    """Give what a statement assigns to a name or attribute."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return node.value if any(_name(each) == name for each in targets) else None


def _name_numbers(targets: ast.expr, scope: Scope) -> None:
    """Let the names of a loop stand for any number."""
    names = (each.id for each in ast.walk(targets) if isinstance(each, ast.Name))
    scope.names |= dict.fromkeys(names, Text("*"))


def _is_own(node: ast.expr) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id == "self"  # type: ignore[union-attr]


def _choose_prefixes(given: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Give arguments once for each prefix that they may have."""
    prefix = given.get("prefix")
    for each in prefix.values if isinstance(prefix, Either) else (prefix,):
        yield {**given, "prefix": each} if "prefix" in given else given


def _either(*values: object) -> object:
    known = [each for each in dict.fromkeys(values) if each is not None]
    states = {each for each in known if isinstance(each, Quantization)}
    if states:
        return CONFIG if states == {CONFIG} and None not in values else MAYBE
    if not known:
        return None
    return known[0] if len(known) == 1 else Either(tuple(known))


def _join(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """Join what names mean after two branches."""
    joined = dict(one)
    for name in one.keys() | other.keys():
        first, second = one.get(name), other.get(name)
        if first is second or name in ("", "self"):
            joined[name] = first if first is not None else second
        elif isinstance(first, Quantization) or isinstance(second, Quantization):
            is_new = name not in one or name not in other
            joined[name] = (first or second) if is_new else (first if first == second else MAYBE)
        else:
            joined[name] = _either(first, second)
    return joined


def _list_imports(
    module: str, tree: ast.Module, *, is_package: bool
) -> Iterator[tuple[str, tuple[str, str]]]:
    """List the names that a module imports from others, with their source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = [*module.split("."), *([""] if is_package else [])]
                source = ".".join([*parts[: -node.level], *source.split(".")]).rstrip(".")
            for each in node.names:
                yield each.asname or each.name, (source, each.name)


def _is_for_amd(found: tuple[str, tuple[str, str]]) -> bool:
    """Tell whether a name is imported from what AMD GPUs run, instead of another of its name."""
    return "amd" in found[1][0].split(".")
