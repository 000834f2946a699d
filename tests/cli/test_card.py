"""The README.md of written checkpoints: front matter and commands."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import fp8calib
from fp8calib.commands.command_line import remember_arguments
from tests.cli.conftest import QUICK
from tests.cli.program import succeed

SOURCE = """---
license: other
license_name: tiny-licence
license_link: LICENSE
language: [en, de]
tags: [tiny, chat]
pipeline_tag: text-generation
base_model: org/older
model-index: [{name: wrong}]
---
# The source's own card
"""


@pytest.fixture
def carded(model: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(model, tmp_path / "models" / "tiny"))
    (folder / "README.md").write_text(SOURCE)
    return folder


def read(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_every_command_writes_a_card_in_place_of_the_source_s(
    carded: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "all"
    formats = ("--format", "kv-overlay", "--format", "kv-overlay-head")
    command = ("calibrate", carded, "--data", data, *QUICK, "--recipe", "w8a8-static", *formats)
    written = succeed(*command, "--out", out, "--json").json
    stats = out / "stats.safetensors"
    exported, quantized, extracted = (tmp_path / name for name in ("new", "fp8", "kv"))
    succeed("export", stats, "--model", carded, *formats[:2], "--out", exported)
    fp8 = succeed("quantize", carded, "--scheme", "w8a16", "--out", quantized, "--json").json
    source = ("--quantized-model", exported / "kv-overlay", "--model", carded)
    extract = succeed("extract-kv-scales", *source, "--save-path", extracted, "--json").json

    checkpoint = written["quantize"]["out"].rpartition("/")[2]
    schemes = {
        out / "kv-overlay": "kv-overlay",
        out / "kv-overlay-head": "kv-overlay-head",
        out / checkpoint: written["quantize"]["scheme"],
        exported / "kv-overlay": "kv-overlay",
        quantized: "w8a16",
        extracted: "kv-overlay",
    }
    for folder, scheme in schemes.items():
        card = read(folder)
        assert card.data.to_dict() == {
            "base_model": "tiny",
            "base_model_relation": "quantized",
            "quantized_by": "fp8calib",
            "scheme": scheme,
            "license": "other",
            "license_name": "tiny-licence",
            "license_link": "LICENSE",
            "language": ["en", "de"],
            "tags": ["tiny", "chat"],
            "pipeline_tag": "text-generation",
        }
        assert "own card" not in card.text
        assert f"# {folder.name}" in card.text
        assert f"vllm serve {folder.name}" in card.text
        assert str(tmp_path) not in card.text
    made = " ".join(
        ("fp8calib calibrate tiny --data calib.jsonl", *map(str, QUICK), "--recipe w8a8-static")
    )
    assert f"{made} {' '.join(formats)} --out all\n" in read(out / checkpoint).text
    assert {f"{checkpoint}/README.md", "kv-overlay/README.md"} <= set(written["files"])
    for result in (written["quantize"], fp8, extract):
        assert "README.md" in result["files"]


def test_a_model_of_the_hub_is_named_by_its_id(
    carded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(carded, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for number, name in enumerate(("org/tiny", snapshot)):
        out = tmp_path / f"out{number}"
        succeed("quantize", name, "--scheme", "w8a16", "--out", out)
        data = read(out).data
        assert (data.base_model, data.license) == ("org/tiny", "other")
    assert "fp8calib quantize org/tiny --scheme w8a16 --out out0" in read(tmp_path / "out0").text


def test_a_model_in_memory_has_a_card_without_commands(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 -- slow

    remember_arguments(())  # of the commands before it in this process
    live = AutoModelForCausalLM.from_pretrained(model)
    with pytest.warns(fp8calib.Fp8CalibWarning, match="no tokenizer"):
        fp8calib.quantize(live, "w8a16", tmp_path / "out", check=False)
    card = read(tmp_path / "out")
    assert card.data.base_model == "tiny-llama"
    assert "Made by" not in card.text
