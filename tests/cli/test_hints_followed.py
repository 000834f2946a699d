"""What texts name exists; a hint that names an option or a command leads to an answer.

`hints_followed.txt` has a block for each: a command, the hint that it prints as its error (>) or
beside an answer (~), and what a reader types then (=; + after another command). `{name}` is a place
of `places.MAKERS`, `{out}` and `{new}` are free. `hints_not_run.txt` has the others, under the
reason why they are not followed.
"""

import ast
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.conftest import QUICK
from tests.cli.places import Places
from tests.cli.program import run, succeed
from tests.cli.test_remote_code import carried
from tests.kit.checkpoints import change_tensors
from tests.kit.hints import COMMANDS, FLAG, MODULES, PACKAGE, list_flags, list_hints, list_texts

JUDGED = (8, 9)
"""The exit codes of a judgement: what is wrong, or cannot be told."""
_SIZE = re.compile(r"(?<=--memory )[\d.]+")
"""That of a process, which no two machines agree on."""

TYPED = re.compile(rf"fp8calib ({'|'.join(map(re.escape, COMMANDS))})\b([^\n`;:]*)")
BASE = {"--help", "--json", "--verbose", "--version", "--install-completion"}
OTHERS = {
    *(
        "--trust_remote_code",
        "--allow-deprecated-quantization",
        "--calculate-kv-scales",
        "--context-length",
    ),
    *("--kv-cache-dtype", "--logprobs-mode", "--max-model-len", "--quantization-param-path"),
    *("--llm_kv_type", "--use_fast_math", "--worker-extension-cls", "--nproc-per-node"),
    *("--upgrade", "--show-completion", "--model-path", "--enforce-eager", "--model_dir"),
    *("--disable-radix-cache", "--max-logprobs", "--tp-size", "--no-enable-prefix-caching"),
}
"""Of engines, compilers, torchrun, pip and typer."""


KNOWN = {command: list_flags(command) | BASE for command in COMMANDS}


class Block(NamedTuple):
    """A block of the table."""

    command: str
    hint: str
    typed: list[str]


def read_blocks() -> Iterator[Block]:
    text = Path(__file__).with_name("hints_followed.txt").read_text()
    for block in text.strip().split("\n\n"):
        command, hint, *typed = block.splitlines()
        yield Block(command, hint, typed)


BLOCKS = list(read_blocks())


def clear(places: Places) -> None:
    """Remove what a command wrote: the next one is another answer to the same hint."""
    for name in ("out", "new"):
        shutil.rmtree(places[name], ignore_errors=True)


def find_values(words: Sequence[str], flag: str) -> list[Sequence[str]]:
    """List the words after each occurrence of an option."""
    return [words[place + 1 : place + 2] for place, word in enumerate(words) if word == flag]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.command)
def test_a_hint_leads_to_an_answer(block: Block, places: Places, request: Any) -> None:
    if "{carried}" in block.command:
        places = places.beside({"carried": request.getfixturevalue(carried.__name__)})
    words = places.fill(block.command).split()
    hint = places.fill(block.hint[2:])
    if block.hint.startswith("> "):
        printed = run(*words, "--json").json["error"]["hint"]
        assert _SIZE.sub("", printed) == _SIZE.sub("", hint)
    else:
        outcome = run(*words)
        assert hint in outcome.out + outcome.err
        clear(places)
    typed: list[list[str]] = []
    for line in block.typed:
        if typed and line.startswith("= "):
            clear(places)
        typed.append(places.fill(line[2:]).split())
        answer = run(*typed[-1])
        assert answer.code in {0, *JUDGED}, f"{line}: {answer.err}"
        assert "error: " not in answer.err or answer.code in JUDGED
    clear(places)
    other = [each for each in typed if each[0] != words[0]]
    for flag in FLAG.findall(hint):
        is_changed = [find_values(each, flag) != find_values(words, flag) for each in typed]
        assert any(is_changed) or any(flag in each for each in other), flag
    for command in re.findall(r"`fp8calib ([a-z-]+)", hint):
        assert any(each[0] == command for each in typed), command


def test_every_hint_is_followed_or_cannot_be() -> None:
    lines = Path(__file__).with_name("hints_not_run.txt").read_text().splitlines()
    known = [line for line in lines if line and not line.startswith("# ")]
    shown = [block.hint[2:] for block in BLOCKS]
    met, open_ones = set(), []
    for path in MODULES:
        folder = str(path.relative_to(PACKAGE))
        for text in list_hints(path):
            listed = [each for each in known if each in text or folder.startswith(each)]
            met |= {*listed}
            parts = re.split(r"{\w*}", text.strip())
            found = re.compile(".*?".join(map(re.escape, parts)))
            if not listed and not any(map(found.search, shown)):
                open_ones.append(f"{folder}: {text}")
    assert open_ones == []
    assert met == {*known}


def test_commands_and_options_that_texts_name_exist() -> None:
    known = set.union(OTHERS, *KNOWN.values())
    for path in MODULES:
        for node, text in list_texts(ast.parse(path.read_text())):
            place = f"{path.relative_to(PACKAGE)}, line {node.lineno}"
            for command, rest in TYPED.findall(text):
                assert {*FLAG.findall(rest)} <= KNOWN[command], f"{place}: {command}{rest}"
            assert {*FLAG.findall(text)} <= known, f"{place}: {text}"


__all__ = ["carried"]
SERVERS = {
    "vllm serve": {"--trust-remote-code", "--kv-cache-dtype-skip-layers", "--revision"},
    "python -m sglang.launch_server": {"--trust-remote-code", "--revision"},
}
PRINTED = re.compile(rf"fp8calib (?:{'|'.join(map(re.escape, COMMANDS))}) [^;`\n]*")
TRUST = "--trust-remote-code"
STRICT = "pass_at: 1.0\nfail_above: 1.0\nkld_fail_above: 1.0e-9\n"


CASES = [
    ("", "calibrate --format kv-scales --shard 1/2 --batch-size 2 --out"),
    ("", "calibrate --recipe w8a8-static --out"),
    ("", "verify --gate strict.yaml"),
    ("", "kv-types --engine sglang"),
    ("", "plan --max-kld 1 --scheme w8a16 --out"),
    ("", "gptq --scheme w8a16 --samples 8 --out"),
    (TRUST, "calibrate --out"),
    (TRUST, "verify --gate strict.yaml --scheme w8a16"),
    (TRUST, "kv-types --engine vllm"),
    (TRUST, "auto --samples 40 --out"),
]
"""Commands, with a model that has code of its own or without. The last option is a new folder."""


@pytest.fixture
def place(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder whose name a shell has to have quoted."""
    folder = tmp_path / "it's a $folder"
    folder.mkdir()
    (folder / "strict.yaml").write_text(STRICT)
    shutil.copy(data, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("trust", "command"), CASES)
def test_what_is_printed_can_be_typed(
    trust: str, command: str, place: Path, model: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(carried.__name__) if trust else model
    shutil.copytree(source, place / "a model")
    name, *options = command.split()
    given = ("--data", place / "calib.jsonl", *QUICK, *filter(None, [trust]), *options)
    out = [place / "an out"] if options[-1:] == ["--out"] else []

    done = run(name, place / "a model", *given, *out)

    assert done.code in {0, 8}, done.err
    printed = list_printed(done.out + done.err)
    assert printed or (trust and "--scheme" in options and "--gate" in options)
    for each in printed:
        run_printed(each, trusts=bool(trust))
    cards = [path for path in place.glob("an out*/**/README.md") if path.parent.name != "a model"]
    for card in cards:
        follow_card(card, place, trusts=bool(trust))


def test_a_wrong_scale_of_a_weight_is_found_as_verify_says(place: Path, model: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    scale = f"{name}_scale"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", place / "wrong fp8")
    wrong = change_tensors(place / "wrong fp8", lambda found: {**found, scale: found[scale] * 64})

    found = run("verify", model, "--data", place / "calib.jsonl", *QUICK, "--scales", wrong)
    calibrate, check = list_printed(found.out)

    given = ("--data", place / "calib.jsonl", *QUICK)
    succeed(*shlex.split(calibrate)[1:], *given)
    assert name in run(*shlex.split(check)[1:]).out


def follow_card(card: Path, place: Path, *, trusts: bool) -> None:
    """Run the commands of a card beside copies of what it names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(tempfile.mkdtemp(dir=place)))
        for named in (place / "a model", place / "calib.jsonl", *place.glob("an out/*.*")):
            Path(named.name).symlink_to(named)
        Path(card.parent.name).symlink_to(card.parent)
        for each in list_printed(card.read_text()):
            is_same = each.endswith(shlex.join(["--out", card.parent.name]))
            run_printed(f"{each}-2" if is_same else each, trusts=trusts)


def list_printed(text: str) -> list[str]:
    """List the commands of fp8calib and of servers in a text, once; not hints with SHARDS."""
    found = [each.strip() for each in PRINTED.findall(text) if "SHARDS" not in each]
    found += [each for server in SERVERS for each in re.findall(rf"{re.escape(server)} .*", text)]
    return list(dict.fromkeys(found))


def run_printed(printed: str, *, trusts: bool) -> None:
    """Run a command of fp8calib as it is printed; look at the words of a server's."""
    words = shlex.split(printed)
    if words[0] == "fp8calib":
        answer = run(*words[1:], "--json")
        assert answer.code in {0, 8, 9}, f"{printed}: {answer.err}"
        assert "error" not in answer.json, f"{printed}: {answer.err}"
        return
    server = next(each for each in SERVERS if printed.startswith(each))
    assert {word for word in words if word.startswith("--")} <= OTHERS | SERVERS[server]
    assert ("--trust-remote-code" in words) is trusts
    (served,) = [word for word in words if Path(word).is_dir()]
    assert Path(served, "config.json").is_file()
