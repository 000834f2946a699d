"""Time a verification and the plain forward pass in one process.

python scripts/bench_verify.py MODEL TOKENS DTYPE DEVICE ROUNDS; prints {name: [seconds]}.

Each verification has three passes: the reference, one candidate, and `scale-1.0`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from bench_pass import Silent, plan_tokens
from bench_timing import load_batches, time_rounds

from fp8calib.calibration import calibrate, prepare
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.numerics import find_profile
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import find_scheme
from fp8calib.model.load import load_model, open_source
from fp8calib.recipe import load_recipe
from fp8calib.scales.compute import compute_kv_scales
from fp8calib.verification.candidates import (
    Candidate,
    Target,
    build_kv_candidate,
    build_scheme,
    build_unscaled,
)
from fp8calib.verification.report import SCALE_ONE
from fp8calib.verification.verify import ReferenceModel, VerificationRequest, verify


def main(folder: str, tokens: Path, dtype: str, device: str, rounds: int) -> None:
    """Time the verification of a KV candidate and of a static W8A8 one."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = open_source(folder, revision=None, trust_remote_code=False, if_quantized="-")
    model = load_model(source, dtype=getattr(torch, dtype), device=device, device_map=None)
    batches = load_batches(tokens, device)

    @torch.no_grad()
    def plain() -> None:
        for ids in batches:
            model(ids)

    with Checkpoint.open(Path(folder)) as checkpoint:
        recipe = load_recipe("w8a8-static")
        ready = prepare(model, checkpoint, recipe)
        plan = plan_tokens(tokens, batches, model)
        stats = calibrate(
            ready, plan, source, checkpoint, recipe=recipe, batch_size=1, progress=Silent()
        )
        profile = find_profile("vllm")
        unscaled = build_unscaled(SCALE_ONE, ready.geometry, E4M3FN, profile)
        candidates = {
            "kv": build_kv_candidate("kv", compute_kv_scales(stats, E4M3FN), profile, "bench"),
            "w8a8": build_scheme(
                "w8a8",
                find_scheme("fp8-static"),
                Target(checkpoint=checkpoint, fingerprint="", geometry=ready.geometry),
                model,
                profile,
                fmt=E4M3FN,
                stats=stats,
            ),
        }
        reference = ReferenceModel(
            name="bench",
            model=model,
            geometry=ready.geometry,
            originals=ready.weights,
            dtype=dtype,
            device=device,
        )

        def verification(candidate: Candidate) -> Callable[[], object]:
            request = VerificationRequest(profile=profile, candidates=(candidate, unscaled))
            return lambda: verify(reference, request, plan, batch_size=1, progress=Silent())

        runs = {name: verification(candidate) for name, candidate in candidates.items()}
        prepared = {name: (lambda run=run: run) for name, run in {"plain": plain, **runs}.items()}
        print(json.dumps(time_rounds(prepared, rounds=rounds, device=device)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
