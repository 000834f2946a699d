"""Small tasks for lm-evaluation-harness, and what a model answers to them computed by hand.

Nothing here computes with a line of the product or of the harness.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

BOS = 1
MULTIPLE_CHOICE = {
    "task": "choose",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ],
}
GENERATION = {
    **{key: MULTIPLE_CHOICE[key] for key in ("dataset_path", "dataset_kwargs", "test_split")},
    "task": "write",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{target}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CONTINUATION = {
    **{key: MULTIPLE_CHOICE[key] for key in ("dataset_path", "dataset_kwargs", "test_split")},
    "task": "continue",
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": " {{choices[0]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
    ],
}
Forward = Callable[[torch.Tensor], torch.Tensor]
"""From tokens [1, S] to logits [1, S, V]."""


def write_task(folder: Path, config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Path:
    """Write a task and, beside it, its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = folder / f"{config['task']}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def draw_rows(count: int, *, seed: int = 5) -> list[dict[str, Any]]:
    """Draw questions of four words with four choices of one to three words each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> list[int]:
        return torch.randint(3, 128, (size,), generator=generator).tolist()

    def write(size: int) -> str:
        return " ".join(f"w{word:0{1 + word % 3}d}" for word in draw(size))

    return [
        {
            "question": write(4),
            "choices": [write(1 + size % 3) for size in draw(4)],
            "answer": draw(1)[0] % 4,
            "target": write(4),
        }
        for _ in range(count)
    ]


def make_tokenizer(*, bos: str | None = "<s>") -> Any:
    """Make a tokenizer of 128 words that puts no BOS before texts by itself."""
    words = {f"w{word:0{1 + word % 3}d}": word for word in range(3, 128)}
    unknown, end = "<unk>", "</s>"
    vocabulary = {unknown: 0, "<s>": BOS, end: 2, **words}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=end, unk_token=unknown
    )


def tokenize(text: str) -> list[int]:
    """Turn words into tokens, behind a BOS."""
    return [BOS, *(int(word[1:]) for word in text.split())]


def forward_plainly(model: PreTrainedModel) -> Forward:
    """Call the model as it is."""
    return lambda tokens: model(tokens).logits


@torch.no_grad()
def score_by_hand(forward: Forward, context: str, continuation: str) -> float:
    """Add up the log-probabilities of the words of `continuation` behind `context`."""
    tokens = tokenize(context)
    start = len(tokens)
    tokens += tokenize(continuation)[1:]
    logits = forward(torch.tensor([tokens]))[0].double()
    total = 0.0
    for place in range(start, len(tokens)):
        row = logits[place - 1]
        total += float(row[tokens[place]] - row.exp().sum().log())
    return total


def choose_by_hand(forward: Forward, rows: Sequence[dict[str, Any]]) -> dict[str, list[bool]]:
    """Answer every row: right or wrong by the sum, and by the sum for each character."""
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row in rows:
        scores = [score_by_hand(forward, row["question"], c) for c in row["choices"]]
        normed = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        right["acc"].append(scores.index(max(scores)) == row["answer"])
        right["acc_norm"].append(normed.index(max(normed)) == row["answer"])
    return right


@torch.no_grad()
def write_by_hand(forward: Forward, question: str, count: int) -> str:
    """Write `count` words greedily, the whole text computed anew for each."""
    tokens = tokenize(question)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(forward(torch.tensor([tokens]))[0, -1].argmax()))
    return make_tokenizer().decode(tokens[start:], skip_special_tokens=True)
