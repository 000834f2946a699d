"""Statistics of the unquantized model serve its quantized children, and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.stats.calibration_stats import load_stats, save_stats
from tests.cli.graft.grafting import (
    SHARD,
    graft,
)
from tests.cli.program import succeed
from tests.cli.quantized_children import (
    BASE,
    NORM,
    change_config,
    change_norm,
    change_tensors,
)

Refused = Callable[..., str]


def test_another_base_is_refused(refused: Refused, tmp_path: Path) -> None:
    base = Path(shutil.copytree(BASE, tmp_path / "base"))
    change_tensors(base, lambda tensors: {name: t + 0.125 for name, t in tensors.items()})
    succeed("quantize", tmp_path / "base", "--scheme", "fp8-dynamic", "--out", tmp_path / "child")
    text = refused(4, tmp_path / "child")
    assert "was not made from the calibrated model" in text
    assert "its model.embed_tokens.weight differs" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 4}, "layer 0: KV heads is 4, not 2"),
        ({"num_attention_heads": 2}, "layer 0: query heads is 2, not 4"),
        ({"head_dim": 16}, "layer 0: size of a k head is 16, not 32"),
        ({"num_hidden_layers": 1}, "its layers are 1, not 2"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type is mistr"),
        ({"intermediate_size": 96}, "model.layers.0 is of another shape"),
    ],
)
def test_another_shape_is_refused(
    refused: Refused, child: Path, changes: dict[str, object], says: str
) -> None:
    change_config(child, lambda config: config.update(changes))
    assert says in refused(4, child)


def test_other_norms_need_a_word(
    refused: Refused, calibrated: Path, child: Path, tmp_path: Path
) -> None:
    change_norm(child)
    text = refused(4, child)
    assert f"its {NORM} differs" in text
    assert "--other-weights" in text
    report = graft(calibrated, child, tmp_path / "out", "--other-weights")
    assert any(f"its {NORM} differs" in warning for warning in report["warnings"])
    metadata = TensorFile(tmp_path / "out" / "kv-overlay" / SHARD).header.metadata
    assert json.loads(metadata["fp8calib.grafted"])["accepted"] == f"its {NORM} differs"


def test_norms_in_another_dtype_are_the_same(calibrated: Path, child: Path, tmp_path: Path) -> None:
    names = (NORM, "model.embed_tokens.weight", "model.norm.weight")
    change_tensors(child, lambda tensors: {**tensors, **{n: tensors[n].half() for n in names}})
    graft(calibrated, child, tmp_path / "out")


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_a_missing_norm_or_embedding_is_named(refused: Refused, child: Path, name: str) -> None:
    change_tensors(child, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    assert f"it lacks {name}" in refused(4, child)


@pytest.fixture
def old_stats(calibrated: Path, tmp_path: Path) -> Path:
    """Write statistics as versions did that recorded no hashes."""
    stats = load_stats(calibrated)
    header = stats.header.model_copy(update={"unquantized": {}})
    path = tmp_path / "old" / "stats.safetensors"
    path.parent.mkdir()
    save_stats(replace(stats, header=header), path)
    assert "unquantized" not in TensorFile(path).header.metadata["fp8calib"]
    return path


def test_older_statistics_need_their_model(
    refused: Refused, child: Path, old_stats: Path, tmp_path: Path
) -> None:
    text = refused(2, child, stats=old_stats)
    assert "no hashes of norms and embeddings are recorded" in text
    assert "--base MODEL" in text
    other = shutil.copytree(BASE, tmp_path / "other")
    change_norm(other)
    text = refused(4, child, "--base", other, stats=old_stats)
    assert f"--base {other}: not the calibrated model, which had different weights" in text
    graft(old_stats.parent, child, tmp_path / "out", "--base", BASE)
    change_norm(child)
    assert f"its {NORM} differs" in refused(4, child, "--base", BASE, stats=old_stats)


@pytest.mark.parametrize("options", [("--base", BASE), ("--other-weights",)])
def test_options_for_a_quantized_model_are_refused_for_another(
    refused: Refused, options: tuple[object, ...]
) -> None:
    assert f"{options[0]}: MODEL is not quantized" in refused(2, BASE, *options)
