"""Every command and option that a message, help or docstring names exists."""

import ast
import re

from tests.kit.hints import COMMANDS, FLAG, MODULES, PACKAGE, list_flags, list_texts

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


def test_commands_and_options_that_texts_name_exist() -> None:
    known = set.union(OTHERS, *KNOWN.values())
    for path in MODULES:
        for node, text in list_texts(ast.parse(path.read_text())):
            place = f"{path.relative_to(PACKAGE)}, line {node.lineno}"
            for command, rest in TYPED.findall(text):
                assert {*FLAG.findall(rest)} <= KNOWN[command], f"{place}: {command}{rest}"
            assert {*FLAG.findall(text)} <= known, f"{place}: {text}"
