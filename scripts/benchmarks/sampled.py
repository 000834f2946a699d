"""Compare estimates of a server's KL divergence with the divergence itself, by emulation.

Started by `scripts/bench --sampled`. The model writes text, once for every seed, as
`verify --server URL --sampled` lets it. It is scored without FP8 and with an FP8 KV cache at scale
1.0. The emulation has whole distributions, so the divergence is known; a server would have given
only the log-probability of every token.
"""

from __future__ import annotations

import torch

from fp8calib.data.sequences import batches, build_plan, replace_sequences
from fp8calib.engines.registry import find_emulated
from fp8calib.fp8.formats import E4M3FN
from fp8calib.jobs.models import open_run_model
from fp8calib.jobs.reporter import CallbackProgress
from fp8calib.model.dtype import DTYPES
from fp8calib.model.load import load_model, load_tokenizer
from fp8calib.model.weight_source import WeightSource
from fp8calib.requests.verify import VerifyRequest
from fp8calib.verification.candidates import build_unscaled
from fp8calib.verification.compare.whole import WholeComparison
from fp8calib.verification.server.estimates import WrittenText, low_variance
from fp8calib.verification.server.written import count_given, write_text
from scripts.benchmarks.options import make_parser

ENGINE = "sglang"
"""It quantizes q and softmax's probabilities as well as K and V."""


def main() -> None:
    """Print a line for every seed."""
    parser = make_parser("--sampled", str(__doc__), samples=40, dtypes=("float32", "bfloat16"))
    parser.add_argument("--seeds", type=int, default=10, help="texts (10)")
    parser.add_argument("--first-seed", type=int, default=0, help="that of the first text (0)")
    parser.add_argument("--data", default="builtin", help="where texts begin (builtin)")
    options = parser.parse_args()
    progress = CallbackProgress(None)
    request = VerifyRequest(options.model, device="cpu", dtype=options.dtype)
    with open_run_model(request, if_quantized="") as found:
        vocab_size = int(found.source.text_config.vocab_size)
        plan = build_plan(
            (options.data,),
            tokenizer=lambda: load_tokenizer(found.source),
            vocab_size=vocab_size,
            samples=options.samples,
            seq_len=options.seq_len,
            part="verify",
        )
        model = load_model(found.source, dtype=DTYPES[options.dtype], device="cpu", device_map=None)
        geometry = found.prepared.geometry
        candidate = build_unscaled("scale-1.0", geometry, E4M3FN, find_emulated(ENGINE)[1])
        comparison = WholeComparison(model, geometry, WeightSource(model, found.checkpoint))
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            text = replace_sequences(plan, write_text(model, plan.sequences, progress, seed=seed))
            compared = comparison.run(
                batches(text, 4), {"x": candidate.emulation}, advance=progress.advance
            )
            written = WrittenText(
                lengths=[len(sequence) for sequence in text.sequences],
                num_given=count_given(text.sequences),
            )
            p, q = compared.reference.logprobs, compared.candidates["x"].logprobs
            full = written.mean(compared.candidates["x"].klds.double())
            print(f"seed {seed}, {text.num_tokens} tokens: KLD {full.value:.6f}", flush=True)
            for name, values in (
                ("q/p - 1 - log q/p", low_variance(p, q)),
                ("log p/q", (p - q).double()),
            ):
                _show(name, values, written, full.value)


def _show(name: str, values: torch.Tensor, written: WrittenText, full: float) -> None:
    found = written.mean(values)
    error = found.se or float("nan")
    away = (found.value - full) / error
    share = found.value / full - 1
    print(f"  {name:18} {found.value:.6f} ± {error:.6f}: {share:+.1%}, {away:+.2f} errors")


if __name__ == "__main__":
    main()
