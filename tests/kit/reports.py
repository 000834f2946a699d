"""Reports of `verify` by hand, whose figures a test changes where they matter."""

from typing import Any

from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    LayerResult,
    PositionResult,
    ReferenceResult,
    Verdict,
    VerifyReport,
)


def make_candidate(name: str, **more: Any) -> CandidateResult:
    values: dict[str, Any] = {
        "name": name,
        "description": "KV cache",
        "ppl": 12.3456,
        "ppl_ratio": 1.0123,
        "ppl_ratio_se": 0.0045,
        "kld_mean": 0.0671,
        "kld_se": 0.0034,
        "kld_median": 0.0213,
        "kld_p99": 0.892,
        "kld_max": 3.45,
        "top1_agreement": 0.9287,
        "top1_ties": 0.025,
        "verdict": Verdict.WARN,
        "verdict_why": "between 1.01 and 1.05",
        "gate": "kv",
        "by_position": (PositionResult(first=1, last=1, tokens=4, kld_mean=0.5, ppl_ratio=1.1),),
    }
    return CandidateResult(**values | more)


def make_layer(candidate: str, layer: int, role: str = "k", **more: Any) -> LayerResult:
    """Make the row of a site that loses nothing."""
    values: dict[str, Any] = {
        "candidate": candidate,
        "site": f"model.layers.{layer}.self_attn.{role}",
        "layer": layer,
        "role": role,
        "sqnr_db": 28.25,
        "clipped": 0.0,
        "flushed": 0.0,
        "amax": 896.0,
        "scale": 2.0,
    }
    return LayerResult(**values | more)


def make_small(**more: Any) -> VerifyReport:
    """Make the least a report holds: two candidates, no layers."""
    values: dict[str, Any] = {
        "model": "the/model",
        "engine": "vllm-cpu",
        "engine_version": "vLLM 9.8.7",
        "dtype": "bfloat16",
        "device": "cpu",
        "data": ("one.jsonl", "two.txt"),
        "tokens": 4095,
        "sequences": 3,
        "seq_len": 1366,
        "duration_s": 61.5,
        "reference": ReferenceResult(ppl=12.1956),
        "candidates": (make_candidate("out/overlay"), make_candidate(SCALE_ONE)),
        "layers": (),
        "decision": Decision(headline="Calibrate this model."),
    }
    return VerifyReport(**values | more)
