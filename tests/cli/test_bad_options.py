"""Options that cannot be: one message, the right exit code, nothing written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import QUICK
from tests.cli.program import fail, snapshot

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "nonsense"], "--format nonsense: unknown format"),
        (["--format", "rfc", "nonsense"], "nonsense"),
        (["--format", "vllm-json", "--tp", "0"], "--tp 0"),
        (["--format", "vllm-json", "--tp", "-2"], "--tp -2"),
        (
            ["--format", "vllm-json", "--tp", "3"],
            "does not divide the 4 attention heads of layer 0",
        ),
        (["--format", "rfc", "--tp", "8"], "does not divide the 4 attention heads"),
        (["--rule", "guess"], "--rule: unknown rule 'guess'; known: amax, percentile:P (0 < P"),
        (["--rule", "percentile:nan"], "--rule: rule 'percentile:nan': its number is not in 0 < P"),
        (["--rule", "headroom"], "--rule: rule 'headroom': needs a number, 1 <= H <= 1024"),
        (
            ["--fallback", "guess"],
            "--fallback guess: must be layer-max, one or refuse",
        ),
        (["--fp8-dtype", "int8"], "--fp8-dtype int8: must be e4m3fn or e4m3fnuz"),
        (["--dtype", "int8"], "--dtype int8: not one of auto, float32, bfloat16, float16"),
        (["--device", "tpu"], "--device tpu: not auto, cpu, cuda or cuda:N"),
        (["--device-map", "balanced"], "--device-map balanced: must be auto"),
        (["--seq-len", "129"], "above the model's maximum of 128 positions"),
        (["--recipe", "w8a16", "--format", "rfc"], "does not observe K and V"),
        (["--recipe", "w8a8-dynamic", "--format", "rfc"], "needs inputs and weights"),
        (["--recipe", "w8a16", "--query-scale", "yes"], "does not observe q"),
        (["--format", "rfc", "--query-scale", "yes", "--dry-run"], "rfc cannot hold q_scale"),
    ],
)
def test_a_value_that_makes_no_sense(
    refused: Refused, model: Path, options: list[str], says: str
) -> None:
    text = refused(2, model, *options)
    assert says in text
    assert "Input should be" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there(refused: Refused, model: Path, device: str) -> None:
    text = refused(2, model, "--device", device)
    assert f"--device {device}: this machine has 0 CUDA devices" in text


def test_a_degree_that_does_not_divide_the_mlp(refused: Refused, tmp_path: Path) -> None:
    from tests import zoo  # noqa: PLC0415 -- torch is slow to import

    zoo.save("llama", tmp_path / "odd", intermediate_size=50)
    options = ("--format", "rfc", "--tp", 4)
    text = refused(2, tmp_path / "odd", *options)
    assert "--tp 4 does not divide the 50 channels" in text


# --- recipes -----------------------------------------------------------------------------------


def test_an_unknown_recipe(refused: Refused, model: Path) -> None:
    text = refused(3, model, "--recipe", "no-such")
    assert "no-such is neither a shipped recipe nor a file" in text
    assert "w8a8-static" in text


def test_every_error_of_a_recipe_is_told_at_once(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nobserv: {}\ndata: {samples: many, pack: [1]}\nscales: {rule: guess}\n"
    )
    text = refused(3, model, "--recipe", path)
    for told in (
        "observ: unknown key",
        "data.samples: must be a valid integer, not 'many'",
        "data.pack: must be a valid boolean, not [1]",
        "scales.rule: unknown rule 'guess'",
    ):
        assert told in text
    assert str(path) in text


@pytest.mark.parametrize("content", ["{", "a: b: c", "\tname: x", "@"])
def test_a_recipe_that_is_no_yaml(
    refused: Refused, model: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    assert "mine.yaml is not YAML: line 1" in refused(3, model, "--recipe", tmp_path / "mine.yaml")


@pytest.mark.parametrize("content", ["", "- kv", "kv"])
def test_a_recipe_that_is_no_mapping(
    refused: Refused, model: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    assert "is not a mapping of keys" in refused(3, model, "--recipe", tmp_path / "mine.yaml")


def test_a_recipe_that_is_no_text(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff\xfe")
    assert "cannot be read as UTF-8" in refused(3, model, "--recipe", tmp_path / "mine.yaml")


def test_a_recipe_that_is_a_folder(refused: Refused, model: Path, tmp_path: Path) -> None:
    refused(3, model, "--recipe", tmp_path)


@pytest.mark.parametrize("pattern", ["*.no_such_module", "re:no_such.*", "model.layers.9.mlp"])
def test_a_pattern_that_matches_nothing(
    refused: Refused, model: Path, tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\nobserve: {{ignore: ['{pattern}']}}\n")
    text = refused(3, model, "--recipe", tmp_path / "mine.yaml")
    assert f"'{pattern}' matches no module" in text
    assert "model.layers.0." in text


def test_a_pattern_that_is_no_regular_expression(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nobserve: {ignore: ['re:(']}\n")
    text = refused(3, model, "--recipe", tmp_path / "mine.yaml")
    assert "is not a regular expression" in text


def test_a_recipe_whose_format_is_unknown(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nformats: [nonsense]\n")
    assert "nonsense" in refused(3, model, "--recipe", tmp_path / "mine.yaml")


# --- the output --------------------------------------------------------------------------------


def test_an_output_that_is_a_file(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "a file, not a folder" in refused(2, model, "--out", tmp_path / "file")


def test_an_output_below_a_file(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused(2, model, "--out", tmp_path / "file" / "out")


def test_an_output_that_holds_something(refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert "thesis.tex" in refused(2, model, "--out", tmp_path / "out")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Give a function that mounts a small file system of its own; needs root."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        folder = tmp_path.with_name(f"{tmp_path.name}-mount")
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            folder.rmdir()
            pytest.skip("mounting is not allowed here")
        mounted.append(folder)
        return folder

    yield mount_tmpfs
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_an_output_that_cannot_be_written(
    refused: Refused, model: Path, mount: Callable[[str], Path]
) -> None:
    folder = mount("ro")
    for out in (folder, folder / "out"):
        assert "cannot be written" in refused(2, model, "--out", out)


def test_a_disk_that_is_full(model: Path, data: Path, mount: Callable[[str], Path]) -> None:
    folder = mount("size=32k")
    for out in (folder, folder / "out"):
        text = fail(7, "calibrate", model, "--data", data, *QUICK, "--out", out)
        assert "No space left on device" in text
        assert "free" in text
        assert snapshot(folder) == {}
