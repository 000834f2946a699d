"""Plant attention sinks in the demo model, and ask which rule each K and V needs.

Started by `scripts/bench --sinks`. K of one token is `--factor` times the amax of the others in
three layers, in a channel that q does not look at, as in models with attention sinks. In two other
layers K is 2^11 times as large and q as much smaller, so that scale 1.0 clips. The normal numbers
of E4M3 span a factor of 28,672, so that a factor of 1,000 costs next to nothing. Of a factor of
2^18, which flushes the other tokens to zero, `--rules auto` has to find the three layers, and to
beat every single rule on other text. On the model as it is (`--factor 0`) nothing is to be gained.
"""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import nn

import fp8calib
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import RuleChoiceResult, format_difference
from scripts.benchmarks.options import make_parser
from tests.mutations_of_scales import Plant, plant

SINKS = (6, 14, 22)
"""The layers with a sink."""
LARGE = (2, 26)
"""The layers where all of K is large."""
EXPONENT = 11
SHARE = 0.005
"""A token is taken for the sink that is at most such a share of the text."""


def main() -> None:
    """Print the choice and its judgement for both models."""
    parser = make_parser("--sinks", str(__doc__), samples=32, dtypes=("float32",))
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0**18, 1000.0, 0.0])
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 -- slow to import

    warnings.simplefilter("ignore", fp8calib.Fp8CalibWarning)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    first, second = cut_texts(tokenizer, options)
    found = {}
    token = find_token([token for row in first for token in row["input_ids"]])
    for factor in options.factor:
        name = f"sinks x {factor:,.0f}" if factor else "as it is"
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
        if factor:
            model = add_channels(model)
            plant_sinks(model, token, factor, first[:4])
            plant_outliers(model)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        found[name] = choose(model, first, second, options.seq_len)
        print(f"{name}:\n{describe(found[name])}", flush=True)
    if options.json:
        results = {name: each.model_dump(mode="json") for name, each in found.items()}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def cut_texts(tokenizer: Any, options: Namespace) -> list[list[dict[str, Any]]]:
    """Cut rows of Python's documentation, and of some of its modules."""
    files = sorted(Path(json.__file__).parents[1].glob("[a-d]*.py"))
    code = (path.read_text(errors="ignore") for path in files)
    texts = (tokenizer("\n".join(text))["input_ids"] for text in (topics.topics.values(), code))
    size = options.seq_len
    return [
        [{"input_ids": text[i * size : (i + 1) * size]} for i in range(options.samples)]
        for text in texts
    ]


def find_token(tokens: Sequence[int]) -> int:
    """Find the most frequent token that is at most `SHARE` of the text."""
    counts = Counter(tokens).most_common()
    return next(token for token, count in counts if count <= SHARE * len(tokens))


def choose(
    model: nn.Module, first: Sequence[Any], second: Sequence[Any], seq_len: int
) -> RuleChoiceResult:
    """Calibrate on one text, choose and judge on the other."""
    stats = fp8calib.calibrate(model, first, seq_len=seq_len).stats
    report = fp8calib.verify(
        model, stats, second, seq_len=seq_len, rules=["auto"], engine="reference"
    )
    assert report.rule_choice is not None  # noqa: S101 -- it was asked for
    return report.rule_choice


def describe(choice: RuleChoiceResult) -> str:
    """Show the choice, and each rule beside it on the text that judges."""
    lines = [choice.sentence]
    for one in choice.judged:
        kld = format_mean_kld(one.kld_mean, one.kld_se)
        pair = one.against_best
        beside = "" if pair is None else f"; {pair.answer} ({format_difference(pair)})"
        lines.append(f"  {one.rule}: KLD {kld}{beside}")
    lines.append(f"  {choice.chosen_on_tokens:,} tokens chose, {choice.judged_on_tokens:,} judged")
    return "\n".join(lines)


def add_channels(model: Any) -> Any:
    """Give a llama one more hidden channel a head, zero and unread: the function is the same."""
    from transformers import LlamaForCausalLM  # noqa: PLC0415 -- slow to import

    config = model.config
    narrow = config.hidden_size
    wide = narrow + config.num_attention_heads
    config.hidden_size, config.head_dim = wide, narrow // config.num_attention_heads
    config.rms_norm_eps *= narrow / wide
    wider = LlamaForCausalLM(config).to(model.dtype).eval()
    tensors = model.state_dict()
    with torch.no_grad():
        for name, target in wider.state_dict().items():
            source = tensors[name]
            target.zero_()
            target[tuple(map(slice, source.shape))] = source
            if source.ndim == 1:  # the mean of squares is over more channels
                target.mul_((narrow / wide) ** 0.5)
    return wider


def plant_outliers(model: Any) -> None:
    """Make K of some layers large, and q as much smaller: the function is the same."""
    with torch.no_grad():
        for layer in LARGE:
            plant(model, Plant(layer, "k", EXPONENT))


def plant_sinks(model: Any, token: int, factor: float, rows: Sequence[dict[str, Any]]) -> None:
    """Mark a token in a channel of its own, which K of `SINKS` reads and nothing else."""
    channel = model.config.hidden_size - 1
    half = model.config.head_dim // 2
    layers = [model.model.layers[index] for index in SINKS]
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[token, channel] = weight[token].abs().amax()
        for layer in layers:
            attention = layer.self_attn
            query, key = (
                linear.weight.view(-1, 2, half, model.config.hidden_size)
                for linear in (attention.q_proj, attention.k_proj)
            )
            used = [each.square().sum((0, 1, 3)) for each in (query, key)]
            place = int((used[0] * used[1]).argmin())  # rotary embedding joins it and + half
            query[:, :, place] = 0
            key[:, :, place] = 0
            layer.input_layernorm.weight[channel] = 1.0
            key[:, 0, place, channel] = 1.0
            hook = attention.k_proj.register_forward_hook(lambda *call: outputs.append(call[2]))
            for row in rows:
                model(torch.tensor([row["input_ids"]]))
            hook.remove()
            keys = torch.cat(outputs, 1)[0].view(-1, key.shape[0], 2, half)
            outputs.clear()
            mark = keys[:, :, 0, place].abs().amax()
            key[:, 0, place, channel] *= factor * keys.abs().amax() / mark


if __name__ == "__main__":
    main()
