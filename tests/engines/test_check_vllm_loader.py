"""The names of scales that vLLM's weight loader loads, ignores or refuses, by model type.

`vllm_names.json` is what the loader of vLLM 0.32.0 did on a CPU with one tensor of each name, in a
tiny model of each type: L loaded, I ignored, E error, under each of METHODS, for each of
IN_ATTENTION, the first name without its root, one of a layer that does not exist, and each of
ELSEWHERE. A row also says where the model differs from llama: its type, the path of its attention,
what is stored there for k_proj, and the beginning of the class that wraps it.
`tests/real_engines/test_vllm_names.py` runs some of them again.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.facts.release import PLACELESS, VLLM_RUN
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.loaded_scales import LoadContext
from fp8calib.engines.vllm.kv_method import KvMethod
from fp8calib.engines.vllm.names import WeightLoader
from tests.formats.handmade import make_attention, make_geometry

PATH = "model.layers.0.self_attn"
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
IN_ATTENTION = (
    *("k_scale", "kv_scale", "q_scale", "k_proj.k_scale", "k_proj.output_scale"),
    *("k_proj.k_zero_point", "k_zero_point", "k_cache.scale", "q.scale", "attn.k_scale"),
    *("attn.kv_scale", "attn.attn.k_scale", "prob_scale", "prob_output_scale", "attn.prob_scale"),
    *("K_scale", "key_scale", "_k_scale", "k_cache_scale", "k_scales", "nothing.k_scale"),
)
ELSEWHERE = (
    "mtp.layers.0.self_attn.k_scale",
    "lm_head.k_scale",
    "visual.blocks.0.attn.k_scale",
    "k_scale",
)
METHODS = (KvMethod.COMPRESSED_TENSORS, KvMethod.FP8, None)

ROWS = json.loads(Path(__file__).with_name("vllm_names.json").read_text())


def _make(family: str, method: KvMethod | None) -> tuple[WeightLoader, str]:
    row = ROWS[family]
    path, architecture = row.get("path", PATH), row.get("class", "")
    kind = "latent" if family in LATENT else "heads"
    attention = make_attention(0, module=path, checkpoint_module=path, kind=kind)
    wrapper = f"{architecture}ForConditionalGeneration" if architecture else "Handmade"
    model_type = row.get("model_type", family)
    geometry = make_geometry([attention], model_type=model_type, architecture=wrapper)
    stored = f"{path}.{row.get('projection', 'k_proj')}.weight"
    tensors = {stored: TensorEntry(dtype="BF16", shape=(8, 8), start=0, stop=128)}
    folder = ScaleFolder(path=Path(), config={}, tensors={"m": tensors}, scales={"m": {}})
    has_places = kind == "heads" and method and not VLLM_RUN.has(PLACELESS, geometry.model_type)
    places = {f"{path}.attn": 0} if has_places else {}
    return WeightLoader(LoadContext(folder, geometry, ["m"]), method, places, VLLM_RUN), path


def _list_names(path: str) -> Iterable[str]:
    yield from (f"{path}.{suffix}" for suffix in IN_ATTENTION)
    yield f"{path.removeprefix('model.')}.k_scale"
    yield f"{re.sub('[0-9]', '5', path, count=1)}.k_scale"
    yield from ELSEWHERE


@pytest.mark.parametrize("family", ROWS)
def test_a_name_is_loaded_ignored_or_refused_as_in_vllm(family: str) -> None:
    for method, expected in zip(METHODS, ROWS[family]["outcomes"], strict=True):
        loader, path = _make(family, method)
        names = [*_list_names(path)]
        found = ["E" if loader.look_up(name)[1] else "-" for name in names]
        wanted = ["E" if outcome == "E" else "-" for outcome in expected]
        assert dict(zip(names, found, strict=True)) == dict(zip(names, wanted, strict=True))
        loads_k = [name for name, outcome in zip(names, expected, strict=True) if outcome == "L"]
        keys = [name for name in loads_k if ".q" not in name and "prob" not in name]
        assert all(loader.look_up(name)[0] for name in keys if "zero_point" not in name)
