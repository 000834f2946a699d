"""What a worker of vLLM does, on modules that stand for vLLM's attention layers."""

import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8calib.plugins.vllm.rank_answer import RankAnswer
from fp8calib.plugins.vllm.worker import FP8CalibWorker


class Reader:
    """Reads as FlashInfer's implementation does: a tensor to write, a float to multiply by."""

    scale = 0.125

    def __init__(self) -> None:
        self.bmm1_scale: float | None = None
        self.bmm2_scale: float | None = None

    def write(self, layer: Any) -> torch.Tensor:
        """Take the tensors."""
        return layer._k_scale * layer._v_scale

    def forward(self, layer: Any) -> None:
        """Keep the factors of the first pass."""
        self.bmm1_scale = self.scale * layer._q_scale_float * layer._k_scale_float
        self.bmm2_scale = layer._v_scale_float


class Attention(nn.Module):
    """Has the attributes of vLLM's class."""

    def __init__(self, name: str, number: float, kind: str = "decoder") -> None:
        super().__init__()
        self.layer_name, self.attn_type, self.impl = name, kind, Reader()
        self.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
        self.kv_cache_dtype, self.kv_cache = "fp8", torch.zeros(1, dtype=torch.uint8)
        self.num_kv_heads, self._o_scale_float, self.query_quant = 2, None, None
        for role, factor in (("k", 1), ("v", 2), ("q", 4)):
            self.register_buffer(f"_{role}_scale", torch.full((2,), factor * number))
            setattr(self, f"_{role}_scale_float", factor * number)
            if role != "q":
                setattr(self, f"_{role}_scale_cpu", torch.tensor(factor * number))

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Quantize the query, if it is."""
        return query if self.query_quant is None else query / self._q_scale


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def give(name: str, **contents: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    group = SimpleNamespace(rank_in_group=1)
    state = SimpleNamespace(get_tp_group=lambda: group, get_pp_group=lambda: group)
    platform = SimpleNamespace(device_type="cuda", is_fp8_fnuz=lambda: False)
    give("vllm", __version__="0.32.0")
    give("vllm.distributed", parallel_state=state)
    give("vllm.platforms", current_platform=platform)
    return


def make_worker() -> tuple[Any, list[Attention]]:
    """Make a worker of two layers, an encoder and a drafter's layer."""
    layers = [Attention(f"model.layers.{index}.self_attn.attn", 0.5 + index) for index in (0, 1)]
    encoder = Attention("visual.attn", 1.0, kind="encoder_only")
    drafted = Attention("mtp.layers.0.self_attn.attn", 0.25)
    model = nn.ModuleList([*layers, encoder, nn.Linear(2, 2)])
    worker: Any = FP8CalibWorker()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    compilation = SimpleNamespace(
        static_forward_context={each.layer_name: each for each in (*layers, encoder, drafted)},
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
    )
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2)
    parallel.data_parallel_size = 1
    worker.vllm_config = SimpleNamespace(parallel_config=parallel, compilation_config=compilation)
    return worker, layers


def read(worker: Any) -> RankAnswer:
    return RankAnswer.parse(json.loads(json.dumps(worker.fp8calib_read_scales())))


def test_a_rank_answers_every_copy_and_what_its_backend_reads() -> None:
    worker, layers = make_worker()
    layers[1].impl.forward(layers[1])

    answer = read(worker)

    place = (answer.version, answer.tp, answer.tp_rank, answer.pp, answer.pp_rank)
    assert place == ("0.32.0", 2, 1, 2, 1)
    assert (answer.has_graphs, answer.others) == (True, ("mtp.layers.0.self_attn.attn",))
    assert [each.index for each in answer.layers] == [0, 1]
    first, second = answer.layers
    assert first.reads == (
        *("_k_scale", "_k_scale_float", "_q_scale_float", "_v_scale", "_v_scale_float"),
    )
    assert first.scales == {
        "k": {"device": (0.5, 0.5), "float": (0.5,), "cpu": (0.5,)},
        "v": {"device": (1.0, 1.0), "float": (1.0,), "cpu": (1.0,)},
        "q": {"device": (2.0, 2.0), "float": (2.0,)},
    }
    assert (second.scales["k"]["factor"], second.scales["v"]["factor"]) == ((1.5,), (3.0,))
    assert (first.list_read("k"), second.list_read("k")) == (
        ("device", "float"),
        ("device", "float", "factor"),
    )
    assert (first.cache_dtype, first.stored_dtype) == ("fp8", "uint8")


def test_what_is_written_is_in_every_copy_at_the_same_address() -> None:
    worker, layers = make_worker()
    layers[0].impl.forward(layers[0])
    address = layers[0]._k_scale.data_ptr()

    numbers = {"k": 0.03125, "v": 0.0625, "q": 1.0}
    worker.fp8calib_write_scales(json.dumps({layers[0].layer_name: numbers, "elsewhere": {"k": 3}}))

    first, second = read(worker).layers
    assert {role: {*sum(first.scales[role].values(), ())} for role in numbers} == {
        role: {number} for role, number in numbers.items()
    }
    assert second.scales["k"]["device"] == (1.5, 1.5)
    assert layers[0]._k_scale.data_ptr() == address
    assert layers[0].impl.bmm1_scale is layers[0].impl.bmm2_scale is None


def test_only_methods_with_the_prefix_are_mixed_into_the_worker() -> None:
    """VLLM refuses an extension whose attributes its worker has."""
    own = [name for name in dir(FP8CalibWorker) if not name.startswith("__")]

    assert [name for name in own if not name.startswith("fp8calib_")] == []
