"""Tokenizers and rows as people have them, by a table: the text that the model sees, or the error.

The expected text is written by hand, with the special tokens that the model sees.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fp8calib.commands.model import plan_text
from fp8calib.commands.text_settings import Data
from fp8calib.errors import Fp8CalibError
from fp8calib.model.load import load_tokenizer, open_source
from tests import zoo

VOCABULARY = 300
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
CHAT = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
CALLS = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.city }}{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
THOUGHTS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SEEN = "<|start|>user:a<|end|><|start|>assistant:b<|end|>"
SYSTEM = "<|start|>system:s<|end|>"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
TOOL = {"type": "function", "function": {"name": "weather"}}
Change = Callable[[Path], object]


def save_tokenizer(
    folder: Path,
    *,
    adds_bos: bool = False,
    bos: str | None = "<s>",
    template: Any = None,
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
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def edit(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | changes))

    return change


def put(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def own(*, then: Change | None = None, **options: Any) -> Change:
    def change(folder: Path) -> None:
        save_tokenizer(folder, **options)
        if then is not None:
            then(folder)

    return change


def named(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": f"{name} {CHAT}"} for name in names]


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PAD = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None}
PAD |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"}
TEXT, ROW = {"text": "ab"}, {"messages": TURNS}
SENTENCE = {"text": "a long sentence"}

TOKENIZERS: dict[str, tuple[Change, Any, str]] = {
    "none": (lambda _: None, TEXT, "holds no tokenizer"),
    "it adds BOS": (own(adds_bos=True), TEXT, "<s>ab"),
    "no BOS": (own(bos=None, template=CHAT), ROW, SEEN),
    "BOS by the tokenizer alone": (own(adds_bos=True, template=CHAT), ROW, f"<s>{SEEN}"),
    "BOS by the template alone": (own(template="<s>" + CHAT), ROW, f"<s>{SEEN}"),
    "BOS by both": (own(adds_bos=True, template="<s>" + CHAT), ROW, f"<s>{SEEN}"),
    "no template": (own(), ROW, "the tokenizer has no chat template"),
    "template in .jinja": (own(then=put("chat_template.jinja", CHAT)), ROW, SEEN),
    "template in .json": (own(then=edit("chat_template.json", chat_template=CHAT)), ROW, SEEN),
    "damaged .json": (own(then=put("chat_template.json", '{"c')), ROW, "cannot be read as JSON"),
    "templates in the config": (
        own(then=edit("tokenizer_config.json", chat_template=named("tool_use", "default"))),
        ROW,
        f"default {SEEN}",
    ),
    "a template for tools alone": (
        own(then=edit("tokenizer_config.json", chat_template=named("tool_use", "rag"))),
        {**ROW, "tools": [{"type": "function", "function": {"name": "f"}}]},
        f"tool_use {SEEN}",
    ),
    "templates without a default": (
        own(then=edit("tokenizer_config.json", chat_template=named("tool_use", "rag"))),
        ROW,
        "the tokenizer's chat template cannot be used: This model has multiple",
    ),
    "template that raises": (
        own(template=NO_SYSTEM + CHAT),
        {"system": "s", "messages": TURNS},
        "rejects the conversation (no system)",
    ),
    "template with a mistake": (own(template="{% if %}"), ROW, "cannot be used: Expected an expr"),
    "template of parts": (own(template=PARTS), ROW, "ab"),
    "template that drops thoughts": (
        own(template=THOUGHTS),
        {"messages": [{"role": "assistant", "content": "<think>x</think>ab"}]},
        "ab",
    ),
    "template that is empty": (own(template=""), ROW, "no sequence of two tokens"),
    "added tokens": (own(more=4), {"text": "new3a"}, "new3a"),
    "tokens beyond the embedding, unused": (own(more=60), TEXT, "ab"),
    "tokens beyond the embedding, used": (own(more=60), {"text": "new59"}, "token 319 (new59)"),
    "special tokens in text": (own(), {"text": "<|start|>a"}, "<|start|>a"),
    "it truncates": (own(then=edit("tokenizer.json", truncation=CUT)), SENTENCE, "a long sentence"),
    "it pads": (own(then=edit("tokenizer.json", padding=PAD)), TEXT, "ab"),
    "short context": (
        own(then=edit("tokenizer_config.json", model_max_length=2)),
        SENTENCE,
        "a long sentence",
    ),
    "code of its own": (
        own(
            then=edit(
                "tokenizer_config.json",
                tokenizer_class="Foo",
                auto_map={"AutoTokenizer": ["x.Foo", None]},
            )
        ),
        TEXT,
        "add --trust-remote-code",
    ),
    "tokenizer.json alone": (own(then=remove("tokenizer_config.json")), TEXT, "ab"),
    "a pointer of Git LFS": (own(then=put("tokenizer.json", LFS)), TEXT, "copy all files"),
    "tekken.json alone": (put("tekken.json", "{}"), TEXT, "pip install mistral-common"),
    "tokenizer.model alone": (
        put("tokenizer.model", "\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"),
        TEXT,
        "pip install sentencepiece",
    ),
    "damaged tekken.json": (put("tekken.json", "{"), TEXT, "cannot be read as JSON"),
}

ROWS: dict[str, tuple[str | None, Any, str]] = {
    "OpenAI's batch": (CHAT, {"custom_id": "1", "body": ROW}, SEEN),
    "preferences": (CHAT, {"chosen": TURNS, "rejected": []}, SEEN),
    "ShareGPT": (
        CHAT,
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "bot", "value": "b"}]},
        SEEN,
    ),
    "ShareGPT's tools": (
        CHAT,
        {
            "conversations": [
                {"from": "function_call", "value": "a"},
                {"from": "observation", "value": "b"},
            ]
        },
        "<|start|>assistant:a<|end|><|start|>tool:b<|end|>",
    ),
    "instructions without a template": (
        None,
        {"instruction": "a", "input": "b", "output": "c"},
        "a\n\nb\n\nc",
    ),
    "another speaker": (CHAT, {"conversations": [{"from": "x", "value": "a"}]}, "an unknown role"),
    "messages as lists": (
        CHAT,
        {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}},
        SEEN,
    ),
    "question and answer": (CHAT, {"question": "a", "answer": "b"}, SEEN),
    "system and question": (
        CHAT,
        {"system_prompt": "s", "question": "a", "response": "b"},
        SYSTEM + SEEN,
    ),
    "system and messages": (CHAT, {"system": "s", **ROW}, SYSTEM + SEEN),
    "tools": (TOOLS + CHAT, {"tools": [TOOL], **ROW}, f"weather;{SEEN}"),
    "arguments as JSON": (
        CALLS,
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        "Ulm",
    ),
    "calls that are no list": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        "tool_calls must be a list",
    ),
    "only text is empty": (CHAT, {"text": "", "messages": TURNS}, SEEN),
    "nothing is said": (CHAT, {"messages": [{"role": "user", "content": None}]}, "found nothing"),
}


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


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer(name: str, model: Path) -> None:
    change, row, expected = TOKENIZERS[name]
    change(model)
    seen = see(model, row)
    assert seen == expected or (" (" in seen and expected in seen)


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str, model: Path) -> None:
    template, row, expected = ROWS[name]
    save_tokenizer(model, template=template)
    seen = see(model, row, ".jsonl")
    assert seen == expected or (" (" in seen and expected in seen)


@pytest.mark.parametrize(
    ("template", "message", "is_told"),
    [
        (THOUGHTS, {"content": "<think>x</think>ab"}, True),
        (CHAT, {"content": "", "tool_calls": [CALL]}, True),
        (CHAT, {"content": "ab"}, False),
    ],
)
def test_what_a_template_leaves_out_is_told(
    model: Path, template: str, message: dict[str, Any], is_told: bool
) -> None:
    save_tokenizer(model, template=template)
    warnings: list[str] = []
    see(model, {"messages": [{"role": "assistant", **message}]}, warnings=warnings)
    told = [text for text in warnings if text.startswith("the chat template leaves something out")]
    assert bool(told) is is_told
    assert all("of 1 of 1 conversation (first rows.json:1)" in text for text in told)
