"""What `quantize` writes of models that see or hear, and scales, in vLLM's own loader."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.check_handmade import PER_TENSOR
from tests.kit.checkpoints import change_config, change_tensors
from tests.kit.multimodal import WIDE
from tests.quantization.by_hand import run
from tests.real_engines.fuzz.architectures import save_model
from tests.real_engines.fuzz.compare import Finding
from tests.real_engines.fuzz.draw import UNDRAWN
from tests.real_engines.fuzz.engines import VllmObserver
from tests.real_engines.fuzz.evaluate import ask_check, judge
from tests.real_engines.fuzz.forms import open_geometry
from tests.real_engines.vllm_job import ForkServer

pytest.importorskip("torchvision")
FORMS = {
    "compressed-tensors": "fp8-dynamic",
    "autofp8": "fp8-block",
    "modelopt": "fp8-dynamic",
}
_EXPERTS = {"modelopt"}
"""Scales of experts per channel, which it refuses."""
UNSERVED: dict[str, set[str]] = {
    "aria": {*FORMS},
    "glm4v_moe": _EXPERTS,
    "llama4": _EXPERTS,
    "mistral3": {"autofp8"},
    "qwen3_5_moe": _EXPERTS,
}
"""The forms that vLLM does not load as they are meant: Aria's experts have to be stacks, and its
Mistral 3 renames the scales of blocks."""
ONE_NAME = {"glmasr", "paddleocr_vl", "qwen2_audio"}
"""Those whose scales have to be named as the weights are."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("vllm") / "log") as found:
        yield found


@pytest.mark.parametrize("name", sorted(WIDE))
def test_vllm_loads_what_is_written_as_check_says(
    name: str, server: ForkServer, tmp_path: Path
) -> None:
    model, unserved = tmp_path / "model", set()
    save_model(name, model, "bfloat16")
    observe = VllmObserver(server, tmp_path)
    for form, scheme in FORMS.items():
        out = run(model, tmp_path / form, scheme, form).out
        seen = observe(UNDRAWN, out, model)
        found = judge(lambda out=out: ask_check(out, "vllm"), "vllm", seen, out, has_kv=False)
        assert not isinstance(found, Finding), found
        if seen.error or seen.weights_fault:
            unserved.add(form)
    assert unserved == UNSERVED.get(name, set())


@pytest.mark.parametrize("name", sorted(WIDE))
def test_scales_may_be_named_as_in_memory(name: str, server: ForkServer, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model", "bfloat16")
    pairs = [each for _, each in open_geometry(tmp_path / "model").attentions()]
    if all(each.module == each.checkpoint_module for each in pairs):
        pytest.skip(f"{name} has one name for it")
    folder = tmp_path / "scales"
    shutil.copytree(tmp_path / "model", folder)
    names = [f"{each.module}.{role}_scale" for each in pairs for role in "kv"]
    scales = {each: torch.tensor([0.25]) for each in names}
    change_tensors(folder, scales)
    change_config(folder, quantization_config=PER_TENSOR)
    seen = VllmObserver(server, tmp_path)(UNDRAWN, folder, tmp_path / "model")
    found = judge(lambda: ask_check(folder, "vllm"), "vllm", seen, folder, has_kv=True)
    assert not isinstance(found, Finding), found
    values = {pair.k for pair in seen.layers.values()}
    assert values == ({(0.25,)} if name not in ONE_NAME else set()), seen.error
