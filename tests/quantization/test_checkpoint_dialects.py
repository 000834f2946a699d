"""Names, shapes and configs of the three forms, against what their own readers expect."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fp8calib.engines.replay.declared import matches_target
from fp8calib.errors import ModelError
from tests.quantization.by_hand import LAYER, make_tensors, random, run, save


def test_linears_of_a_part_are_ignored_wherever_an_engine_hangs_them(tmp_path: Path) -> None:
    """Where the whole has several parts, engines begin a path otherwise than the checkpoint."""
    own = f"language_model.{LAYER}"
    tensors = {
        f"{own}.{name}.weight": random(16, 16, seed=0)
        for name in ("mlp.up_proj", "mlp.down_proj", "mlp.experts.0.w1", "mlp.experts.1.w1")
    }
    tensors["head.layers.0.mlp.up_proj.weight"] = random(16, 16, seed=0)
    tensors["other.layers.0.mlp.up_proj.weight"] = random(16, 16, seed=0)
    patterns = (f"{own}.mlp.*", "head")
    source = save(tmp_path / "source", tensors, text_config={"model_type": "llama"})
    found = run(source, tmp_path / "a", "w8a16", ignore=patterns)
    names = {"mlp.down_proj", "mlp.experts.0.w1", "mlp.experts.1.w1"}
    for name in names:
        hung = f"model.language_model.layers.0.{name}"
        assert any(matches_target(pattern, hung) for pattern in found.config()["ignore"]), name
    taken = "other.layers.0.mlp.up_proj"
    assert taken in {matrix.module for matrix in found.plan.selection.quantized}
    assert not any(matches_target(pattern, taken) for pattern in found.config()["ignore"])
    assert len([each for each in found.config()["ignore"] if "experts" in each]) == 3
    blocks = run(source, tmp_path / "b", "fp8-block", "autofp8", ignore=patterns).config()
    assert blocks["modules_to_not_convert"] == [
        *blocks["ignored_layers"],
        "layers.0.mlp.down_proj",
        "layers.0.mlp.experts",
    ]


def test_tensors_that_the_index_does_not_name_are_told(tmp_path: Path) -> None:
    """Engines read shards whole, and would miss them."""
    source = save(tmp_path / "source", make_tensors(), shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    found = run(source, tmp_path / "out", "w8a16")
    assert "model.norm.weight" not in found.tensors()
    assert found.plan.skipped == {
        f"model.norm.weight in {file}": "the index does not list it",
    }


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """The index names one of them, and vLLM takes the last."""
    source = save(tmp_path / "source", make_tensors(), shards=2)
    first, second = sorted(source.glob("*.safetensors"))
    doubled = load_file(second) | dict(list(load_file(first).items())[:1])
    save_file(doubled, second, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"is also in {second.name}"):
        run(source, tmp_path / "out", "w8a16")


def test_modules_behind_the_model_come_along(tmp_path: Path) -> None:
    """Without them vLLM pools as the architecture's default does, and skips the last layer."""
    source = save(tmp_path / "source", make_tensors())
    paths = ("", "1_Pooling", "2_Dense", "3_Old", "../above", 4)
    modules = [{"idx": place, "path": path} for place, path in enumerate(paths)]
    (source / "modules.json").write_text(json.dumps(modules))
    kept = {"1_Pooling/config.json", "2_Dense/model.safetensors", "3_Old/pytorch_model.bin"}
    for name in {*kept, "2_Dense/pytorch_model.bin", "openvino/model.xml", "../above/x"}:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    found = run(source, tmp_path / "out", "w8a16")
    assert set(found.written.files) == {"config.json", "model.safetensors", "modules.json", *kept}
    assert found.plan.skipped.keys() == {"openvino"}


def test_towers_are_ignored_wherever_an_engine_hangs_them(tmp_path: Path) -> None:
    tower = "vision_tower.encoder.layers.0.fc1"
    tensors = make_tensors() | {f"{tower}.weight": random(16, 16, seed=0)}
    source = save(tmp_path / "source", tensors)
    ignored = run(source, tmp_path / "a", "w8a16").config()["ignore"]
    assert ignored == ["lm_head", "model.embed_tokens", "re:(.*[.]|)vision_tower([.].*|)$"]
    from compressed_tensors.utils import match_name  # noqa: PLC0415

    for name in (tower, f"model.{tower}", "vision_tower"):
        assert any(match_name(name, pattern) for pattern in ignored), name
        assert any(matches_target(pattern, name) for pattern in ignored), name
    for name in (f"{LAYER}.mlp.gate_proj", "my_vision_tower2.fc"):
        assert not any(match_name(name, pattern) for pattern in ignored), name
    listed = run(source, tmp_path / "b", "fp8-block", "autofp8").config()["ignored_layers"]
    assert tower in listed
