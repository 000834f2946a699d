"""Every command in the documentation works: it is run with tiny stand-ins, or its parts exist.

The commands of a page run in order in one folder. The models, texts and scales that they name are
there under the same paths, but tiny.
"""

import inspect
import os
import pkgutil
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.main import get_command

from fp8calib.cli.app import app
from fp8calib.commands.options import spread_formats
from fp8calib.engines.registry import ENGINES
from fp8calib.plugins.vllm import engine as vllm_calibration
from scripts.draw_images import write_rows as write_images
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import run, succeed
from tests.docs.pages import DOCS, PAGES, ROOT, Command, list_commands
from tests.kit.minutes import takes_minutes
from tests.kit.multimodal import save_multimodal

MODELS = ("MODEL", "demo/SmolLM2-135M-Instruct", "meta-llama/Llama-3.3-70B-Instruct")
QUICK = ("--samples", "8", "--seq-len", "16", "--dtype", "float32")
IMAGES = ("--samples", "8", "--seq-len", "256", "--dtype", "float32")
GATE_CODES = {0, 8, 9}
"""Of a random model, any verdict is right."""
NOT_RUN = (
    ". .venv/bin/activate",
    "fp8calib vllm ",
    "docker build --file scripts/cpu.Dockerfile --tag fp8calib .",
    "VLLM_SERVER_DEV_MODE=1 vllm serve",
    "docker run --rm --volume $PWD:/models fp8calib check",
    "pip install",
    "uv pip install",
    "python -m pip wheel --no-deps --wheel-dir",
    "python -m scripts.benchmarks.served",
    "python -m scripts.draw_images",
    "python3 -m venv .venv",
    "scripts/",
    "ray job submit",
    "sbatch --array",
    "torchrun --nproc-per-node 4 -m fp8calib",
    "vllm serve",
)
"""How commands begin that need a network, an engine, other processes or minutes."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all models, texts and scales that the pages name, in one folder."""
    folder = tmp_path_factory.mktemp("stand-ins")
    for name in MODELS:
        zoo.save("llama", folder / name)
        save_tokenizer(folder / name)
    model = folder / "MODEL"
    rows = [{"text": " ".join(f"w{i * j % 90}" for j in range(1, 40))} for i in range(60)]
    write_rows(folder / "calib.jsonl", rows)
    write_rows(folder / "held-out.jsonl", rows[::-1])
    (folder / "texts").mkdir()
    write_rows(folder / "texts" / "one.jsonl", rows[:9])
    save_multimodal("llava", folder / "VISION-MODEL")
    for seed, name in enumerate(("held-out", "images")):
        (folder / name).mkdir()
        write_images(folder / name, 9, seed=seed)
    scheme = ("--scheme", "fp8-dynamic")
    succeed("quantize", model, *scheme, "--out", folder / "MODEL-FP8")
    (folder / "ranks").mkdir()
    for rank in range(2):
        name = "transformer.layers.{}.attention.kv_cache_scaling_factor"
        scales = {name.format(i): torch.tensor([0.5 + i + rank]) for i in range(2)}
        save_file(scales, folder / "ranks" / f"rank{rank}.safetensors")
    (folder / "ranks" / "config.json").write_text(
        '{"mapping": {"tp_size": 2}, "quantization": {"kv_cache_quant_algo": "FP8"}}'
    )
    data = ("--data", folder / "calib.jsonl", *QUICK, "--format", "kv-scales")
    succeed("calibrate", model, *data, "--out", folder / "measured")
    stats = ("--stats", folder / "measured" / "stats.safetensors")
    succeed("quantize", model, *scheme, *stats, "--out", folder / "MODEL-FP8-KV")
    (folder / "measured" / "kv_scales.safetensors").rename(folder / "kv_scales.safetensors")
    shutil.rmtree(folder / "measured")
    return folder


@pytest.fixture
def workspace(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a page a folder of its own with the stand-ins."""
    place = tmp_path / "page"
    shutil.copytree(stand_ins, place, copy_function=os.link)
    monkeypatch.chdir(place)
    return place


def is_run(command: Command) -> bool:
    return command.words[0] == "fp8calib" and not _spell(command).startswith(NOT_RUN)


def _spell(command: Command) -> str:
    return " ".join(command.words)


@pytest.mark.parametrize(
    "page",
    [pytest.param(e, marks=takes_minutes if e.name == "plan.md" else ()) for e in PAGES],
    ids=lambda page: page.name,
)
def test_every_command_of_a_page_runs(page: Path, workspace: Path) -> None:
    for command in filter(is_run, list_commands(page)):
        words = list(command.words[1:])
        _make_room(workspace, words)
        outcome = run(*words, *_quicken(words))
        wanted = GATE_CODES if "--gate" in words else {0}
        assert outcome.code in wanted, f"{command}\n{outcome.err}"
        if command.output:
            (workspace / command.output).write_text(outcome.out)


def _make_room(workspace: Path, words: list[str]) -> None:
    """Remove the stand-in for something that the page writes itself."""
    if "--out" in words:
        shutil.rmtree(workspace / words[words.index("--out") + 1], ignore_errors=True)


def _quicken(words: list[str]) -> tuple[str, ...]:
    runs_text = words[0] in {"calibrate", "verify", "kv-types", "gptq"}
    if "VISION-MODEL" in words:
        return IMAGES if runs_text else ()
    return QUICK if runs_text else ()


def test_a_command_that_is_not_run_is_in_the_list() -> None:
    others = [each for page in PAGES for each in list_commands(page) if not is_run(each)]
    assert others
    unknown = [str(each) for each in others if not _spell(each).startswith(NOT_RUN)]
    assert unknown == []


def test_a_command_that_is_not_run_names_what_exists() -> None:
    served = {flag for engine in ENGINES.values() for flag in engine.kv_flag.split()}
    for command in (each for page in PAGES for each in list_commands(page) if not is_run(each)):
        words = list(command.words)
        if words[0] == "sbatch":
            words = shlex.split(words[-1])
        if "fp8calib" in words and "--tag" not in words:
            _parse(words[words.index("fp8calib") + 1 :])
        elif words[0] == "vllm":
            assert {word for word in words if word.startswith("--")} <= served, str(command)
        elif words[0].startswith("scripts/"):
            _check_script(words)


def test_the_worker_of_an_audit_is_the_class_that_errors_name() -> None:
    texts = [(DOCS / "vllm.md").read_text(), inspect.getsource(vllm_calibration)]
    for text in texts:
        (name,) = {*re.findall(r"fp8calib\.plugins[\w.]*Worker", text)}
        assert isinstance(pkgutil.resolve_name(name), type)


def _parse(words: list[str]) -> None:
    """Parse a command line of the program, without running it; an unknown option is an error."""
    group = get_command(app)
    context = group.make_context("fp8calib", spread_formats(words), resilient_parsing=True)
    rest = spread_formats(words)
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, rest)
        context = group.make_context(name, rest, resilient_parsing=hasattr(group, "commands"))


def test_every_option_that_the_text_names_exists() -> None:
    """In inline code; the options of engines are those that the engines' records or rules name."""
    group: Any = get_command(app)
    known = set(_list_options(group))
    known |= {option for parameter in group.params for option in parameter.opts}
    folders = {
        "scripts": "**/*",
        "fp8calib/engines": "**/*.py",
        "fp8calib/plugins": "**/*.py",
        "tests/real_engines": "**/*.py",
    }
    files = [path for folder, names in folders.items() for path in (ROOT / folder).glob(names)]
    texts = [path.read_text() for path in files if path.is_file() and path.suffix != ".pyc"]
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
                is_known = option in known or any(option in text for text in texts)
                assert is_known, f"{page.name}: {option}"


def _list_options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for name in getattr(command, "commands", ()):
        yield from _list_options(command.get_command(None, name))


def _check_script(words: list[str]) -> None:
    script = ROOT / words[0]
    assert os.access(script, os.X_OK), words[0]
    sources = [script, *(ROOT / "scripts" / "benchmarks").glob("**/*.py")]
    sources += (ROOT / "tests" / "real_engines" / "fuzz").glob("*.py")
    text = "".join(path.read_text() for path in sources)
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", text), f"{words[0]} has no {word}"
