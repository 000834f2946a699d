"""Plug-ins are found by entry points, or in the tree's own folder, and one that fails is named."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fp8calib import plugin
from fp8calib.commands import spell_commands
from fp8calib.plugin import find_plugins
from tests.cli.program import run
from tests.formats.foreign import FOLDER

ROOT = Path(__file__).parents[1]
OWN = sorted(path.parent.name for path in (ROOT / "fp8calib" / "plugins").glob("*/__init__.py"))


@pytest.fixture(autouse=True)
def _find_again() -> Any:
    find_plugins.cache_clear()
    yield
    find_plugins.cache_clear()


def test_our_own_plug_ins_are_declared_like_anybodys() -> None:
    assert sorted(find_plugins()[0]) == OWN
    assert find_plugins()[1] == ()


def test_what_cannot_be_used_is_named_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    own = list(plugin._list_entry_points())
    missing = EntryPoint("lost", "no_such_module:PLUGIN", plugin.GROUP)
    other = EntryPoint("other", "json:dumps", plugin.GROUP)
    monkeypatch.setattr(plugin, "_list_entry_points", lambda: iter([*own, missing, other]))
    shown = run("--help")
    assert shown.code == 0
    text = " ".join(shown.out.split())
    assert "lost (no_such_module:PLUGIN): ModuleNotFoundError: No module named" in text
    assert "other (json:dumps): not a Plugin" in text
    assert sorted(find_plugins()[0]) == OWN


def test_what_a_plug_in_breaks_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Missing modules, names that are taken, a module that exits, and one that fails to load."""
    made = {
        "absent": "PLUGIN = Plugin(commands={'calibrate': 'absent_too'})",
        "later": "PLUGIN = Plugin(formats=('later_format:FORMAT',), engines=('json:ENGINE',))",
        "leaves": "raise SystemExit(3)",
        "gptq_of_others": "PLUGIN = Plugin()",
        "same": "PLUGIN = Plugin(commands={'check': 'same_check'})",
    }
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(f"from fp8calib.plugin import Plugin\n{text}\n")
    (tmp_path / "later_format.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "same_check").mkdir()
    for name in ("__init__", "request"):
        (tmp_path / "same_check" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    own = list(plugin._list_entry_points())
    points = [EntryPoint(name, f"{name}:PLUGIN", plugin.GROUP) for name in made]
    points[3] = EntryPoint("gptq", "gptq_of_others:PLUGIN", plugin.GROUP)
    monkeypatch.setattr(plugin, "_list_entry_points", lambda: iter([*own, *points]))
    shown = run("--help")
    assert shown.code == 0
    text = " ".join(shown.out.split())
    assert "absent (absent:PLUGIN): there is no module absent_too" in text
    assert "leaves (leaves:PLUGIN): SystemExit: 3" in text
    assert "gptq (gptq_of_others:PLUGIN): another plug-in has this name" in text
    assert "rounded by GPTQ" in text
    assert spell_commands()["check"] == "check"
    for kind in ("formats", "engines"):
        with pytest.warns(UserWarning, match="cannot be used: (RuntimeError: no|AttributeError)"):
            assert list(plugin.load_all(kind))  # type: ignore[arg-type]


def run_python(code: str, folder: Path, **environment: str) -> str:
    """Run code with the tree in `folder` alone, without the metadata of an installed package."""
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *libraries]), **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


HIDE = """
import importlib.metadata as m
real = m.distribution
def distribution(name):
    if name == "fp8calib":
        raise m.PackageNotFoundError(name)
    return real(name)
m.distribution = distribution
points = m.entry_points
m.entry_points = lambda **by: () if by.get("group") == "fp8calib.plugins" else points(**by)
"""


def test_without_metadata_the_folders_are_listed() -> None:
    code = "from fp8calib.plugin import find_plugins\nprint(*sorted(find_plugins()[0]))"
    assert run_python(f"{HIDE}\n{code}", ROOT).split() == OWN


def test_a_copy_without_plug_ins_works(tmp_path: Path) -> None:
    for name in ("fp8calib", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.rmtree(tmp_path / "fp8calib" / "plugins")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    model, out = str(FOLDER / "llama"), str(tmp_path / "fp8")
    commands = [["--help"], ["quantize", model, "--scheme", "fp8-dynamic", "--out", out]]
    code = (
        f"{HIDE}\nfrom fp8calib.cli import main\nfor command in {commands}:\n"
        "    try:\n        main(command)\n"
        "    except SystemExit as left:\n        assert not left.code, command\n"
        "from fp8calib.engines.registry import ENGINES\nprint('engines:', *ENGINES)"
    )
    shown, _, engines = run_python(code, tmp_path).rpartition("engines:")
    assert "calibrate" in shown
    assert "cannot be used" not in shown
    assert {"vllm", "sglang"} <= {*engines.split()}
    assert "lightllm" not in engines
    assert (tmp_path / "fp8" / "config.json").exists()


def test_a_plug_in_brings_commands_of_one_and_of_two_words(tmp_path: Path) -> None:
    package = tmp_path / "made_up"
    for folder in (package, package / "say"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "from fp8calib.plugin import Plugin\n"
        "PLUGIN = Plugin(commands={'hello': 'made_up.say', 'greet all': 'made_up.say',"
        " 'wave': 'waving'})\n"
    )
    request = (
        "from fp8calib.commands.request import option, request_class\n"
        "@request_class\nclass SayRequest:\n"
        '    """Say a word."""\n\n'
        "    word: str = option('--word W', 'Say it.', default='hi')\n"
    )
    command = (
        "from fp8calib.commands.result import Result\n"
        "class Said(Result):\n    word: str\n"
        "    def __str__(self): return f'said {self.word}'\n"
        "def run(request, reporter):\n    return Said(word=request.word)\n"
    )
    (package / "say" / "request.py").write_text(request)
    (package / "say" / "command.py").write_text(command)
    (tmp_path / "waving.py").write_text(request + command)
    code = (
        "import sys\nfrom importlib.metadata import EntryPoint\nfrom fp8calib import plugin\n"
        "points = [EntryPoint('made-up', 'made_up:PLUGIN', plugin.GROUP)]\n"
        "plugin._list_entry_points = lambda: iter(points)\n"
        "from fp8calib.cli import main\nmain(sys.argv[1:] or {arguments})\n"
    )

    def say(*arguments: str) -> str:
        text = code.replace("{arguments}", repr(list(arguments)))
        return run_python(text, ROOT, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))

    assert say("hello", "--word", "yes") == "said yes\n"
    assert say("greet", "all") == "said hi\n"
    assert say("wave", "--word", "no") == "said no\n"
    assert "Say a word." in say("greet", "--help")
    assert "greet all" in say("--help")
