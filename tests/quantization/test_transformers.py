"""FP8 checkpoints in transformers, which must compute what the emulation predicts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers import logging as transformers_logging

import fp8calib
from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.numerics.schemes import SCHEMES
from fp8calib.quantization.calibrated_scales import find_input_scales
from fp8calib.quantization.plan import NO_SCALES, CalibratedScales
from fp8calib.quantization.select import find_selection
from tests import zoo
from tests.doors import make_plan, run_calibration
from tests.quantization.by_hand import run
from tests.quantization.stacked import EVERY, STACKED
from tests.verification.by_hand import (
    PLAIN,
    Subject,
    emulate,
    emulate_checkpoint,
    emulate_scheme,
    make_batch,
    opened,
    padding_mask,
)
from tests.zoo import draw

BATCH = make_batch([20, 7])
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 128}
"""Whole blocks of 128: compressed-tensors refuses inputs that are none."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    return


def decompress(model: PreTrainedModel) -> None:
    """Run a model once: compressed-tensors turns codes into values at the first forward pass."""
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9).unsqueeze(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama") / "model"


@pytest.fixture(scope="module")
def subject(folder: Path) -> Iterator[Subject]:
    with opened(zoo.build("llama", **SIZES), folder) as found:
        yield found


@pytest.fixture(scope="module")
def stats(folder: Path, subject: Subject) -> RunStats:  # noqa: ARG001 -- it writes the folder
    return run_calibration(folder, make_plan(draw([20, 20])))[1]


def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    """Run a whole model as anybody would."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=BATCH.input_ids, attention_mask=padding_mask(BATCH), use_cache=False
        ).logits
    return logits


SEVERAL = {"*.down_proj": "w8a16", "*.layers.1.mlp": "fp8-block", "*.o_proj": "fp8-static"}
MADE = [(each.name, {}) for each in SCHEMES.values() if not each.is_mx]


@pytest.mark.parametrize(("scheme", "others"), [*MADE, ("fp8-dynamic", SEVERAL)])
def test_logits_are_those_the_emulation_predicts(
    scheme: str,
    others: dict[str, str],
    folder: Path,
    subject: Subject,
    stats: RunStats,
    tmp_path: Path,
) -> None:
    """Of several schemes, the checkpoint is emulated; of one, the scheme."""
    scales = NO_SCALES
    if others or scheme == "fp8-static":
        with Checkpoint.open(folder) as checkpoint:
            taken = find_selection(checkpoint).require().quantized
        scales = CalibratedScales(inputs=find_input_scales(stats, taken)[0], kv={})
    out = run(folder, tmp_path / "out", scheme, scales=scales, layer_schemes=others).out
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    decompress(loaded)
    with Fp8Checkpoint.open(out, fuse=True) as stored:
        emulation = emulate_scheme(subject, SCHEMES[scheme], PLAIN, stats=stats)
        if others:
            emulation = emulate_checkpoint(subject, stored, PLAIN)
            assert len(emulation.quantizers) == 12  # of all linears but down_proj
        (hidden,) = emulate(subject, emulation, BATCH)
    with torch.no_grad():
        expected = subject.model.lm_head(hidden)
    found = compute_logits(loaded)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, compute_logits(subject.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", EVERY)
def test_check_says_whether_transformers_loads_experts_apart(family: str, tmp_path: Path) -> None:
    """Otherwise it reports every stack missing."""
    kind = STACKED[family]
    source = kind.save(kind.build(family), tmp_path / "m")
    out = run(source, tmp_path / "fp8", "fp8-dynamic").out
    loader = AutoModelForCausalLM if kind.vision is None else AutoModelForImageTextToText
    _, report = loader.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    missing = [name for name in report["missing_keys"] if "experts" in name.split(".")]
    weights = fp8calib.check(out, engine="transformers").engines["transformers"].weights
    assert (weights is None) is (missing == [])
