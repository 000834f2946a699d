"""Every matrix that the text decoder multiplies by is observed, or named in the coverage."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from tests import zoo
from tests.architectures import families
from tests.doors import Role, find_text_decoder, make_plan, run_calibration
from tests.zoo import draw

PRODUCTS = {"linear", "matmul", "bmm", "mm", "addmm", "einsum", "grouped_mm", "_grouped_mm"}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "gemma3n_text": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "mixtral": {},
    **{
        name: families.FAMILIES[name]
        for name in ("dbrx", "gemma4_text", "jamba", "kimi_linear", "llama4_text", "nemotron_h")
    },
    "hy_v4": {**families.ROUTED, **families.LATENT},
    "inkling_text": {
        **families.ROUTED,
        "head_dim": 8,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 8,
        "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
    },
}


class FindProducts(TorchFunctionMode):
    """Collects the parameters that products multiply by, also through views, casts and slices."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._names = {id(value): {name} for name, value in model.named_parameters()}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and follow the parameters among its arguments."""
        output = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        names = set().union(*(self._names.get(id(tensor), set()) for tensor in tensors))
        if getattr(func, "__name__", "").strip("_") in PRODUCTS | {"rmatmul"}:
            self.found |= names
        elif names and len({id(tensor) for tensor in tensors}) == 1:
            for made in pytree.tree_leaves(output):
                if isinstance(made, torch.Tensor):
                    self._alive.append(made)
                    self._names[id(made)] = names
        return output


def list_covered(stats: Any) -> Iterator[str]:
    """List the patterns of the parameters that the statistics observe or name."""
    for _, linear in stats.geometry.linears():
        site = f"{linear.module}.{Role.INPUT}"
        if any(str(observed) == site for observed in stats.sites):
            yield linear.weight_name
    for item in stats.header.skipped:
        yield item.site.removesuffix(".input")
        yield f"{item.site.removesuffix('.input').removesuffix('.weight')}.*"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=zoo.NEEDS_5_23 if family == "hy_v4" else ())
        for family in sorted(FAMILIES)
    ],
)
def test_every_matrix_is_observed_or_named(family: str, tmp_path: Path) -> None:
    if FAMILIES[family]:
        model = families.save(family, FAMILIES[family], tmp_path / "model")
    else:
        model = zoo.save(family, tmp_path / "model")
    rows = draw([20, 13])
    path, _ = find_text_decoder(model)
    with torch.no_grad(), FindProducts(model) as products:
        for row in rows:
            model(row[None])
    multiplied = {
        name
        for name in products.found
        if name.startswith(f"{path}.")
        and sum(size > 1 for size in model.get_parameter(name).shape) > 1
        and not name.endswith(("bias", "embed_tokens.weight"))  # the latter may be the lm_head too
    }
    assert len(multiplied) > 5
    _, stats = run_calibration(tmp_path / "model", make_plan(rows, packed=False))
    covered = set(list_covered(stats))
    layers = stats.geometry.layers[0].module.rpartition(".")[0]
    covered -= {f"{layers}.{layer.index}.*" for layer in stats.geometry.layers}
    missed = {name for name in multiplied if not any(fnmatchcase(name, each) for each in covered)}
    assert not missed
