"""The site's reference of the Python package, from the signatures and docstrings that it has.

`mkdocs_hooks.py` adds it to the site. The functions are made of requests when they are first used,
so it looks at them rather than at their source.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import fp8calib

HEAD = """# Python reference

`help(fp8calib.calibrate)` prints the same. [Python API](python-api.md) has examples. Results have
the keys of their [schemas](reference.md#json).
"""


def make_page() -> str:
    """Make the page: functions, then classes, each in alphabetical order."""
    public = {name: getattr(fp8calib, name) for name in sorted(fp8calib.__all__)}
    lines = [HEAD]
    for name, item in sorted(public.items(), key=lambda pair: inspect.isclass(pair[1])):
        is_class = inspect.isclass(item)
        lines += [f"## {name}", "", *([] if is_class else _show_signature(name, item))]
        lines += [_show_text(inspect.getdoc(item) or ""), ""]
        lines += _list_members(item) if is_class else []
    return "\n".join(lines) + "\n"


def _show_signature(name: str, function: Callable[..., object]) -> Iterator[str]:
    """Show a parameter a line."""
    signature = inspect.signature(function)
    yield from ("```python", f"{name}(")
    is_named = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            is_named = True
            yield "    *,"
        # An annotation is text already; `str(parameter)` would quote it.
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"    {parameter.name}: {parameter.annotation}{default},"
    result = signature.return_annotation
    spelled = result if isinstance(result, str) else inspect.formatannotation(result)
    yield from (f") -> {re.sub(r'[a-z0-9_]+[.]', '', spelled)}", "```", "")


def _show_text(text: str) -> str:
    """Make lists of the sections of a docstring."""
    text = re.sub(r"^(Args|Attributes|Raises|Returns):$", r"**\1**\n", text, flags=re.M)
    text = re.sub(r"^    (\w+): ", r"* `\1`: ", text, flags=re.M)
    return re.sub(r"^ +", "", text, flags=re.M).replace("<", "&lt;")


def _list_members(kind: type) -> Iterator[str]:
    """List the methods and properties of a class that have docstrings."""
    for name, member in sorted(vars(kind).items()):
        is_method = inspect.isfunction(member)
        text = inspect.getdoc(member)
        if not name.startswith("_") and text and (is_method or isinstance(member, property)):
            yield from ([f"### {kind.__name__}.{name}", ""])
            yield from _show_signature(name, member) if is_method else ()
            yield from (_show_text(text), "")
