"""The examples of docs/extending.md, executed."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fp8calib.calibration.calibration_stats import load_stats_file
from fp8calib.commands import find_request, spell_commands
from fp8calib.engines.registry import ENGINES, register_engine
from fp8calib.formats import registry
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.fp8.checkpoint import Fp8Checkpoint
from fp8calib.formats.fp8.registry import FP8_DIALECTS
from fp8calib.formats.read import read_scales
from fp8calib.model.geometry import KV_ROLES
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import SCHEMES, Granularity
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import fail, run, succeed
from tests.cli.quantized_children import calibrate_base
from tests.formats.foreign import FOLDER, find_geometry
from tests.kit.apart import run_apart
from tests.quantization.by_hand import codes_of, encode, scale_for, to_numpy

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


def example(heading: str) -> str:
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_page_has_its_sections() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings == [
        "A plug-in",
        "A dialect",
        "A dialect of FP8 weights",
        "An engine",
        "A scheme",
        "A type of the KV cache",
        "A command",
        "Did it work?",
    ]


@pytest.fixture(scope="module", autouse=True)
def _options() -> None:
    """Make all options before a test registers more: their help lists what is registered."""
    for command in spell_commands().values():
        find_request(command)


@pytest.fixture
def _block_weights() -> Iterator[None]:
    """Declare the example's scheme for one test."""
    with mock.patch.dict(SCHEMES):
        exec(example("A scheme"), {})  # noqa: S102 -- the page's own code
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a llama whose weights end inside a block of 64 x 64."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 96}
    zoo.save("llama", tmp_path / "model", **sizes)
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.usefixtures("_block_weights")
def test_a_scheme_is_quantized_read_back_and_verified(model: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.1.mlp.down_proj.weight"
    command = ("quantize", model, "--scheme", "w8a16-block", "--out", out, "--json")
    command = (*command, "--allow-unservable")
    report = succeed(*command).json
    assert report["scheme"] == "w8a16-block"

    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert group["group_0"]["weights"]["block_structure"] == [64, 64]
    assert group["group_0"]["input_activations"] is None
    weight = to_numpy(load_file(model / "model.safetensors")[name])
    corners = [(row, column) for row in (0, 64) for column in (0, 64, 128)]
    blocks = {(i, j): weight[i : i + 64, j : j + 64] for i, j in corners}
    scales = {at: scale_for(np.abs(block).max()) for at, block in blocks.items()}
    stored = load_file(out / "model.safetensors")
    assert stored[f"{name}_scale"].tolist() == [
        [scales[row, column] for column in (0, 64, 128)] for row in (0, 64)
    ]
    codes = codes_of(stored[name])
    for (i, j), block in blocks.items():
        expected = encode(block, scales[i, j])
        np.testing.assert_array_equal(codes[i : i + 64, j : j + 64], expected)

    with Fp8Checkpoint.open(out, fuse=False) as checkpoint:
        assert checkpoint.scheme(name).weights is Granularity.BLOCK
        error = np.abs(checkpoint.read(name).numpy() - weight)
        assert 0 < error.max() <= max(scales.values()) * 16
    quick = ("--data", "builtin", "--samples", 2, "--seq-len", 16, "--dtype", "float32", "--json")
    verify = ("verify", model, *quick, "--engine", "reference")
    written = succeed(*verify, "--scales", out).json["candidates"][0]
    emulated = succeed(*verify, "--scheme", "w8a16-block").json["candidates"][0]
    assert 0 < written["kld_mean"] == pytest.approx(emulated["kld_mean"], rel=1e-3)


@pytest.mark.parametrize(
    ("heading", "command", "shown"),
    [
        ("A scheme", "quantize", "w8a16-block"),
        ("A scheme", "verify", "w8a16-block"),
        ("A dialect of FP8 weights", "quantize", "slate(fp8-dynamic);"),
    ],
)
def test_a_scheme_and_an_fp8_dialect_are_in_the_help(
    heading: str, command: str, shown: str
) -> None:
    show = "from fp8calib.cli import main\nimport sys\nmain([sys.argv[1], '--help'])"
    program = [sys.executable, "-c", f"{example(heading)}\n{show}", command]
    ran = subprocess.run(program, capture_output=True, text=True, check=True)
    assert shown in "".join(ran.stdout.split())


@pytest.fixture
def _slate() -> Iterator[None]:
    """Register the page's dialect of FP8 weights for one test."""
    with mock.patch.dict(FP8_DIALECTS):
        exec(example("A dialect of FP8 weights"), {})  # noqa: S102 -- the page's own code
        yield


@pytest.mark.usefixtures("_slate")
def test_a_registered_fp8_dialect_is_written_read_and_verified(model: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.1.mlp.down_proj.weight"
    command = ("quantize", model, "--format", "slate", "--out", out, "--scheme")
    hint = fail(2, *command, "w8a16")
    assert "slate writes fp8-dynamic; w8a16 can be written as compressed-tensors" in hint
    succeed(*command, "fp8-dynamic")

    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "slate", "skip": ["lm_head", "model.embed_tokens"]}
    weight = to_numpy(load_file(model / "model.safetensors")[name])
    stored = load_file(out / "model.safetensors")
    assert stored[f"{name}_step"].tolist() == [scale_for(np.abs(row).max()) for row in weight]
    assert not any("scale" in each for each in stored)

    with Fp8Checkpoint.open(out, fuse=False) as checkpoint:
        assert checkpoint.dialect.name == "slate"
        steps = stored[f"{name}_step"].double()[:, None]
        exact = stored[name].double() * steps
        assert torch.equal(checkpoint.read(name), exact.float())
    quick = ("--data", "builtin", "--samples", 2, "--seq-len", 16, "--dtype", "float32", "--json")
    verified = succeed("verify", model, *quick, "--engine", "reference", "--scales", out).json
    assert "slate checkpoint" in verified["candidates"][0]["description"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the page's plug-in as a wheel, outside the tree; give the folder."""
    source = tmp_path_factory.mktemp("source") / "fp8calib-acme"
    package, found = source / "fp8calib_acme", source.parent / "installed"
    package.mkdir(parents=True)
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (source / "pyproject.toml").write_text(toml)
    (package / "__init__.py").write_text(example("A plug-in"))
    (package / "acme.py").write_text(example("A dialect"))
    (package / "quill.py").write_text(example("An engine"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    options = ("--no-deps", "--no-build-isolation", "--target", found)
    subprocess.run([*pip, *options, source], check=True)
    return found


def test_a_plug_in_outside_the_tree_brings_a_dialect_and_an_engine(
    installed: Path, tmp_path: Path
) -> None:
    model, acme = FOLDER / "llama", tmp_path / "acme"
    stats = calibrate_base(tmp_path) / "stats.safetensors"
    extract = ("extract-kv-scales", "--model", model, "--quantized-model", acme)
    found = run_apart(
        ("export", "--help"),
        ("check", "--help"),
        ("export", stats, "--format", "acme", "--out", acme),
        (*extract, "--save-path", tmp_path / "back", "--format", "kv-overlay", "--json"),
        ("check", tmp_path / "back", "--engine", "quill", "--json"),
        PYTHONPATH=os.pathsep.join([str(installed), str(ROOT)]),
    )
    assert not [each.err for each in found if each.code]
    export, check, _, extracted, judged = (each.out for each in found)
    assert "lightllm,lightllm-head,acme." in "".join(export.split())
    assert "transformers,lightllm,quill;defaultvllm,sglang." in "".join(check.split())
    assert json.loads(extracted)["dialect"] == "acme"
    checked = json.loads(judged)
    expected = {float(scale) for scale in load_file(acme / "acme.safetensors").values()}
    layers = checked["engines"]["quill"]["layers"]
    assert {row[role]["value"] for row in layers for role in "kv"} == expected


@contextmanager
def imported(name: str, heading: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Import an example of the page from a file of its own; give the folder of the file."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(example(heading))
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, name, raising=False)
    with mock.patch.dict(registry._dialects), mock.patch.dict(ENGINES):
        module = importlib.import_module(name)
        if name == "acme":
            registry.register_dialect(module.ACME)
        else:
            register_engine(module.QUILL)
        yield folder


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Register the page's dialect for one test."""
    with imported("acme", "A dialect", tmp_path / "extension", monkeypatch) as folder:
        yield folder


@pytest.mark.usefixtures("acme")
def test_a_registered_dialect_is_written_read_shown_and_converted(tmp_path: Path) -> None:
    model = FOLDER / "llama"
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(3, 35))}])
    out = tmp_path / "out"
    command = ("calibrate", model, "--data", rows, "--dtype", "float32", "--out", out)
    succeed(*command, "--format", "kv-scales", "acme")
    stats = load_stats_file(out / "stats.safetensors")
    table = compute_kv_scales(stats, E4M3FN)
    expected = {
        f"{layer.index}.{name}": float(table.scales[attention.site(role)].values)
        for layer, attention in stats.geometry.attentions()
        for role, name in zip(KV_ROLES, ("key_step", "value_step"), strict=True)
    }
    assert len(set(expected.values())) == 4

    export = ("export", out / "stats.safetensors", "--out")
    succeed(*export, tmp_path / "b", "--format", "acme")
    assert (tmp_path / "b/acme.safetensors").read_bytes() == (out / "acme.safetensors").read_bytes()
    hint = fail(2, *export, tmp_path / "c", "--format", "acme", "--fp8-dtype", "e4m3fnuz")
    assert "acme: it has no scales for e4m3fnuz" in hint

    shown = json.loads(succeed("show", tmp_path / "b/acme.safetensors", "--json").out)["scales"]
    assert shown == {name: [value] for name, value in expected.items()}

    extract = ("extract-kv-scales", "--model", model, "--quantized-model")
    saved = ("--json", "--save-path")
    there = succeed(
        *extract, out / "kv_scales.safetensors", *saved, tmp_path / "d", "--format", "acme"
    )
    assert (there.json["dialect"], there.json["format"]) == ("kv-scales", "acme")
    back = succeed(*extract, tmp_path / "d", *saved, tmp_path / "e", "--format", "kv-scales")
    assert (back.json["dialect"], back.json["files"]) == ("acme", ["kv_scales.safetensors"])
    again = read_scales(tmp_path / "e", stats.geometry)
    assert {site: scale.values.tolist() for site, scale in again.scales.items()} == {
        site: scale.values.tolist() for site, scale in table.scales.items()
    }


@pytest.mark.usefixtures("acme")
def test_a_name_is_registered_once() -> None:
    (acme,) = (dialect for dialect in registry.list_read() if dialect.name == "acme")
    with pytest.raises(ValueError, match="a dialect called acme is registered already"):
        registry.register_dialect(acme)


@pytest.fixture
def quill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Register the page's engine for one test."""
    with imported("quill", "An engine", tmp_path / "extension", monkeypatch) as folder:
        yield folder


def explain(path: Path, *options: object) -> str:
    """Give what `check` prints of the page's engine."""
    return " ".join(run("check", path, "--engine", "quill", *options).out.split())


@pytest.mark.usefixtures("quill")
def test_a_registered_engine_is_offered_checked_and_emulated(tmp_path: Path) -> None:
    model = FOLDER / "llama"
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(3, 35))}])
    out = tmp_path / "out"
    command = ("calibrate", model, "--data", rows, "--dtype", "float32", "--out", out)
    succeed(*command, "--format", "kv-overlay", "tgi", "vllm-json")
    assert "quill looks only for k_scale and v_scale" in explain(out / "tgi")
    assert "Quill reads no JSON of scales" in explain(
        out / "kv_cache_scales.tp1.json", "--model", model
    )

    checked = succeed("check", out / "kv-overlay", "--engine", "quill", "--json").json
    layers = checked["engines"]["quill"]["layers"]
    scales = read_scales(out / "kv-overlay", find_geometry("llama")).scales
    assert {row["k"]["value"] for row in layers} <= {float(s.values) for s in scales.values()}
    assert len(layers) == 2
    assert "quill" not in succeed("check", out / "kv-overlay", "--json").json["engines"]

    verify = ("verify", model, "--scales", out / "kv-overlay", "--data", rows, "--dtype", "float32")
    rounded = {
        engine: succeed(*verify, "--engine", engine, "--json").json for engine in ("quill", "vllm")
    }
    assert rounded["quill"]["engine"] == "quill"
    assert rounded["quill"]["engine_version"] == "Quill 2.1"
    noise = {
        engine: {row["site"]: row["sqnr_db"] for row in found["layers"] if row["site"][-2:] == ".k"}
        for engine, found in rounded.items()
    }
    assert all(sqnr < noise["vllm"][site] - 3 for site, sqnr in noise["quill"].items())


@pytest.mark.usefixtures("quill")
def test_a_weight_rule_of_a_registered_engine_is_applied(model: Path, tmp_path: Path) -> None:
    quantize = ("quantize", model, "--json", "--out", tmp_path / "out", "--scheme")
    succeed(*quantize, "fp8-block", "--allow-unservable")
    assert "it has no kernel for scales of blocks" in explain(tmp_path / "out")
    succeed(*quantize, "fp8-dynamic", "--force")
    assert explain(tmp_path / "out").startswith(f"{tmp_path / 'out'}: ok")
