"""Ask on many texts, and of many planted models, whether KV scales are needed.

Started by `scripts/bench --need`. Random texts of the model as it is: how often is the answer no?
Then faults are planted that leave the model's function as it is: K, V or q of a layer, of two, or
of one head, multiplied by a power of two that another weight undoes. Is the answer yes, with these
layers, where the divergence shows it, and `cannot-tell` where it does not?
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch

import fp8calib
from scripts.benchmarks.options import make_parser
from tests.mutations_of_scales import Plant, plant


@dataclass(frozen=True, slots=True)
class Case:
    """Planted faults."""

    plants: tuple[Plant, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.plants)) or "as it is"


def main() -> None:
    """Print a line for every text and every planted model, then the counts."""
    parser = make_parser("--need", str(__doc__), samples=8, dtypes=("bfloat16", "float32"))
    parser.add_argument("--texts", type=int, default=20, help="random texts (20)")
    parser.add_argument("--planted", type=int, default=20, help="planted models (20)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and faults (0)")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 -- slow to import

    warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    tokens = tokenizer("\n".join(topics.topics.values()))["input_ids"]
    generator = random.Random(options.seed)  # noqa: S311

    def draw() -> list[dict[str, Any]]:
        size = options.seq_len
        starts = [generator.randrange(len(tokens) - size) for _ in range(options.samples)]
        return [{"input_ids": tokens[start : start + size]} for start in starts]

    stats = fp8calib.calibrate(model, draw() * 4, seq_len=options.seq_len)
    answers: Counter[str] = Counter()
    for number in range(options.texts):
        scales = (stats,) if number % 2 else ()
        need = fp8calib.verify(model, scales, draw(), seq_len=options.seq_len).kv
        assert need is not None  # noqa: S101
        answers[need.answer] += 1
        print(f"text {number}: {need.answer} {need.layers} {need.why[:160]}", flush=True)
    print(f"texts: {dict(answers)}", flush=True)
    found: Counter[str] = Counter()
    for number in range(options.planted):
        case = draw_case(generator, model, number)
        changed = copy.deepcopy(model)
        with torch.no_grad():
            for each in case.plants:
                plant(changed, each)
        need = fp8calib.verify(changed, (), draw(), seq_len=options.seq_len).kv
        assert need is not None  # noqa: S101
        layers = tuple(sorted({each.layer for each in case.plants}))
        is_right = need.answer == "yes" and need.layers == layers
        found[need.answer if is_right or need.answer != "yes" else "yes, other layers"] += 1
        print(f"{case}: {need.answer} {need.layers} {need.why[:220]}", flush=True)
    print(f"planted: {dict(found)}", flush=True)


def draw_case(generator: random.Random, model: Any, number: int) -> Case:
    """Draw a fault of one layer, of two (every fifth), or of one head (every fourth)."""
    config = model.config
    heads: Sequence[int | None] = [None]
    if number % 4 == 3:
        heads = range(config.num_key_value_heads)
    layers = generator.sample(range(config.num_hidden_layers), 2 if number % 5 == 4 else 1)
    role, head = generator.choice("kvq"), generator.choice(heads)
    exponent = generator.randint(3, 12) * generator.choice((-1, 1))
    return Case(tuple(Plant(layer, role, exponent, head) for layer in layers))


if __name__ == "__main__":
    main()
