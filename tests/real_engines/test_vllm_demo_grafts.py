"""KV scales that were added to SmolLM2 in every form, in vLLM.

vLLM's CPU build has kernels for INT4 and INT8 weights of compressed-tensors with inputs in INT8;
other forms go through its weight loader alone.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import transformers

from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.cli.quantized_children import save_fp4, save_int
from tests.cli.test_extract import graft
from tests.kit.checkpoints import change_tensors
from tests.real_engines.changed_models import save_widened
from tests.real_engines.exports import read_scales
from tests.real_engines.vllm_job import VllmServer, load_in_vllm

WIDENED = "widened, "
"""Forms of a model whose sizes are multiples of 128: vLLM wants them of blocks, and transformers of
inputs in groups."""
FORMS: Mapping[str, Callable[[Path, Path], object]] = {
    "fp8-dynamic": lambda base, out: quantize(base, out, "fp8-dynamic"),
    "w8a16": lambda base, out: quantize(base, out, "w8a16"),
    "modelopt": lambda base, out: quantize(base, out, "fp8-dynamic", "--format", "modelopt"),
    f"{WIDENED}blocks": lambda base, out: quantize(base, out, "fp8-block"),
    f"{WIDENED}autofp8": lambda base, out: quantize(base, out, "fp8-block", "--format", "autofp8"),
    "int8": lambda base, out: save_int(out, 8, base=base),
    "int4": lambda base, out: save_int(out, 4, group=32, base=base),
    "nvfp4": lambda base, out: save_fp4(out, "nvfp4", base=base),
    "mxfp4": lambda base, out: save_fp4(out, "mxfp4", base=base),
    "modelopt, nvfp4": lambda base, out: save_fp4(out, "modelopt", base=base),
}
RUNNING = ("int8", "int4")
"""Those for which vLLM's CPU build has kernels."""
PROMPT = "The capital of France is Paris. It lies on the river Seine, in the north of the country."
Written = Callable[[str], tuple[Path, Path]]


def quantize(base: Path, out: Path, scheme: str, *options: object) -> None:
    succeed("quantize", base, "--scheme", scheme, *options, "--out", out)


@pytest.fixture(scope="module")
def written(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Give a function that writes a quantized child, and one with KV scales of its base."""
    folder = tmp_path_factory.mktemp("forms")
    rows = [{"input_ids": list(range(first, first + 64))} for first in (100, 900, 5000)]
    data = write_rows(folder / "rows.jsonl", rows)

    @cache
    def find_base(name: str) -> tuple[Path, Path]:
        base, out = demo_model, folder / f"{name}-out"
        if name == "widened":
            base = folder / name
            save_widened(demo_model, base)
            change_tensors(base, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
        options = ("--data", data, "--seq-len", 64, "--dtype", "float32", "--format", "kv-scales")
        succeed("calibrate", base, *options, "--out", out)
        return base, out

    @cache
    def write(form: str) -> tuple[Path, Path]:
        base, measured = find_base("widened" if form.startswith(WIDENED) else "demo")
        place = folder / form.replace(", ", "-").replace(" ", "-")
        FORMS[form](base, place / "child")
        graft(measured, place / "child", place / "out")
        return place / "child", place / "out" / "kv-overlay"

    return write


@pytest.mark.parametrize("form", FORMS)
def test_vllms_weight_loader_holds_every_scale(written: Written, form: str) -> None:
    """VLLM keeps the scales of methods other than compressed-tensors in the model's dtype."""
    _, overlay = written(form)
    held = load_in_vllm({form: overlay})[form]
    expected = read_scales(overlay)
    config = json.loads((overlay / "config.json").read_text())
    method = config["quantization_config"]["quant_method"]
    rounding = 1e-6 if method == "compressed-tensors" else 2**-8
    assert len(expected) == 30
    for layer, pair in expected.items():
        for role, values in zip("kv", pair, strict=True):
            found = held[f"held.model.layers.{layer}.self_attn.attn.{role}"]
            assert float(found.max()) == pytest.approx(values[0], rel=rounding)


@pytest.mark.parametrize("form", RUNNING)
def test_vllm_scores_text_with_the_scales(written: Written, vllm: VllmServer, form: str) -> None:
    child, overlay = written(form)
    ids = transformers.AutoTokenizer.from_pretrained(child)(PROMPT)["input_ids"]
    options = {"kv_cache_dtype": "auto", "dtype": "bfloat16", "logprobs": [ids]}
    answer = vllm(overlay, **options)
    assert answer.error == ""
    assert answer.scales() == {
        layer: (pytest.approx(k, rel=1e-6), pytest.approx(v, rel=1e-6))
        for layer, (k, v) in read_scales(overlay).items()
    }
    assert answer.cache_bytes() == {1}
    (plain,) = vllm(child, **options).logprobs
    (scored,) = answer.logprobs
    assert 0 < sum(abs(a - b) for a, b in zip(plain, scored, strict=True)) / len(plain) < 0.5
    assert sum(plain) / len(plain) > -3  # random text has -11
