"""Hold the unquantized model of a verification: what it needs in memory, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fp8calib.calibration.memory_plan import MemoryPlan, Workload, find_limits, plan_memory
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.run_model import RunModel
from fp8calib.errors import UsageError
from fp8calib.model.device import DTYPES
from fp8calib.model.geometry import Role
from fp8calib.model.live_model import LiveCheckpoint
from fp8calib.model.prepared import PreparedModel
from fp8calib.verification.emulation.emulate import can_share, repeat
from fp8calib.verification.emulation.probabilities import attending_bytes
from fp8calib.verification.token_scores import scoring_bytes
from fp8calib.verification.verify import Verification

if TYPE_CHECKING:
    from fp8calib.calibration.streamed_model import StreamedModel


def plan_verification(
    asked: Verification,
    model: RunModel,
    scratch: Path,
    *,
    walks: int = 2,
    always_streams: str = "",
    cannot_stream: UsageError | None = None,
    may_share: bool = False,
) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    Args:
        asked: what is compared.
        model: the unquantized model.
        scratch: the folder of hidden states that do not fit into memory.
        walks: how often all layers are read; the noise floor is one of two.
        always_streams: why it is streamed in any case.
        cannot_stream: raised where it would be streamed.
        may_share: let candidates share a batch with the unquantized model, where a GPU has room.
    """
    if model.is_placed:
        return MemoryPlan()
    text, scored = asked.batches, asked.scored
    logits = scoring_bytes(
        torch.device(model.device),
        int(model.source.text_config.vocab_size),
        DTYPES[model.dtype].itemsize,
        num_tokens=max(batch.input_ids.numel() for batch in text),
    )
    extra = {}
    roles = {site.role for each in scored for site in each.quantizers}
    if Role.P in roles:
        heads = [attention.num_heads for _, attention in asked.geometry.attentions()]
        length = max(batch.input_ids.shape[1] for batch in text)
        extra["attention in fp32"] = attending_bytes(torch.device(model.device), max(heads), length)
    work = Workload(
        prepared=model.prepared,
        checkpoint=model.checkpoint,
        dtype=DTYPES[model.dtype],
        device=model.device,
        batches=text,
        scratch=scratch,
        extra=extra,
        logits_bytes=logits,
        num_models=len(scored) + 1,
        changes_weights=any(each.weights for each in scored),
        changes_inputs=Role.INPUT in roles,
        walks=walks,
        always_streams=always_streams,
    )
    limits = find_limits(model.device, model.memory)
    plan = plan_memory(work, limits, cannot_stream=cannot_stream)
    count = 1 + sum(map(can_share, scored))
    is_whole = limits.device_bytes is not None and plan.streaming is None
    is_text = all(batch.media is None for batch in text)
    if not (may_share and is_whole and is_text and count > 1):
        return plan
    repeated = replace(work, batches=[repeat(batch, count) for batch in text])
    try:
        shared = plan_memory(repeated, limits, cannot_stream=UsageError("one by one"))
    except UsageError:
        return plan
    return replace(shared, models_in_a_batch=count)


@contextmanager
def open_scored(
    asked: Verification, model: RunModel, mode: MemoryPlan, progress: Progress
) -> Iterator[PreparedModel | StreamedModel]:
    """Load the model whole, or open it for streaming.

    Of one in memory, the weights that candidates replace are copied first.
    """
    if isinstance(model.checkpoint, LiveCheckpoint) and any(c.weights for c in asked.candidates):
        named: Iterator[tuple[str, torch.nn.Parameter]] = model.prepared.model.named_parameters()
        for name, parameter in named:
            if parameter.is_inference():
                raise UsageError(
                    f"{name} was made in torch.inference_mode(), so it cannot be replaced",
                    hint="load the model outside of inference_mode, or pass its path",
                )
        model.checkpoint.hold()
    prepared = model.load(mode, progress)
    if mode.streaming is None:
        yield prepared
        return
    # most models fit into memory
    from fp8calib.calibration.streamed_model import open_streamed  # noqa: PLC0415

    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *asked.plan.sequences])
    with open_streamed(prepared, model.checkpoint, tokens, mode.streaming) as streamed:
        yield streamed
