"""Tokenizers and rows as people have them, by a table: the text that the model sees, or the error.

The expected text is written by hand, with the special tokens that the model sees.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fp8calib.commands.model import plan_text
from fp8calib.commands.recipe import Data
from fp8calib.errors import Fp8CalibError
from fp8calib.model.load import load_tokenizer, open_source
from tests import zoo

VOCABULARY = 300
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
TEMPLATES = {
    "chat": "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}",
    "tools": "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}",
    "calls": "{% for c in messages[0].tool_calls %}{{ c.function.arguments.city }}{% endfor %}",
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "thoughts": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "no_system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}",
}
TABLE = yaml.safe_load(Path(__file__).with_name("oddities.yaml").read_text())
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}


def save_tokenizer(
    folder: Path,
    *,
    adds_bos: bool = False,
    bos: str | None = "<s>",
    template: list[str] | None = None,
    more: int = 0,
) -> None:
    """Save a byte-level tokenizer of 260 tokens; `more` are added, some beyond the embedding."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([], trainer)
    if adds_bos:
        single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        backend.post_processor = single
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)
    tokenizer.add_tokens([f"new{index}" for index in range(more)])
    tokenizer.chat_template = None if template is None else "".join(map(spell, template))
    tokenizer.save_pretrained(folder)


def spell(name: str) -> str:
    """Give a template by its name; another text stands for itself."""
    return TEMPLATES.get(name, name)


def make(folder: Path, known: dict[str, Any]) -> None:
    """Make the tokenizer of a row of the table."""
    if "own" in known:
        save_tokenizer(folder, **known["own"])
    for name, text in known.get("put", {}).items():
        (folder / name).write_text(spell(text))
    edits = dict(known.get("edit", {}))
    if "named" in known:
        templates = [{"name": n, "template": f"{n} {spell('chat')}"} for n in known["named"]]
        edits["tokenizer_config.json"] = {"chat_template": templates}
    for name, changes in edits.items():
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        after = {k: spell(x) if isinstance(x, str) else x for k, x in changes.items()}
        path.write_text(json.dumps(before | after))
    if "remove" in known:
        (folder / known["remove"]).unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    zoo.save("llama", folder, vocab_size=VOCABULARY)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """Link the model, without a tokenizer, into a folder of its own."""
    for path in saved.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    return tmp_path


def see(folder: Path, row: Any, suffix: str = ".json", warnings: list[str] | None = None) -> str:
    """Give the text that the model sees, or the error with its hint; collect the warnings."""
    data = folder / f"rows{suffix}"
    data.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    source = open_source(str(folder), revision=None, trust_remote_code=False, needs_weights=True)
    settings = Data(sources=(str(data),), samples=1, seq_len=64, pack=False)
    try:
        plan = plan_text(source, settings, part="calibrate")
    except Fp8CalibError as error:
        return f"{error.message} ({error.hint})"
    assert plan.rows is not None
    if warnings is not None:
        warnings += plan.warnings
    ids = plan.sequences[0].tolist()
    if isinstance(row, dict) and "input_ids" in row:
        return f"token ids {' '.join(map(str, ids))}"
    return str(load_tokenizer(source).decode(ids))


@pytest.mark.parametrize("name", TABLE["tokenizers"])
def test_a_tokenizer(name: str, model: Path) -> None:
    known = TABLE["tokenizers"][name]
    make(model, known)
    seen = see(model, known["row"])
    assert seen == known["sees"] or (" (" in seen and known["sees"] in seen)


@pytest.mark.parametrize("name", TABLE["rows"])
def test_a_row(name: str, model: Path) -> None:
    known = TABLE["rows"][name]
    save_tokenizer(model, template=known.get("template", ["chat"]))
    seen = see(model, known["row"], ".jsonl")
    assert seen == known["sees"] or (" (" in seen and known["sees"] in seen)


@pytest.mark.parametrize(
    ("template", "message", "is_told"),
    [
        ("thoughts", {"content": "<think>x</think>ab"}, True),
        ("chat", {"content": "", "tool_calls": [CALL]}, True),
        ("chat", {"content": "ab"}, False),
    ],
)
def test_what_a_template_leaves_out_is_told(
    model: Path, template: str, message: dict[str, Any], is_told: bool
) -> None:
    save_tokenizer(model, template=[template])
    warnings: list[str] = []
    see(model, {"messages": [{"role": "assistant", **message}]}, warnings=warnings)
    told = [text for text in warnings if text.startswith("the chat template leaves something out")]
    assert bool(told) is is_told
    assert all("of 1 of 1 conversation (first rows.json:1)" in text for text in told)
