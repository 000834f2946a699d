"""What a comparison with a running server found."""

from __future__ import annotations

from pydantic import Field

from fp8calib.commands.verify_run import VerifyResult
from fp8calib.model.geometry import Frozen
from fp8calib.verification.report import PairedResult

SERVER = "server"
"""The name of the server among the candidates."""


class ExplanationResult(Frozen):
    """How well one emulated candidate explains what a server changes, token by token."""

    candidate: str
    correlation: float | None
    """None where one of the two changes nothing."""
    residual_rms: float
    """Root mean square of what is left."""
    energy: float = Field(exclude=True, repr=False)
    """Mean square of its own changes."""


class EstimateResult(Frozen):
    """An estimate of the mean KL divergence."""

    value: float
    se: float | None


class UnquantizedServer(Frozen):
    """The unquantized server beside the unquantized model here: differences that are not FP8."""

    url: str
    kind: str
    change_rms: float | None
    """Root mean square of its changes; None if nothing ran here."""
    ppl_ratio: float | None


class ServerDecodeResult(Frozen):
    """What a server says of tokens that it decodes, less what it says of them as a prompt."""

    tokens: int
    """Those that decoding steps predict."""
    prompt_tokens: int
    difference_rms: float
    difference_mean: float
    noise_rms: float
    """The same from one answer to the next, by half of its variance."""
    answer: str
    """A `PairedAnswer`: `worse` where decoding and prompts do not agree."""
    tokens_to_tell: int | None
    sentence: str


class ServerResult(Frozen):
    """A running server, beside the emulated candidates."""

    url: str
    kind: str
    model: str
    """The name of the model there."""
    finding: str
    explained_by: str
    """The candidate that explains it, or comes closest; empty without any."""
    sentence: str
    change_rms: float
    """Root mean square of its changes to log-probabilities."""
    noise_rms: float
    """The same from one scoring of the server to the next."""
    engine: UnquantizedServer | None
    """`--reference-server`."""
    kld_low_variance: EstimateResult | None = None
    """On text that the unquantized model wrote: the mean of q/p - 1 - log(q/p)."""
    kld_log_ratio: EstimateResult | None = None
    """There: the mean of log(p/q)."""
    kld_top: EstimateResult | None = None
    """There: the lower bound, and an estimate of what it leaves out."""
    kld_at_least: EstimateResult | None = None
    """Lower bound from the most likely tokens that the server names; on any text."""
    top_covered: float | None
    """The unquantized model's probability of these tokens, on average."""
    repeated_requests: int
    """Requests sent again to either server: it was busy or too slow, or the connection broke."""
    decoding: ServerDecodeResult | None = None
    """`--decode`."""
    explanations: tuple[ExplanationResult, ...]
    """The best first."""


class ServedResult(Frozen):
    """A candidate on the tokens after the prompt, which is half of each sequence."""

    candidate: str
    tokens: int
    """Those that decoding steps predict."""
    is_same: bool
    """Whether the engine computes a prompt as it decodes: then both figures are of one pass."""
    prompt_kld: float
    """The mean divergence where the whole text is a prompt."""
    prompt_kld_se: float | None
    decode_kld: float
    """The same where each token after the prompt is decoded."""
    decode_kld_se: float | None
    difference: PairedResult
    """Of the same tokens, decoded and as a prompt."""
    sentence: str


class ServerVerifyResult(VerifyResult):
    """The report of a verification with a server among its candidates."""

    server: ServerResult
    served: tuple[ServedResult, ...] = ()
    """With `--decode`: each candidate with a KV cache."""
