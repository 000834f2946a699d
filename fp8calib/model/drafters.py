"""Drafters: what a checkpoint stores for speculative decoding, and the decoder's class leaves out.

Engines run them in classes of their own (vLLM 0.32.0 `models/registry.py`,
_SPECULATIVE_DECODING_MODELS). Their names in checkpoints: `mtp.*` (Qwen3-Next, Qwen3.5, Nemotron-H,
LongCat, DeepSeek-V4), `mtp_layers` (MiMo), `mtp_block` (Ernie), `eagle_module` (ModelOpt),
`medusa_heads`, or layers after the decoder's (DeepSeek-V3, GLM-4.5, Step 3.5). Others are
checkpoints of their own, with a class of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.checkpoint.model_config import find_class, list_text_configs

_PART = re.compile(r"(?:.*\.)?(?:mtp|eagle|medusa|dflash|draft(?:er)?)(?:_[^.]+)?(?:\..*)?")
_CLASS = re.compile(r"[Ee]agle(?!2_5_VL)|DFlash|Medusa|Speculator|Assistant|Draft|MTP")
"""What the names of drafters' classes have (vLLM 0.32.0 `models/registry.py`)."""
_LAYER = re.compile(r"(?:(.*)\.)?layers\.([0-9]{1,6})\..+?")
_BLOCK = re.compile(
    r"model\.(?:mtp_block|mtp_layers|mtp\.layers)\.[0-9]+\.(?:transformer_layer\.)?"
)
"""Layers of Ernie, MiMo and LongCat, which vLLM 0.32.0 calls `model.layers.N`."""
_NUMBER = re.compile(r"\.([0-9]{1,6})\.")
DRAFTER_MODULES = ("model.decoder", "model.mtp_block", "eh_proj")
"""What engines call modules of drafters, whatever the checkpoint does: SGLang 0.5.23
(`deepseek_nextn.py`, `ernie4_eagle.py`), vLLM 0.32.0 (`longcat_flash_mtp.py`)."""
_PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Where configs say how many layers the drafter has (vLLM 0.32.0 `config/speculative.py`)."""


def is_drafted(path: str, num_layers: int, decoder: str | None = None) -> bool:
    """Tell whether a module or tensor is of a drafter.

    Args:
        path: its path.
        num_layers: of the decoder; 0 if that is not known.
        decoder: the path of its list of layers with a dot at its end; None for any list.
    """
    if _PART.fullmatch(path):
        return True
    found = _LAYER.match(path)
    if found is None or not num_layers or int(found[2]) < num_layers:
        return False
    return decoder in (None, path[: found.start(2)])


def number_layer(path: str, config: Mapping[str, object]) -> int | None:
    """Find the number of a drafter's layer in vLLM, after the decoder's; None if not known."""
    found, count = _NUMBER.search(path), count_layers(config)
    doubled = config.get("num_layers")
    if ".transformer_layer." in path and isinstance(doubled, int):
        count = 2 * doubled  # LongCat, whose layers have two attentions each
    if found is None or not count:
        return None
    return int(found[1]) + (count if int(found[1]) < count else 0)


def name_in_vllm(path: str, layer: int) -> str:
    """Name a drafter's linear in a numbered layer as vLLM's class does."""
    return _BLOCK.sub(f"model.layers.{layer}.", path)


def find_drafter_class(config: Mapping[str, object]) -> str:
    """Find the class of a checkpoint that is a drafter alone; empty if it is none."""
    return find_class(config, _CLASS)


def find_promise(config: Mapping[str, object]) -> str:
    """Find where a config promises a drafter, in words; empty if it does not."""
    for _, section in list_text_configs(config):
        for key in _PROMISES:
            number = section.get(key)
            if isinstance(number, int) and number > 0:
                return f"{key} {number:d}"
    return ""


def count_layers(config: Mapping[str, object]) -> int:
    """Count the layers of the decoder by its config; 0 if it does not say."""
    numbers = (section.get("num_hidden_layers") for _, section in list_text_configs(config))
    return next((number for number in numbers if isinstance(number, int)), 0)
