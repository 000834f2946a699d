"""Run in the environment of lm-evaluation-harness: `lm_eval_job.py MODEL CANDIDATE OUT.json`.

Scores texts and lets the model continue one, unquantized and under emulation.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8calib

PAIRS = [("w1 w2 w3 w4", " w5 w6"), ("w7 w8", " w9 w1 w2 w3"), ("", "w4 w5 w6"), ("w3", " w1")]
WRITTEN = 6


def ask(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Ask as the harness does: several texts in a batch, padded."""
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, add_bos_token=True)
    scored = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    options = {"until": ["\n"], "max_gen_toks": WRITTEN, "do_sample": False}
    written = [Instance("generate_until", {}, ("w1 w2 w3", options), 0)]
    found = lm.loglikelihood(scored, disable_tqdm=True)
    return {
        "scores": [score for score, _ in found],
        "text": lm.generate_until(written, disable_tqdm=True)[0],
    }


@torch.no_grad()
def ask_by_hand(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Score each text alone, and continue one by steps without a cache."""

    def encode(text: str) -> list[int]:
        return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]

    scores = []
    for context, continuation in PAIRS:
        ids, given = encode(context + continuation), len(encode(context))
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scores.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(given, len(ids))))
    ids = encode("w1 w2 w3")
    start = len(ids)
    for _ in range(WRITTEN):
        following = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if following == model.generation_config.eos_token_id:
            break
        ids.append(following)
    return {"scores": scores, "text": tokenizer.decode(ids[start:], skip_special_tokens=True)}


def main() -> None:
    folder, candidate, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"plain": ask(model, tokenizer)}
    with fp8calib.emulate(model, candidate):
        found["emulated"] = ask(model, tokenizer)
        found["by hand"] = ask_by_hand(model, tokenizer)
    found["after"] = ask(model, tokenizer)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
