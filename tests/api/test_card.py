"""`card`: what it says is what is recorded, and the same inputs give the same bytes."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.cli.conftest import save_tokenizer
from tests.cli.program import fail, run, succeed

BASE = "org/tiny-llama"
QUICK = ("--samples", 8, "--seq-len", 16, "--dtype", "float32", "--batch-size", 8)


@pytest.fixture(scope="module")
def made(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantize and verify a model, and calibrate files of scales of it."""
    folder = tmp_path_factory.mktemp("made")
    formats = ("--format", "kv-scales", "kv-overlay", "--out", folder / "scales")
    succeed("calibrate", model, "--data", data, *QUICK, *formats)
    stats, quantized = folder / "scales" / "stats.safetensors", folder / "fp8"
    scheme = ("--scheme", "fp8-dynamic", "--stats", stats, "--out", quantized)
    succeed("quantize", model, *scheme)
    held_out = folder / "held-out.jsonl"
    held_out.write_text("\n".join(data.read_text().splitlines()[30:]))
    asked = ("--scales", quantized, "--data", held_out, *QUICK, "--gate", "w8a8")
    (folder / "loss.json").write_text(run("verify", model, *asked, "--json").out)
    pack = folder / "pack"
    pack.mkdir()
    shutil.move(folder / "scales" / "kv_scales.safetensors", pack)
    return folder


def read_front_matter(text: str) -> Any:
    _, matter, _ = text.split("---\n", 2)
    return yaml.safe_load(matter)


def test_the_card_of_a_checkpoint_has_its_figures_and_hashes(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, folder = json.loads((made / "loss.json").read_text()), made / "fp8"
    options = ("--base-model", BASE, "--repo", "me/tiny-llama-FP8")
    options += ("--verify-report", made / "loss.json")
    outcome = succeed("card", folder, *options)
    assert outcome.out.splitlines()[-1].strip() == f"hf upload me/tiny-llama-FP8 {folder}"
    text = (folder / "README.md").read_text()
    matter = read_front_matter(text)
    own = report["candidates"][0]
    (index,) = matter.pop("model-index")
    assert index["name"] == "tiny-llama-FP8"
    figures = {each["type"]: each["value"] for each in index["results"][0]["metrics"]}
    assert figures["perplexity-ratio"] == round(own["ppl_ratio"], 6)
    assert figures["kl-divergence"] == round(own["kld_mean"], 6)
    names = {each["type"]: each["name"] for each in index["results"][0]["metrics"]}
    assert all("emulated" in name for name in names.values())
    assert f"(standard error {own['kld_se']:.2g})" in names["kl-divergence"]
    assert f"(standard error {own['ppl_ratio_se']:.2g})" in names["perplexity-ratio"]
    assert matter == {
        "pipeline_tag": "text-generation",
        "base_model": BASE,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["fp8", "fp8calib", "compressed-tensors"],
    }
    assert f"## Loss, emulated as {report['engine_version']} computes\n" in text
    assert "the engine itself did not run" in text
    assert "warning: no licence is known" in outcome.err
    assert re.search(r"with FP8 weights \((fp8|w8a16)[\w-]*: weights per ", text)
    assert report["warnings"]
    for warning in report["warnings"]:
        assert f"> **Warning:** {warning}\n" in text
    (row,) = re.findall(r"^\| \*\*this\*\* \|.*$", text, re.M)
    assert f"{own['ppl_ratio']:.4f} ± {own['ppl_ratio_se']:.4f}" in row
    assert row.startswith(f"| **this** | {own['verdict']} (w8a8), with warnings | ")
    share, tokens = own["top1_agreement"], report["tokens"]
    error = (share * (1 - share) / tokens) ** 0.5
    assert f"{share:.2%} ± {error:.2%}" in row
    assert f"(standard error {error:.2g})" in names["top-1-agreement"]
    assert "vllm serve me/tiny-llama-FP8 --kv-cache-dtype fp8" in text
    files = [path for path in folder.iterdir() if path.name != "README.md"]
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert re.search(rf"^\| `{re.escape(path.name)}` \| .* \| `{digest[:16]}` \|$", text, re.M)
    assert str(made.parent) not in text
    before = text.encode()
    fail(2, "card", folder, *options)
    succeed("card", folder, *options, "--force")
    assert (folder / "README.md").read_bytes() == before
    monkeypatch.chdir(folder)
    succeed("card", ".", *options, "--force")
    assert (folder / "README.md").read_bytes() == before


def test_a_report_of_verify_is_the_loss_of_an_overlay(
    made: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    overlay = made / "scales" / "kv-overlay"
    command = ("verify", model, "--scales", overlay, f"--data={data}", *QUICK, "--json")
    printed = succeed(*command)
    asked = printed.json["provenance"]
    asked["command"] += " --server http://10.1.2.3:8000/v1 --reference-server=https://me:key@host"
    (tmp_path / "loss.json").write_text(json.dumps({**printed.json, "provenance": asked}))
    succeed("card", overlay, "--base-model", BASE, "--verify-report", tmp_path / "loss.json")
    text = (overlay / "README.md").read_text()
    for candidate in printed.json["candidates"]:
        assert f"{candidate['ppl_ratio']:.4f} ± {candidate['ppl_ratio_se']:.4f}" in text
    assert "KV cache at scale 1.0" in text
    assert printed.json["provenance"]["data_hash"][:16] in text
    assert f"--data={data.name} " in text
    for warning in printed.json["warnings"]:
        assert f"> **Warning:** {warning}\n" in text
    assert str(data.parent) not in text
    assert "--server URL --reference-server=URL" in _unwrap(text)
    # a report of something else is refused
    message = fail(2, "card", made / "pack", *_base(), "--verify-report", tmp_path / "loss.json")
    assert "none of its candidates is" in message
    other = {**printed.json, "provenance": {**printed.json["provenance"], "model_hash": "0" * 64}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    report = ("--verify-report", tmp_path / "other.json", "--force")
    assert "another model" in fail(4, "card", overlay, *_base(), *report)


def test_the_card_has_the_types_of_the_cache_that_were_compared(data: Path, tmp_path: Path) -> None:
    model, overlay = tmp_path / "model", tmp_path / "mine" / "kv-overlay"
    zoo.save("llama", model, head_dim=64)
    save_tokenizer(model)
    succeed("calibrate", model, "--data", data, *QUICK, "--out", tmp_path / "mine")
    types = ("--kv-cache-dtype", "fp8_e5m2,int8_per_token_head", "--kv-memory", "4GiB")
    asked = ("verify", model, "--scales", overlay, "--data", data, *QUICK, *types, "--gpu", "h100")
    printed = succeed(*asked, "--json")
    (tmp_path / "loss.json").write_text(printed.out)
    report = ("--verify-report", tmp_path / "loss.json", "--force")
    succeed("card", overlay, "--base-model", BASE, *report)
    text = (overlay / "README.md").read_text()
    assert "The KV cache, in each type that was compared for H100 (sm_90)." in text
    _, _, table = text.partition("bytes a token")
    table, _, _ = table.partition("## Engines")
    for one in printed.json["candidates"]:
        cache = one["kv_cache"]
        assert cache["tokens"] == int(4 * 2**30 / cache["bytes_per_token"])
        row = f"{cache['bytes_per_token']:,.0f} | {cache['tokens']:,} | "
        assert row in re.sub(" +", " ", table)
    assert "| **this** " in table
    assert "| `int8_per_token_head` " in table
    assert "triton_attn" in table
    assert str(tmp_path) not in table


def test_how_calibrate_made_an_overlay_is_read_from_its_report(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "scales", tmp_path / "out")
    overlay = tmp_path / "out" / "kv-overlay"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    succeed("card", overlay, *_base(), "--force")
    text = (overlay / "README.md").read_text()
    assert "* Calibrated on 128 tokens of " in text
    assert ", in sequences of 16\n" in text
    assert re.search(
        r"^fp8calib calibrate tiny-llama --data \S+\.jsonl .*--out scales$", _unwrap(text), re.M
    )
    assert all(len(line) <= 76 for line in text.splitlines() if line.startswith("    --"))
    assert str(made.parent) not in text
    for files, command in ((["other/config.json"], ""), (report["files"], "calibrate it's")):
        edited = {**report, "files": files, "command": command}
        (tmp_path / "out" / "report.json").write_text(json.dumps(edited))
        succeed("card", overlay, *_base(), "--force")
        text = (overlay / "README.md").read_text()
        assert ("Calibrated on" in text) is bool(command)
        assert ("\ncalibrate 'it'\"'\"'s'\n" in text) is bool(command)


def test_a_folder_that_no_engine_uses_is_a_warning(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "scales" / "kv-overlay", folder)
    assert "none of" not in succeed("card", folder, *_base(), "--force").err
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if scales := [name for name in tensors if name.endswith(".k_scale")]:
            del tensors[scales[0]]
            save_file(tensors, file)
    err = succeed("card", folder, *_base(), "--force").err
    assert f"warning: none of vllm, sglang uses all of {folder}: see" in err
    assert "## How it was made\n\nNot recorded.\n" in (folder / "README.md").read_text()
    (folder / "config.json").unlink()
    message = fail(4, "card", folder, *_base(), "--force")
    assert "holds weights (" in message
    assert "no config.json" in message


def test_files_of_scales_have_a_card_too(made: Path, model: Path) -> None:
    pack = made / "pack"
    succeed("card", pack, *_base())
    text = (pack / "README.md").read_text()
    assert "library_name" not in read_front_matter(text)
    assert "Not measured." in text
    assert "`fp8calib check FILE --model MODEL` tells" in text
    commands = r"^fp8calib (extract-kv-scales .*) MODEL --save-path OUT$"
    (command,) = re.findall(commands, _unwrap(text), re.M)
    assert command == "extract-kv-scales --quantized-model YOUR-NAME/pack --model"
    succeed("card", pack, *_base(), "--model", model, "--force")
    assert "| vllm |" in (pack / "README.md").read_text()


def test_an_engine_that_does_not_use_the_folder_has_a_reason_from_any_place(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.save("opt", tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    formats = ("--format", "kv-overlay", "--out", tmp_path / "scales")
    succeed("calibrate", tmp_path / "base", "--data", data, *QUICK, *formats)
    folder = (tmp_path / "scales" / "kv-overlay").rename(tmp_path / "model")
    command = ("--force", *_base(), "--repo", "me/x")
    written = []
    for place, name in ((tmp_path, "model"), (folder, "."), (tmp_path / "base", folder)):
        monkeypatch.chdir(place)
        succeed("card", name, *command)
        written.append((folder / "README.md").read_text())
    assert len(set(written)) == 1
    assert re.search(r"\| sglang \|.* no \|.*accepts only model\.decoder\.layers\.0\.", written[0])


def test_a_folder_with_spaces_gets_a_hub_id_and_a_quoted_upload(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's ünï (1)"
    shutil.copytree(made / "pack", folder, ignore=shutil.ignore_patterns("README.md"))
    upload = succeed("card", folder, *_base(), "--json").json["upload"]
    assert shlex.split(upload) == ["hf", "upload", "YOUR-NAME/it-s-n-1", str(folder)]


def test_a_folder_of_several_formats_names_them(made: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "all"
    formats = ("--format", "kv-overlay,tgi,vllm-json", "--model", model, "--out", out)
    succeed("export", made / "scales" / "stats.safetensors", *formats)
    message = fail(2, "card", out, *_base())
    assert f"{out}: not a checkpoint: it holds kv-overlay, tgi, and each has a card" in message
    assert f"name the one to publish, such as {out / 'kv-overlay'}" in message
    succeed("card", out / "tgi", *_base())


def test_what_cannot_be_published_is_refused(made: Path, model: Path, tmp_path: Path) -> None:
    assert "holds statistics" in fail(2, "card", made / "scales", *_base())
    assert "neither FP8 weights nor KV scales" in fail(2, "card", model, *_base())
    assert "no such folder" in fail(2, "card", tmp_path / "none", *_base())
    pack = ("card", made / "pack", "--force")
    assert "no Hub id of the unquantized model" in fail(2, *pack)
    assert "--base-model tiny" in fail(2, *pack, "--base-model", "tiny")
    assert "--repo a/b/c" in fail(2, *pack, *_base(), "--repo", "a/b/c")


def test_a_card_is_not_written_through_a_link(made: Path, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("another card")
    pack = tmp_path / "pack"
    shutil.copytree(made / "pack", pack, ignore=shutil.ignore_patterns("README.md"))
    (pack / "README.md").symlink_to(tmp_path / "other.md")
    assert "a symbolic link" in fail(2, "card", pack, *_base(), "--force")
    assert (tmp_path / "other.md").read_text() == "another card"


def _unwrap(text: str) -> str:
    """Join the lines of a command that goes on in the next one."""
    return re.sub(r" \\\n +", " ", text)


@pytest.mark.parametrize("place", ["model", "folder"])
def test_licence_and_task_are_those_of_the_model(
    made: Path, model: Path, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "pack"
    shutil.copytree(made / "pack", folder, ignore=shutil.ignore_patterns("README.md"))
    shutil.copytree(model, tmp_path / "base")
    matter = {
        "license": "other",
        "license_name": "mine",
        "license_link": "https://example.com",
        "pipeline_tag": "image-text-to-text",
        "datasets": ["not taken"],
    }
    readme = (tmp_path / "base" if place == "model" else folder) / "README.md"
    readme.write_text(f"---\n{yaml.safe_dump(matter)}---\n# Base\n")
    command = ("card", folder, *_base(), "--model", tmp_path / "base", "--force")
    outcome = succeed(*command, "--quantized-by", "me")
    assert "no licence" not in outcome.err
    found = read_front_matter((folder / "README.md").read_text())
    assert {key: found[key] for key in matter if key != "datasets"} == {
        key: value for key, value in matter.items() if key != "datasets"
    }
    assert found["quantized_by"] == "me"
    assert "datasets" not in found


@pytest.mark.parametrize("text", ["", "---\n", "---\n: [\n---\n", "---\n- a\n---\n", "\x00"])
def test_a_readme_without_readable_front_matter_gives_no_licence(
    made: Path, tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "pack"
    shutil.copytree(made / "pack", folder, ignore=shutil.ignore_patterns("README.md"))
    (folder / "README.md").write_text(text)
    assert "no licence is known" in succeed("card", folder, *_base(), "--force").err


def _base() -> tuple[str, str]:
    return ("--base-model", BASE)


def test_the_layers_of_a_checkpoint_are_those_of_the_model(made: Path, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "deeper", num_hidden_layers=4)
    folder = tmp_path / "kv-overlay"
    shutil.copytree(made / "scales" / "kv-overlay", folder)
    succeed("card", folder, "--base-model", BASE, "--model", tmp_path / "deeper", "--force")
    assert "2 of 4 layers" in (folder / "README.md").read_text()
