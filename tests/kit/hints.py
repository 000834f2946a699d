"""Follow a hint as a patient reader would: read what it says to type, and change the command."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fp8calib.commands import find_request, spell_commands
from fp8calib.commands.request import Option, list_options

PACKAGE = Path(__file__).parents[2] / "fp8calib"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "removed"]
COMMANDS = sorted(spell_commands(), key=len, reverse=True)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w-])")

_QUOTED = r"`[^`]*`|'[^']*'|\"[^\"]*\""
_HINT = re.compile("hint|fix", re.IGNORECASE)
_SAYS = re.compile(r"`fp8calib |\b(use|add|leave out) --")
_APART = re.compile(
    rf"({_QUOTED})|(?:[;:,] (?!then )| )?\bor |[;:,] (?!then )",
)
"""What stays together, or what is between two clauses."""
_ADVICE = re.compile(
    r"`(?P<command>fp8calib [^`]+)`"
    rf"|(?P<flag>{FLAG.pattern})(?: (?P<value>{_QUOTED}|[^\s,;:.][^\s,;:?]*))?"
)
_NO_VALUE = frozenset({"that", "than", "to", "in", "of", "on", "if", "is", "with", "and", "for"})
"""Words after an option that are not its value."""
_BARE = re.compile(r"[a-z0-9][\w.-]*")


# --- what hints there are -------------------------------------------------------------------------


def list_flags(command: str) -> set[str]:
    return {flag for each in _list_options(command) for flag in each.flags}


@cache
def _list_options(command: str) -> list[Option]:
    return list_options(find_request(spell_commands()[command]))


OWN_FLAGS = frozenset().union(*map(list_flags, COMMANDS))


def list_texts(tree: ast.AST) -> Iterator[tuple[ast.Constant | ast.JoinedStr, str]]:
    """List the strings of a module; a place in an f-string reads as {}."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node) if part is not node}
            parts = (str(e.value) if isinstance(e, ast.Constant) else "{}" for e in node.values)
            yield node, "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield node, str(node.value)


def list_hints(path: Path) -> Iterator[str]:
    """List the texts of a module that say to use an option or a command of fp8calib.

    They are named as hints or fixes, or say so in the words that `read_hint` reads.
    """
    tree = ast.parse(path.read_text())
    hints, others = set(), set()
    for node in ast.walk(tree):
        parts = {id(part) for part in ast.walk(node)} if _is_about_texts(node) else set()
        if isinstance(node, ast.keyword | ast.Assign):
            hints |= parts
        else:  # docstrings, and the help of options
            others |= parts
    for node, text in list_texts(tree):
        says = _SAYS.search(text) or (id(node) in hints and " " in text.strip())
        names = {*FLAG.findall(text)} & OWN_FLAGS or "`fp8calib " in text
        if says and names and id(node) not in others:
            yield text


def _is_about_texts(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in {"hint", "fix"}
    if isinstance(node, ast.Assign):
        return _HINT.search(ast.unparse(node.targets[0])) is not None
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name.endswith(("option", "Option"))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# --- what a hint says -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One thing to do: run a command, or set, add or remove an option."""

    action: str
    text: str
    value: str | None = None


def read_hint(hint: str) -> list[list[Step]]:
    """Read the alternatives of a hint, each with its steps in order.

    Clauses apart by `;`, `,`, `:` or `or` are alternatives, but for `, then`. One word after a
    value is another value of its option. `add` repeats an option that is given.
    """
    alternatives: list[list[Step]] = []
    action, is_open = "set", False
    plain = re.sub(r"\([^)]*\)", "", hint)
    for clause in _APART.sub(lambda place: place[1] or "\n", plain).splitlines():
        words = clause.strip()
        verb = re.match(r"(leave out|add|use|run|name)\b", words)
        if verb is not None:
            action = {"leave out": "remove", "add": "add"}.get(verb[1], "set")
        if is_open and _BARE.fullmatch(words) and words not in {"less", "more"}:
            last = alternatives[-1][-1]
            alternatives.append([Step(last.action, last.text, words)])
            continue
        steps = []
        for found in _ADVICE.finditer(words):
            if found["command"]:
                steps.append(Step("run", found["command"]))
            else:
                does = "add" if words[: found.start()].endswith("add ") else action
                value = (found["value"] or "").rstrip("?)")
                given = None if value in _NO_VALUE else value or None
                steps.append(Step(does, found["flag"], given))
        if steps:
            alternatives.append(steps)
        is_open = bool(steps) and steps[-1].value is not None and words.endswith(steps[-1].value)
    return alternatives


def follow(
    refused: Sequence[str], steps: Sequence[Step], fill: Mapping[str, str]
) -> list[list[str]]:
    """Make the commands of an alternative: those that it says to run, and the one that is changed.

    Args:
        refused: the words of the refused command.
        steps: the alternative.
        fill: what a reader puts in: by option, where the hint gives no value; by the words in
            capitals of a command, such as DIR; by `...`, the arguments of a command, else those of
            the refused one.
    """
    words, commands, is_changed = list(refused), [], False
    for step in steps:
        if step.action == "run":
            commands.append(_spell(step.text, refused, fill))
        else:
            words, is_changed = _change(words, step, fill), True
    return [*commands, words] if is_changed else commands


def _spell(text: str, refused: Sequence[str], fill: Mapping[str, str]) -> list[str]:
    """Spell a printed command: `...` and the words in capitals are filled in."""
    typed = shlex.split(text)[1:]
    rest = fill.get("...", shlex.join(_keep_known(find_command(typed), refused)))
    words = []
    for word in typed:
        words += shlex.split(rest if word == "..." else fill.get(word, _fill(word, fill)))
    return words


def _keep_known(command: str, refused: Sequence[str]) -> list[str]:
    """Keep the arguments of the refused command that another one has too."""
    before = find_command(refused)
    words = list(refused[len(before.split()) :])
    for each in _list_options(before):
        if each.flags and not {*each.flags} & list_flags(command):
            words = _remove(words, each.flags, takes_value=_takes_value(each))
    return words


def _takes_value(each: Option) -> bool:
    return bool(each.value) and each.annotation is not bool


def _fill(word: str, fill: Mapping[str, str]) -> str:
    """Fill in a word in capitals, such as DIR in DIR/stats.safetensors; quoted for a shell."""
    return re.sub(r"^(?:[A-Z]{2,}|I/N)(?=$|/|@)", lambda p: fill[p[0]], shlex.quote(word))


def _change(words: list[str], step: Step, fill: Mapping[str, str]) -> list[str]:
    command = find_command(words)
    chosen = next((each for each in _list_options(command) if step.text in each.flags), None)
    assert chosen is not None, f"{command} has no {step.text}"
    takes_value = _takes_value(chosen)
    is_list = "list" in str(chosen.reads or chosen.annotation)
    if step.action == "remove" and step.value and is_list:
        return _remove_value(words, chosen.flags, shlex.split(step.value)[0])
    if step.action != "add" or not is_list:
        words = _remove(words, chosen.flags, takes_value=takes_value)
    if step.action == "remove":
        return words
    if not takes_value:
        return [*words, step.text]
    value = step.value or ""
    if not value or (re.fullmatch(r"[A-Z/]+", value) and step.text in fill):
        return [*words, step.text, *shlex.split(fill[step.text])]
    return [*words, step.text, *shlex.split(_fill(shlex.split(value)[0], fill))]


def _remove(words: Sequence[str], flags: Sequence[str], *, takes_value: bool) -> list[str]:
    kept, skips = [], 0
    for word in words:
        if word in flags:
            skips = 1 + takes_value
        if not skips and word.partition("=")[0] not in flags:
            kept.append(word)
        skips = max(skips - 1, 0)
    return kept


def _remove_value(words: Sequence[str], flags: Sequence[str], value: str) -> list[str]:
    """Remove one of the values of an option that is repeated."""
    place = next(n for n in range(len(words)) if words[n] in flags and words[n + 1] == value)
    return [*words[:place], *words[place + 2 :]]


def find_command(words: Sequence[str]) -> str:
    """Find the name of the command, which may have two words."""
    return next(each for each in COMMANDS if list(words[: len(each.split())]) == each.split())
