"""Which linears stay unquantized: by default, and by the user's patterns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from fp8calib.errors import UsageError
from fp8calib.model.module_paths import list_paths, matches_pattern

_NUMBER = re.compile(r"\.\d+\.")
TOWER = "a vision or audio tower"
_PROJECTOR = "a projector between modalities"
_TREES = frozenset({TOWER, _PROJECTOR})
_MODALITY = "vision|visual|image|img|audio|speech|sound|video|wav|waveform"

_KEPT = "a linear that engines keep unquantized"
_GENERATOR = "a part that generates sound or images"
_HYPER = "a mixer of residual streams, as AutoRound leaves it"
_LATENT = "a projection of latent experts, as ModelOpt leaves it"
_DELTA_GATE = "a projection to the gates of linear attention, as ModelOpt leaves it"
_PARTS = (
    ("an output head", r"head|.+_head|embed_out|output_layer|score|classifier|pooler"),
    ("an embedding", r".*embed.*|wte|wpe|relative_attention_bias"),
    ("a norm", r"(?!norm_attn_norm$).*norm.*|ln_.+"),  # dbrx's holds the attention too
    ("a router", r".*router.*|gate|shared_expert_gate"),
    (TOWER, rf"(.+_)?({_MODALITY})(_.+)?|vit|vpm|apm|sam_model|(acoustic|semantic)_tokenizer_.+"),
    (
        _PROJECTOR,
        r".*projector.*|connector|(.+_)?aligner|(.+_)?resampler(_model)?|merger|patch_merge(r|_mlp)|"
        r"qformer|mlp_AR|"
        r"(language|text|modality)_projection|custom_text_proj",
    ),
    # Engines of text do not load these; AutoRound 0.16.1 leaves them (`utils/common.py`,
    # `special_model_handler.py`).
    (_GENERATOR, r"talker|code_predictor|(code|token)2wav|vqmodel|.+_moe_gen|moe_gen"),
    # vLLM 0.32.0 makes these without a quantization config, whatever the checkpoint's
    # (`models/deepseek_mtp.py`, `ernie_mtp.py`, `deepseek_v2.py`).
    (_KEPT, r"eh_proj|mtp_linear_proj|weights_proj"),
    # AutoRound 0.16.1, `special_model_handler.py`.
    (_HYPER, r"hyper_connections?"),
    # ModelOpt 0.47.0, `configs/ptq/units/mamba_moe_disabled_quantizers.yaml`; vLLM 0.32.0 then
    # sums over ranks once (`models/nemotron_h.py`).
    (_LATENT, r"fc[12]_latent_proj"),
)
"""Why a module stays unquantized, and the parts of a path that mark it."""
_OUTER_PARTS = (
    ("an output head", r"output"),
    (_PROJECTOR, r"mlp1"),
)
"""The same, but only before the first number of a path: in layers these names differ in meaning."""
_DELTA_GATES = re.compile(r"(.*\.)?linear_attn\.in_proj_(a|b|ba)")
"""Paths of projections to one number per head. ModelOpt 0.47.0 leaves them
(`configs/ptq/units/default_disabled_quantizers.yaml`), and vLLM 0.32.0 cannot run them with block
scales (`layers/mamba/gdn/qwen_gdn_linear_attn.py`)."""
_INDEXER_KEY = ".indexer.wk"
"""The end of a path; engines join it with `weights_proj`, and vLLM 0.32.0 fails on one
scale for all its rows (`models/deepseek_v2.py`, `_try_load_fp8_indexer_wk`)."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a module stays unquantized."""

    why: str
    tree: str = ""
    """The part of the path that names the tower or projector that holds the module."""


def find_default(module: str, *, rows: int, vocab_sizes: Collection[object]) -> Reason | None:
    """Explain why a linear stays unquantized by default; None when it is quantized.

    Args:
        module: its path in the checkpoint.
        rows: of its weight; outside numbered layers, a row per word means an embedding or a head.
        vocab_sizes: all vocabulary sizes in the config.
    """
    parts = module.split(".")
    outer = list(takewhile(lambda part: not part.isdecimal(), parts))
    for known, where in ((_PARTS, parts), (_OUTER_PARTS, outer)):
        for why, expression in known:
            for part in where:
                if re.fullmatch(expression, part):
                    return Reason(why, tree=part if why in _TREES else "")
    if module.endswith(_INDEXER_KEY):
        return Reason(_KEPT)
    if _DELTA_GATES.fullmatch(module):
        return Reason(_DELTA_GATE)
    if outer == parts and rows in vocab_sizes:
        return Reason("an embedding or an output head: it has a row per word")
    return None


def match_patterns(
    patterns: Collection[str], modules: Collection[str], *, option: str = "--ignore"
) -> dict[str, str]:
    """Find the linears that patterns match, by their own path or that of a module around them.

    Args:
        patterns: each a path, a glob, or `re:` and an expression for a whole path, of a module or
            of a tensor (`X.weight`).
        modules: paths of the linears in the checkpoint.
        option: that has the patterns, for messages.

    Returns:
        The matching pattern, by linear.
    """
    matched: dict[str, str] = {}
    paths = {path for module in modules for path in list_paths(module)}
    for pattern in patterns:
        named = {path for path in paths if _matches(pattern, path, option)}
        if not named:
            quantized = (m for m in modules if find_default(m, rows=0, vocab_sizes=()) is None)
            example = next(quantized, next(iter(modules), ""))
            raise UsageError(
                f"{option} {pattern}: matches no module of the model that is or holds a linear",
                hint=f"linears look like {example}; globs and re: expressions match whole paths; "
                "biases, norms and convolutions are never quantized",
            )
        matched |= {
            module: pattern
            for module in modules
            if module not in matched and not named.isdisjoint(list_paths(module))
        }
    return matched


@lru_cache(maxsize=1 << 17)
def find_pattern(patterns: tuple[str, ...], module: str, *, option: str) -> str | None:
    """Find the first pattern of an option that matches a linear, or a module around it."""
    paths = [*list_paths(module)]
    found = (each for each in patterns if any(_matches(each, path, option) for path in paths))
    return next(found, None)


def span_layers(path: str) -> str:
    """Replace the numbers in a path by `*`: a pattern for all layers."""
    return _NUMBER.sub(".*.", path)


def spell_options(patterns: Iterable[str]) -> str:
    """Spell patterns as command-line options, quoted for a shell."""
    return " ".join(f"--ignore {shlex.quote(pattern)}" for pattern in patterns)


def _matches(pattern: str, path: str, option: str) -> bool:
    try:
        if pattern.startswith("re:"):
            return matches_pattern(pattern, path, f"{path}.weight")
        return matches_pattern(pattern.removesuffix(".weight"), path)
    except ValueError as error:
        raise UsageError(f"{option} {pattern}: {error}") from error
